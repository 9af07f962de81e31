#include "export.h"

#include <algorithm>
#include <atomic>
#include <type_traits>
#include <utility>

namespace dlattn::python {
namespace {

// An export, which may outlive every Python object.
template <typename Managed>
struct Export {
  Managed managed{};
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
  std::shared_ptr<void> memory;
};

template <typename Managed>
nb::object make(const Tensor& tensor, std::shared_ptr<void> memory, const char* name) {
  auto made = std::make_unique<Export<Managed>>();
  std::copy_n(tensor.shape, tensor.ndim, made->shape);
  std::copy_n(tensor.strides, tensor.ndim, made->strides);
  made->memory = std::move(memory);
  Managed& managed = made->managed;
  if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
    managed.version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
  }
  managed.tensor = {tensor.data,
                    to_dlpack(tensor.device),
                    tensor.ndim,
                    tensor.dtype,
                    made->shape,
                    made->strides,
                    0};
  managed.context = made.get();
  managed.deleter = [](Managed* self) { delete static_cast<Export<Managed>*>(self->context); };
  PyObject* capsule = PyCapsule_New(&managed, name, [](PyObject* object) {
    for (const char* unused : {"dltensor", "dltensor_versioned"}) {
      if (!PyCapsule_IsValid(object, unused)) continue;
      auto* left = static_cast<Managed*>(PyCapsule_GetPointer(object, unused));
      left->deleter(left);
    }
  });
  if (!capsule) throw nb::python_error();
  made.release();
  return nb::steal<nb::object>(capsule);
}

// References that threads without the GIL have given up, the last one first. A list without a lock:
// one that a thread holds when the process forks would stay locked in the child.
struct GivenUp {
  PyObject* object;
  GivenUp* next;
};
std::atomic<GivenUp*> given_up{nullptr};

// Needs the GIL.
int drop_given_up(void*) {
  GivenUp* entry = given_up.exchange(nullptr, std::memory_order_acquire);
  while (entry) {
    const std::unique_ptr<GivenUp> dropped(entry);
    entry = dropped->next;
    Py_DECREF(dropped->object);
  }
  return 0;
}

// Needs no GIL.
void give_up(void* object) {
  auto* entry = new GivenUp{static_cast<PyObject*>(object), given_up.load()};
  while (!given_up.compare_exchange_weak(entry->next, entry, std::memory_order_release)) {
  }
  // If Python's queue of pending calls is full, the next relay drops them.
  if (Py_IsInitialized()) Py_AddPendingCall(drop_given_up, nullptr);
}

}  // namespace

nb::object make_capsule(const Tensor& tensor, std::shared_ptr<void> memory, bool versioned) {
  return versioned
             ? make<dlpack::ManagedTensorVersioned>(tensor, std::move(memory), "dltensor_versioned")
             : make<dlpack::ManagedTensor>(tensor, std::move(memory), "dltensor");
}

nb::object relay(const nb::object& capsule) {
  drop_given_up(nullptr);
  Tensor tensor = from_capsule(capsule, "capsule");
  return make_capsule(tensor, {tensor.owner.release().ptr(), give_up}, false);
}

}  // namespace dlattn::python
