#pragma once

#include <nanobind/nanobind.h>

#include <string>

#include "dlattn/types.h"
#include "dlpack_abi.h"

namespace dlattn::python {

namespace nb = nanobind;

constexpr int kMaxDims = 8;

// A tensor of the caller's: what its exporter told of it, checked and copied out of the exporter's
// hands.
struct Tensor {
  const char* name = "";  // the argument it came in as
  void* data = nullptr;
  dlpack::DLDataType dtype{};
  Device device;
  int ndim = 0;
  std::int64_t shape[kMaxDims];    // the first ndim
  std::int64_t strides[kMaxDims];  // in elements
  bool read_only = false;
  nb::object owner;  // keeps the memory alive; none where the caller's own reference does
  // Whose memory this is as long as that object is not given other memory; null where `owner` keeps
  // it whatever happens to the object.
  nb::handle lender;
  const dlpack::ExchangeApi* api = nullptr;  // by which it was lent; null: as a NumPy array
  bool may_run_code = false;  // taking it in may run Python code, as NumPy's own arrays do not

  std::int64_t num_elements() const;
};

void contiguous_strides(Tensor* tensor);  // sets them

std::string shape_text(const std::int64_t* shape, int ndim);  // "(2, 8, 64)"
std::string dtype_text(dlpack::DLDataType dtype);             // "float16", "uint8", ...
std::string device_text(Device device);                       // "cpu", "cuda:1"

bool same(dlpack::DLDataType a, dlpack::DLDataType b);
bool same(Device a, Device b);
dlpack::DLDataType to_dlpack(DType dtype);
dlpack::DLDevice to_dlpack(Device device);

// Pinned host memory counts as CPU, managed memory as CUDA. Throws for what is neither.
Device to_device(const char* name, dlpack::DLDevice device);
// The element type of attention; throws for any other, naming the `accepted` ones.
DType to_dtype(const Tensor& tensor, const char* accepted);

// The three ways in.
Tensor from_exchange_api(const dlpack::ExchangeApi& api, nb::handle object, const char* name,
                         bool owning);
Tensor from_array_struct(nb::handle array, const char* name);  // a numpy.ndarray
Tensor from_capsule(const nb::object& capsule,
                    const char* name);  // what __dlpack__ returned; consumes it

// A tensor that is only lent may be given other memory by any Python code that runs, and the memory
// that was read freed. Throws if one was; to be called when no Python code will run any more.
void check_unchanged(const Tensor* first, const Tensor* last);

Tensor from_managed(dlpack::ManagedTensorVersioned* managed, const char* name);  // takes ownership

}  // namespace dlattn::python
