#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "tensor.h"
#include "torch_functions.h"
#include "torch_state.h"

// The binding's knowledge of the caller's tensor library. Two kinds: types with DLPack's C exchange
// API are served without running any Python code; the others through an adapter object of
// dlattn.frameworks.
namespace dlattn::python {

struct TensorType {
  const dlpack::ExchangeApi* api = nullptr;  // null: use the adapter
  nb::object adapter;                        // dlattn.frameworks.Framework
  bool torch = false;       // has autograd, conjugate and negative bits to look out for
  bool paddle = false;      // has autograd to look out for
  bool numpy = false;       // read through __array_struct__
  bool plain = false;       // numpy.ndarray or torch.Tensor itself: reading one runs no other code
  bool cuda_array = false;  // read through __cuda_array_interface__
  bool gives_workspace = false;
  bool deferred = false;  // tells its stream only while it takes the result in: JAX on a GPU
  TorchState torch_state;
  // NumPy only, by DType: a callable that makes an array of a given shape. Null until needed.
  mutable nb::object empty_arrays[kNumDTypes];
};

// Looks up what the functions below need of Python. Called at import, so that two threads that make
// the first call at once need not agree on who does it.
void register_frameworks();

// Cached per type, as long as the type lives. Throws TypeError if objects of this type are no
// tensors.
const TensorType& tensor_type(nb::handle object, const char* name);
// Drops the cache and stops, or resumes, using exchange APIs, so that tests reach the other way in.
void use_exchange_api(bool on);

// Where a call computes: the framework, device and stream of its first tensor.
struct Target {
  nb::handle like;  // the first tensor
  const char* name = "";
  nb::object like_type;  // its Python type; keeps `type` alive
  const TensorType* type = nullptr;
  Device device;
  void* stream = nullptr;
  bool forward_ad = false;  // torch's, as the call began
  Tensor lent;              // `like`, if asking for its device already described all of it
};

// Target of a call whose first tensor is `like`, without the stream. Until import_tensor(like), the
// caller's Python code may run in set_stream only, which drops `lent` when it does.
Target make_target(nb::handle like, const char* name);
// The stream that the caller named, or the framework's current one.
void set_stream(nb::handle stream, Target* target);

// Takes a tensor in without a copy, ready to be used on the target's stream. Throws if it is on
// another device.
Tensor import_tensor(nb::handle object, const char* name, const Target& target,
                     bool to_write = false);

// Makes the target's stream wait for the work after which the tensors' memory is ready. Called
// without the GIL, right before a launch.
void wait_for_owners(const Tensor* first, const Tensor* last, const Target& target);

// Tells the autograd of the tensor's framework that it was written to: it may have been saved.
void mark_modified(nb::handle object, const char* name);

// A new tensor of the target's framework.
struct Allocation {
  Tensor tensor;
  dlpack::ManagedTensorVersioned* managed =
      nullptr;        // of an exchange API, until take() makes an object of it
  OwnedTensor torch;  // the same of torch's C ABI
  nb::object object;  // of an adapter

  Allocation() = default;
  Allocation(Allocation&& other) noexcept;
  Allocation& operator=(Allocation&&) = delete;
  ~Allocation();
};

// Memory of the target's framework for a plan's workspace, on `stream` as the caller named it.
nb::object allocate_workspace(const Target& target, std::int64_t bytes, nb::handle stream);

Allocation allocate(const Target& target, const char* name, const std::int64_t* shape, int ndim,
                    DType dtype);
nb::object take(const Target& target, Allocation* allocation);

}  // namespace dlattn::python
