#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

// Host memory, and a device allocation of exactly its size.
namespace test {

inline void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// A copy of host memory on the device, as far past a 16-byte boundary as the original.
class DeviceCopy {
 public:
  DeviceCopy(const void* host, std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    if (bytes == 0 || !host) return;
    offset_ = reinterpret_cast<std::uintptr_t>(host) % 16;
    require(cudaMalloc(&base_, offset_ + bytes_));
    require(cudaMemcpy(data(), host, bytes_, cudaMemcpyHostToDevice));
  }
  ~DeviceCopy() { cudaFree(base_); }
  DeviceCopy(const DeviceCopy&) = delete;

  void* data() const { return base_ ? static_cast<char*>(base_) + offset_ : nullptr; }
  void copy_back(void* host) const {
    if (base_) require(cudaMemcpy(host, data(), bytes_, cudaMemcpyDeviceToHost));
  }

 private:
  void* base_ = nullptr;
  std::size_t offset_ = 0, bytes_;
};

}  // namespace test
