#include "tensor.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "dlattn/device.h"
#include "dlattn/tensor.h"
#include "errors.h"
#include "gil.h"
#include "names.h"

namespace dlattn::python {
namespace {

const char* device_name(std::int32_t type) {
  switch (type) {
    case dlpack::kOpenCl:
      return "OpenCL";
    case dlpack::kVulkan:
      return "Vulkan";
    case dlpack::kMetal:
      return "Metal";
    case dlpack::kVpi:
      return "VPI";
    case dlpack::kRocm:
    case dlpack::kRocmHost:
      return "ROCm";
    case dlpack::kExtDev:
      return "extension device";
    case dlpack::kOneApi:
      return "oneAPI";
    case dlpack::kWebGpu:
      return "WebGPU";
    case dlpack::kHexagon:
      return "Hexagon";
    case dlpack::kMaia:
      return "MAIA";
    case dlpack::kTrainium:
      return "Trainium";
    default:
      return "unknown";
  }
}

// A stride in elements, of one in bytes.
std::int64_t element_stride(const char* name, int dim, std::int64_t size, std::int64_t bytes,
                            std::int64_t itemsize) {
  if (size > 1 && bytes % itemsize != 0) {
    unsupported(name, ": the stride of dimension ", dim, " is ", bytes,
                " bytes; accepted: multiples of the element's ", itemsize);
  }
  return bytes / itemsize;
}

void read(const dlpack::DLTensor& from, Tensor* tensor) {
  tensor->device = to_device(tensor->name, from.device);
  tensor->dtype = from.dtype;
  tensor->data = from.data ? static_cast<char*>(from.data) + from.byte_offset : nullptr;
  set_layout(tensor, from.ndim, from.shape, from.strides);
}

template <typename Managed>
nb::object own(Managed* managed) {
  return nb::capsule(managed, [](void* p) noexcept {
    auto* owned = static_cast<Managed*>(p);
    if (owned->deleter) owned->deleter(owned);
  });
}

// The array interface's C struct, https://numpy.org/doc/stable/reference/arrays.interface.html
struct ArrayInterface {
  int two;
  int nd;
  char typekind;
  int itemsize;
  int flags;
  Py_ssize_t* shape;
  Py_ssize_t* strides;  // in bytes
  void* data;
  PyObject* descr;
};
constexpr int kArrayNotSwapped = 0x200;
constexpr int kArrayWriteable = 0x400;

// DLPack's types of 8, 6 and 4 bits, each a code of its own, from kFloat8E3m4 on.
constexpr const char* kSmallFloats[] = {"float8_e3m4",     "float8_e4m3",     "float8_e4m3b11fnuz",
                                        "float8_e4m3fn",   "float8_e4m3fnuz", "float8_e5m2",
                                        "float8_e5m2fnuz", "float8_e8m0fnu",  "float6_e2m3fn",
                                        "float6_e3m2fn",   "float4_e2m1fn"};

dlpack::DLDataType array_dtype(nb::handle array, const ArrayInterface& interface) {
  if (interface.itemsize > 16) return {0, 0, 0};  // beyond the 8 bits that count an element's
  const auto bits = static_cast<std::uint8_t>(interface.itemsize * 8);
  // NumPy has no bfloat16 or float8 of its own; those of ml_dtypes are opaque bytes to the array
  // interface, or floats, and a name.
  const bool is_opaque = interface.typekind == 'V' && interface.itemsize <= 2;
  if (is_opaque || (interface.typekind == 'f' && interface.itemsize == 1)) {
    const std::string name = text(nb::object(array.attr("dtype").attr("name")));
    if (name == "bfloat16") return {dlpack::kBfloat, 16, 1};
    for (std::size_t i = 0; i < std::size(kSmallFloats); ++i) {
      if (name == kSmallFloats[i])
        return {static_cast<std::uint8_t>(dlpack::kFloat8E3m4 + i), bits, 1};
    }
    return {0, 0, 0};
  }
  switch (interface.typekind) {
    case 'f':
      return {dlpack::kFloat, bits, 1};
    case 'i':
      return {dlpack::kInt, bits, 1};
    case 'u':
      return {dlpack::kUInt, bits, 1};
    case 'c':
      return {dlpack::kComplex, bits, 1};
    case 'b':
      return {dlpack::kBool, bits, 1};
    default:
      break;
  }
  return {0, 0, 0};
}

}  // namespace

std::int64_t Tensor::num_elements() const {
  std::int64_t count = 1;
  for (int i = 0; i < ndim; ++i) count *= shape[i];
  return count;
}

void contiguous_strides(Tensor* tensor) {
  std::int64_t stride = 1;
  for (int i = tensor->ndim - 1; i >= 0; --i) {
    tensor->strides[i] = stride;
    stride *= tensor->shape[i];
  }
}

// Whether offsets can be counted at all, of whatever element. Core decides what an operation
// accepts.
static void check_span(const Tensor& tensor) {
  constexpr std::int64_t kMost = kMaxTensorBytes / 16;
  std::int64_t span = 0;
  for (int i = 0; i < tensor.ndim; ++i) {
    const std::int64_t stride = tensor.strides[i];
    if (tensor.shape[i] <= 1) continue;
    std::int64_t step = 0;
    if (stride >= -kMost && stride <= kMost &&
        !__builtin_mul_overflow(tensor.shape[i] - 1, stride < 0 ? -stride : stride, &step) &&
        !__builtin_add_overflow(span, step, &span) && span <= kMost)
      continue;
    unsupported(tensor.name, ": the stride of dimension ", i, ", of size ", tensor.shape[i],
                ", is ", stride, "; accepted: strides by which the tensor spans up to ", kMost,
                " elements");
  }
}

void set_layout(Tensor* tensor, int ndim, const std::int64_t* shape, const std::int64_t* strides) {
  if (ndim < 0 || ndim > kMaxDims) {
    unsupported(tensor->name, " has ", ndim, " dimensions; accepted: at most ", kMaxDims);
  }
  if (ndim > 0 && !shape) {
    wrong_type(tensor->name, ": its exporter gave no shape of its ", ndim,
               " dimensions; accepted: an array of their sizes");
  }
  tensor->ndim = ndim;
  std::int64_t elements = 1;
  for (int i = 0; i < ndim; ++i) {
    tensor->shape[i] = shape[i];
    if (shape[i] < 0 || __builtin_mul_overflow(elements, shape[i], &elements)) {
      wrong_type(tensor->name, ": its exporter gave the impossible shape ", shape_text(shape, ndim),
                 "; accepted: sizes from 0 on, of fewer than 2^63 elements");
    }
  }
  if (elements == 0 || !strides) {
    for (int i = 0; i < ndim && elements == 0; ++i) tensor->strides[i] = 0;
    if (elements > 0) contiguous_strides(tensor);
  } else {
    std::memcpy(tensor->strides, strides, sizeof(std::int64_t) * ndim);
    check_span(*tensor);
  }
  if (elements > 0 && !tensor->data) {
    wrong_type(tensor->name, ": its exporter gave a null pointer; accepted: memory of ", elements,
               " element(s), which tensors that are being traced or transformed lack");
  }
}

std::string shape_text(const std::int64_t* shape, int ndim) {
  std::string text = "(";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (ndim == 1 ? ",)" : ")");
}

std::string dtype_text(dlpack::DLDataType dtype) {
  const char* kind = nullptr;
  switch (dtype.code) {
    case dlpack::kInt:
      kind = "int";
      break;
    case dlpack::kUInt:
      kind = "uint";
      break;
    case dlpack::kFloat:
      kind = "float";
      break;
    case dlpack::kBfloat:
      kind = "bfloat";
      break;
    case dlpack::kComplex:
      kind = "complex";
      break;
    default:
      break;
  }
  std::string text = concat("DLPack type code ", int{dtype.code});
  int bits = 0;  // which the name tells
  const std::size_t small = dtype.code - std::size_t{dlpack::kFloat8E3m4};
  if (kind) {
    bits = dtype.bits;
    text = kind + std::to_string(bits);
  } else if (dtype.code == dlpack::kBool) {
    bits = 8;
    text = "bool";
  } else if (small < std::size(kSmallFloats)) {
    text = kSmallFloats[small];
    bits = text[std::strlen("float")] - '0';
  }
  if (dtype.bits != bits) text += concat(" of ", int{dtype.bits}, " bits");
  if (dtype.lanes != 1) text += " x " + std::to_string(dtype.lanes);
  return text;
}

std::string device_text(Device device) {
  return device.type == DeviceType::kCpu ? "cpu" : "cuda:" + std::to_string(device.index);
}

bool same(dlpack::DLDataType a, dlpack::DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

bool same(Device a, Device b) {
  return a.type == b.type && a.index == b.index;
}

void check_device(const char* name, Device device, Device accepted, const char* whose) {
  if (same(device, accepted)) return;
  unsupported(name, " is on ", device_text(device), "; accepted: ", device_text(accepted),
              ", where ", whose, " is");
}

dlpack::DLDataType to_dlpack(DType dtype) {
  const std::uint8_t code = dtype == DType::kBFloat16     ? dlpack::kBfloat
                            : dtype == DType::kFloat8E4M3 ? dlpack::kFloat8E4m3fn
                            : dtype == DType::kInt8       ? dlpack::kInt
                                                          : dlpack::kFloat;
  return {code, static_cast<std::uint8_t>(8 * size_of(dtype)), 1};
}

dlpack::DLDevice to_dlpack(Device device) {
  return {device.type == DeviceType::kCpu ? dlpack::kCpu : dlpack::kCuda, device.index};
}

Device to_device(const char* name, dlpack::DLDevice device) {
  switch (device.type) {
    case dlpack::kCpu:
    case dlpack::kCudaHost:
      return {DeviceType::kCpu, 0};
    case dlpack::kCuda:
    case dlpack::kCudaManaged:
      return {DeviceType::kCuda, device.id};
    default:
      unsupported(name, " is on a device of type ", device.type, " (", device_name(device.type),
                  "); accepted: CPU and CUDA");
  }
}

DType to_dtype(const Tensor& tensor, const char* accepted) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (same(tensor.dtype, to_dlpack(dtype))) return dtype;
  }
  unsupported(tensor.name, ": dtype is ", dtype_text(tensor.dtype), "; accepted: ", accepted);
}

