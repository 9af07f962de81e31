#pragma once

#include <stdexcept>
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

// Torch did not give the memory of a tensor.
struct AllocationError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

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

// Throw AllocationError: a new contiguous tensor, which it describes without asking torch; and one
// whose dimensions lie in memory in an order, the last one's elements side by side.
OwnedTensor empty_tensor(const char* name, const std::int64_t* sizes, int ndim, DType dtype,
                         Device device, Tensor* described);
OwnedTensor empty_tensor(const char* name, const std::int64_t* sizes, const int* order, int ndim,
                         DType dtype, Device device);
// And one with these strides.
OwnedTensor empty_strided(const char* name, const std::int64_t* sizes, const std::int64_t* strides,
                          int ndim, DType dtype, Device device);
OwnedTensor empty_strided(const char* name, const std::int64_t* sizes, const std::int64_t* strides,
                          int ndim, dlpack::DLDataType dtype, Device device);

// A torch.Tensor of it. The GIL is held, and torch_functions.to_object is known.
nb::object object_of(const OwnedTensor& tensor);

// As torch.empty_like: dimensions lie in memory in the order of those of `like`.
OwnedTensor empty_like(const char* name, torch_abi::Tensor like);
OwnedTensor undefined_tensor();

void fill(const OwnedTensor& tensor, double number);
// tensor.nan_to_num_(nan=nan, posinf=inf, neginf=inf)
void make_infinities_positive(const OwnedTensor& tensor);

void* current_cuda_stream(Device device);
// Whether the stream's work is captured in a graph.
bool is_capturing(void* stream);

bool are_deterministic_algorithms_enabled();  // torch's

// Throws the exception that `raise.__float__()` raises, as torch's own. The GIL is held.
void throw_from_python(PyObject* raise);

// Threads of a call on the CPU: no more than torch's own kernel would have, nor than dlattn's.
int cpu_threads_of_torch();

}  // namespace dlattn::python
