#pragma once

#include <string>

#include "tensor.h"
#include "torch_abi.h"

// torch's functions and numbers, as this process's libtorch has them. They need no GIL.
namespace dlattn::python {

extern torch_abi::Functions torch_functions;  // after load_torch

// Looks the functions up in libtorch, which is loaded from `folder`. Returns why the operators
// cannot be native; empty if they can.
std::string load_torch(const std::string& folder);

// Throws if a function of torch's failed to do `what`.
void check_torch_error(torch_abi::Error error, const char* what);

// A tensor that is deleted when this goes.
class OwnedTensor {
 public:
  OwnedTensor() = default;
  explicit OwnedTensor(torch_abi::Tensor tensor) : tensor_(tensor) {}
  OwnedTensor(OwnedTensor&& other) noexcept : tensor_(other.release()) {}
  OwnedTensor& operator=(OwnedTensor&& other) noexcept;
  ~OwnedTensor();

  torch_abi::Tensor get() const { return tensor_; }
  torch_abi::Tensor release();

 private:
  torch_abi::Tensor tensor_ = nullptr;
};

// Describes a tensor of torch's, which stays its owner's. `to_write`: its memory will be written.
Tensor describe(torch_abi::Tensor tensor, const char* name, bool to_write = false);

// A new contiguous tensor; and one whose dimensions lie in memory in an order, the last one's
// elements side by side.
OwnedTensor empty_tensor(const char* name, const std::int64_t* sizes, int ndim, DType dtype,
                         Device device);
OwnedTensor empty_tensor(const char* name, const std::int64_t* sizes, const int* order, int ndim,
                         DType dtype, Device device);
OwnedTensor empty_strided(const char* name, const std::int64_t* sizes, const std::int64_t* strides,
                          int ndim, DType dtype, Device device);

void* current_cuda_stream(Device device);

}  // namespace dlattn::python