Tensor from_exchange_api(const dlpack::ExchangeApi& api, nb::handle object, const char* name,
                         bool owning) {
  Tensor tensor;
  tensor.name = name;
  if (api.export_borrowed && !owning) {
    dlpack::DLTensor borrowed{};
    if (api.export_borrowed(object.ptr(), &borrowed)) throw nb::python_error();
    read(borrowed, &tensor);
    tensor.lender = object;
    tensor.api = &api;
    return tensor;
  }
  dlpack::ManagedTensorVersioned* managed = nullptr;
  if (api.export_managed(object.ptr(), &managed)) throw nb::python_error();
  return from_managed(managed, name);
}

Tensor from_managed(dlpack::ManagedTensorVersioned* managed, const char* name) {
  Tensor tensor;
  tensor.name = name;
  tensor.owner = own(managed);
  if (managed->version.major != dlpack::kMajorVersion) {
    wrong_type(name, ": its exporter speaks DLPack ", managed->version.major, ".",
               managed->version.minor, "; accepted: ", dlpack::kMajorVersion, ".x");
  }
  tensor.read_only = managed->flags & dlpack::kFlagReadOnly;
  tensor.is_copy = managed->flags & dlpack::kFlagIsCopied;
  read(managed->tensor, &tensor);
  return tensor;
}

