#pragma once

namespace dlattn::cuda {

// Makes `device` current to the calling thread for its lifetime, with a context, and then the
// thread's own again. Who needs a current device asks for a guard: launch_kernel, and
// encode_tensor_map, whose call of the driver does not make one by itself as the CUDA runtime's
// calls do. Costs one query if the device is current already. Legal while a stream is captured.
class DeviceGuard {
 public:
  // `kernel_name` is for messages, and kept by pointer.
  DeviceGuard(int device, const char* kernel_name);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

  int device() const { return device_; }
  const char* kernel_name() const { return kernel_name_; }

 private:
  int device_;
  const char* kernel_name_;
  bool changed_ = false;
  void* previous_ = nullptr;  // the thread's context where changed; null: it had none
};

// For its lifetime, lets the calling thread do what might break a capture of any stream under way,
// and does not here: load a kernel's code, make a device's context.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  int previous_;
};

}  // namespace dlattn::cuda
