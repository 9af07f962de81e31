#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "dlattn/types.h"
#include "dlpack_abi.h"

namespace dlattn::python {

namespace nb = nanobind;

constexpr int kMaxDims = 8;
constexpr dlpack::DLDataType kFloat32{dlpack::kFloat, 32, 1};

// A tensor of the caller, as its exporter described it: checked, and copied so that the exporter
// can change nothing of it.
struct Tensor {
  const char* name = "";  // the argument it came in as
  void* data = nullptr;
  dlpack::DLDataType dtype{};
  Device device;
  int ndim = 0;
  std::int64_t shape[kMaxDims];    // the first ndim
  std::int64_t strides[kMaxDims];  // in elements
  bool read_only = false;
  bool is_copy = false;  // of the object, which writing to it does not reach
  nb::object owner;      // keeps the memory alive; null if the caller's own reference does
  // The object whose memory was read. It may be given other memory, which frees what was read: see
  // check_unchanged. Null if `owner` keeps the memory alive.
  nb::handle lender;
  const dlpack::ExchangeApi* api = nullptr;  // how `lender` was read; null: as a NumPy array
  // The CUDA stream after whose work the memory is ready; null: it is ready for this call's stream.
  void* ready_on = nullptr;
  bool may_run_code = false;  // reading it may run Python code; numpy.ndarray itself runs none

  std::int64_t num_elements() const;
};

void contiguous_strides(Tensor* tensor);  // sets them
// Copies sizes, refusing what no honest exporter says: of `data` that is set. An empty tensor's
// strides mean nothing, so they are replaced.
void set_layout(Tensor* tensor, int ndim, const std::int64_t* shape, const std::int64_t* strides);

std::string shape_text(const std::int64_t* shape, int ndim);  // "(2, 8, 64)"
std::string dtype_text(dlpack::DLDataType dtype);             // "float16", "uint8", ...
std::string device_text(Device device);                       // "cpu", "cuda:1"

bool same(dlpack::DLDataType a, dlpack::DLDataType b);
bool same(Device a, Device b);
dlpack::DLDataType to_dlpack(DType dtype);
dlpack::DLDevice to_dlpack(Device device);

// Throws if the device is not the accepted one, that of `whose`.
void check_device(const char* name, Device device, Device accepted, const char* whose);

// Pinned host memory counts as CPU, managed memory as CUDA. Throws for what is neither.
Device to_device(const char* name, dlpack::DLDevice device);
// The element type of attention; throws for any other, naming the `accepted` ones.
DType to_dtype(const Tensor& tensor, const char* accepted);

// The four ways in.
Tensor from_exchange_api(const dlpack::ExchangeApi& api, nb::handle object, const char* name,
                         bool owning);
Tensor from_array_struct(nb::handle array, const char* name);  // a numpy.ndarray
// An object with __cuda_array_interface__, as CudaArray.describe in dlattn.frameworks describes it.
// Without elements it counts as on the thread's current device.
Tensor from_cuda_array(nb::handle array, const nb::object& described, const char* name);
Tensor from_capsule(const nb::object& capsule,
                    const char* name);  // the result of __dlpack__; consumes it

// Any Python code that runs may give a lender other memory and so free what was read. Throws if one
// has other memory now. Call it when no more Python code will run.
void check_unchanged(const Tensor* first, const Tensor* last);

Tensor from_managed(dlpack::ManagedTensorVersioned* managed, const char* name);  // takes ownership

}  // namespace dlattn::python
