#include "host_buffer.h"

#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "dlattn/types.h"
#include "errors.h"
#include "export.h"
#include "tensor.h"

namespace dlattn::python {
namespace {

constexpr std::size_t kAlignment = 64;  // needed for XLA to take it without a copy

class HostBuffer {
 public:
  HostBuffer(const nb::tuple& shape, const nb::str& dtype) {
    if (nb::len(shape) > kMaxDims) {
      unsupported("shape has ", nb::len(shape), " dimensions; accepted: at most ", kMaxDims);
    }
    for (const nb::handle size : shape)
      tensor_.shape[tensor_.ndim++] = nb::cast<std::int64_t>(size);
    contiguous_strides(&tensor_);
    for (const DType known :
         {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
      if (std::string(dtype.c_str()) == to_string(known)) tensor_.dtype = to_dlpack(known);
    }
    if (tensor_.dtype.lanes == 0)
      unsupported("dtype is ", dtype.c_str(), "; accepted: float16, bfloat16, float32, float64");
    const std::size_t bytes =
        static_cast<std::size_t>(tensor_.num_elements()) * tensor_.dtype.bits / 8;
    tensor_.data = std::aligned_alloc(kAlignment, (bytes / kAlignment + 1) * kAlignment);
    if (!tensor_.data) throw std::bad_alloc();
    memory_ = {tensor_.data, std::free};
  }

  nb::object dlpack(bool versioned) const { return make_capsule(tensor_, memory_, versioned); }

 private:
  Tensor tensor_;
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