Tensor from_array_struct(nb::handle array, const char* name) {
  Tensor tensor;
  tensor.name = name;
  tensor.owner = attribute(array, names.array_struct);
  const auto* interface =
      static_cast<const ArrayInterface*>(PyCapsule_GetPointer(tensor.owner.ptr(), nullptr));
  if (!interface) throw nb::python_error();
  const bool swapped = interface->itemsize > 1 && !(interface->flags & kArrayNotSwapped);
  tensor.dtype = array_dtype(array, *interface);
  if (tensor.dtype.lanes == 0 || swapped) {
    const std::string dtype = text(nb::object(array.attr("dtype")));
    unsupported(name, ": dtype is ", dtype, "; accepted: ",
                tensor.dtype.lanes != 0
                    ? "a number in the machine's byte order"
                    : "bool, bfloat16, float8_e4m3fn, or NumPy's numbers of up to 64 bits");
  }
  tensor.data = interface->data;
  tensor.read_only = !(interface->flags & kArrayWriteable);
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
  for (int i = 0; i < interface->nd && i < kMaxDims; ++i) {
    shape[i] = interface->shape[i];
    strides[i] = element_stride(name, i, shape[i], interface->strides[i], interface->itemsize);
  }
  set_layout(&tensor, interface->nd, shape, strides);
  tensor.lender = array;
  return tensor;
}

