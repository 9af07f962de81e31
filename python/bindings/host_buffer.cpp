#include "host_buffer.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <string>
#include <vector>

#include "dlattn/types.h"
#include "errors.h"
#include "tensor.h"

namespace dlattn::python {
namespace {

constexpr std::size_t kAlignment = 64;  // what XLA asks of memory that it takes over without a copy

// An export of the buffer, which may outlive the Python object: it shares the memory's ownership.
template <typename Managed>
struct Export {
  Managed managed{};
  std::vector<std::int64_t> shape;
  std::vector<std::int64_t> strides;
  std::shared_ptr<void> memory;
};

class HostBuffer {
 public:
  HostBuffer(const nb::tuple& shape, const nb::str& dtype) {
    std::int64_t elements = 1;
    for (const nb::handle size : shape) {
      shape_.push_back(nb::cast<std::int64_t>(size));
      elements *= shape_.back();
    }
    std::int64_t stride = 1;
    strides_.resize(shape_.size());
    for (std::size_t i = shape_.size(); i-- > 0;) {
      strides_[i] = stride;
      stride *= shape_[i];
    }
    for (const DType known :
         {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      if (std::string(dtype.c_str()) == to_string(known)) dtype_ = to_dlpack(known);
    }
    if (dtype_.lanes == 0)
      unsupported("dtype is ", dtype.c_str(), "; accepted: float16, bfloat16, float32, float64");
    const std::size_t bytes = static_cast<std::size_t>(elements) * dtype_.bits / 8;
    void* memory = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    if (!memory) throw std::bad_alloc();
    memory_ = {memory, std::free};
  }

  nb::object dlpack(bool versioned) const {
    if (!versioned) return make_capsule<dlpack::ManagedTensor>("dltensor");
    return make_capsule<dlpack::ManagedTensorVersioned>("dltensor_versioned");
  }

 private:
  template <typename Managed>
  nb::object make_capsule(const char* name) const {
    auto made = std::make_unique<Export<Managed>>();
    made->shape = shape_;
    made->strides = strides_;
    made->memory = memory_;
    Managed& managed = made->managed;
    if constexpr (std::is_same_v<Managed, dlpack::ManagedTensorVersioned>) {
      managed.version = {dlpack::kMajorVersion, dlpack::kMinorVersion};
    }
    managed.tensor.data = memory_.get();
    managed.tensor.device = {dlpack::kCpu, 0};
    managed.tensor.ndim = static_cast<std::int32_t>(shape_.size());
    managed.tensor.dtype = dtype_;
    managed.tensor.shape = made->shape.data();
    managed.tensor.strides = made->strides.data();
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

  std::vector<std::int64_t> shape_;
  std::vector<std::int64_t> strides_;
  dlpack::DLDataType dtype_{};
  std::shared_ptr<void> memory_;
};

}  // namespace

void register_host_buffer(nb::module_& module) {
  nb::class_<HostBuffer>(module, "HostBuffer",
                         "New CPU memory, aligned to 64 bytes, that exports itself by DLPack.")
      .def(nb::init<const nb::tuple&, const nb::str&>(), nb::arg("shape"), nb::arg("dtype"))
      .def(
          "__dlpack__",
          [](const HostBuffer& self, nb::handle, nb::handle max_version, nb::handle, nb::handle) {
            return self.dlpack(!max_version.is_none() &&
                               nb::cast<int>(nb::int_(max_version[0])) >= 1);
          },
          nb::kw_only(), nb::arg("stream") = nb::none(), nb::arg("max_version") = nb::none(),
          nb::arg("dl_device") = nb::none(), nb::arg("copy") = nb::none())
      .def("__dlpack_device__",
           [](const HostBuffer&) { return nb::make_tuple(int{dlpack::kCpu}, 0); });
}

}  // namespace dlattn::python