Tensor from_cuda_array(nb::handle array, const nb::object& described, const char* name) {
  enum { kPointer, kReadOnly, kCode, kItemsize, kShape, kStrides, kStream };
  const auto item = [&](int i) { return nb::object(described[i]); };
  Tensor tensor;
  tensor.name = name;
  tensor.owner = nb::borrow(array);
  tensor.read_only = nb::cast<bool>(item(kReadOnly));
  const auto itemsize = nb::cast<std::int64_t>(item(kItemsize));
  tensor.dtype = {nb::cast<std::uint8_t>(item(kCode)), static_cast<std::uint8_t>(8 * itemsize), 1};
  tensor.data = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(item(kPointer)));
  tensor.ready_on = reinterpret_cast<void*>(nb::cast<std::uintptr_t>(item(kStream)));
  const nb::object sizes = item(kShape), steps = item(kStrides);
  const int ndim = static_cast<int>(nb::len(sizes));
  std::int64_t shape[kMaxDims];
  std::int64_t strides[kMaxDims];
  for (int i = 0; i < ndim && i < kMaxDims; ++i) {
    shape[i] = nb::cast<std::int64_t>(nb::object(sizes[i]));
    if (steps.is_none()) continue;
    const auto bytes = nb::cast<std::int64_t>(nb::object(steps[i]));
    strides[i] = element_stride(name, i, shape[i], bytes, itemsize);
  }
  set_layout(&tensor, ndim, shape, steps.is_none() ? nullptr : strides);
  if (tensor.num_elements() == 0) tensor.data = nullptr;
  const int device = cuda_device_of(tensor.data);
  if (device < 0) {
    unsupported(name, ": its __cuda_array_interface__ has the pointer ", tensor.data,
                ", which is no memory of a CUDA device; accepted: the address of such memory");
  }
  tensor.device = {DeviceType::kCuda, device};
  return tensor;
}

namespace {

void check_unchanged(const Tensor& tensor) {
  const Tensor now = tensor.api ? from_exchange_api(*tensor.api, tensor.lender, tensor.name, false)
                                : from_array_struct(tensor.lender, tensor.name);
  bool same_layout = now.ndim == tensor.ndim;
  for (int i = 0; i < tensor.ndim && same_layout; ++i) {
    same_layout = now.shape[i] == tensor.shape[i] && now.strides[i] == tensor.strides[i];
  }
  if (same_layout && now.data == tensor.data && same(now.dtype, tensor.dtype) &&
      same(now.device, tensor.device)) {
    return;
  }
  unsupported(tensor.name,
              " was given other memory while the call's other arguments were read; accepted: a "
              "tensor that stays as it is during the call");
}

}  // namespace

void check_unchanged(const Tensor* first, const Tensor* last) {
  if (std::none_of(first, last, [](const Tensor& t) { return t.may_run_code; })) return;
  for (; first != last; ++first) {
    if (first->lender.is_valid()) check_unchanged(*first);
  }
}

Tensor from_capsule(const nb::object& capsule, const char* name) {
  PyObject* object = capsule.ptr();
  if (PyCapsule_IsValid(object, "dltensor_versioned")) {
    auto* managed = static_cast<dlpack::ManagedTensorVersioned*>(
        PyCapsule_GetPointer(object, "dltensor_versioned"));
    PyCapsule_SetName(object, "used_dltensor_versioned");
    return from_managed(managed, name);
  }
  if (PyCapsule_IsValid(object, "dltensor")) {
    auto* managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(object, "dltensor"));
    PyCapsule_SetName(object, "used_dltensor");
    Tensor tensor;
    tensor.name = name;
    tensor.owner = own(managed);
    read(managed->tensor, &tensor);
    return tensor;
  }
  if (PyCapsule_IsValid(object, "used_dltensor") ||
      PyCapsule_IsValid(object, "used_dltensor_versioned")) {
    unsupported(name,
                ": its __dlpack__ returned a capsule that was used before; accepted: a new capsule "
                "each time");
  }
  wrong_type(name, ": its __dlpack__ returned ", repr_text(capsule),
             "; accepted: a capsule named \"dltensor\" or \"dltensor_versioned\"");
}

}  // namespace dlattn::python
