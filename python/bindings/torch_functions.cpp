#include "torch_functions.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <stdexcept>

#include "dlattn/device.h"
#include "errors.h"
#include "gil.h"

namespace dlattn::python {

torch_abi::Functions torch_functions;

namespace {

using TorchFunctions = torch_abi::Functions;

constexpr char kExtension[] =
#ifdef __APPLE__
    ".dylib";
#else
    ".so";
#endif

struct Symbol {
  const char* name;
  std::size_t offset;  // in TorchFunctions
  bool optional = false;
};

constexpr Symbol kSymbols[] = {
    {"aoti_torch_library_init_impl", offsetof(TorchFunctions, new_library)},
    {"aoti_torch_delete_library_object", offsetof(TorchFunctions, delete_library)},
    {"torch_library_impl", offsetof(TorchFunctions, add_kernel)},
    {"aoti_torch_get_dim", offsetof(TorchFunctions, get_dim)},
    {"aoti_torch_get_sizes", offsetof(TorchFunctions, get_sizes)},
    {"aoti_torch_get_strides", offsetof(TorchFunctions, get_strides)},
    {"aoti_torch_get_dtype", offsetof(TorchFunctions, get_dtype)},
    {"aoti_torch_get_device_type", offsetof(TorchFunctions, get_device_type)},
    {"aoti_torch_get_device_index", offsetof(TorchFunctions, get_device_index)},
    {"torch_get_const_data_ptr", offsetof(TorchFunctions, get_const_data)},
    {"aoti_torch_get_data_ptr", offsetof(TorchFunctions, get_data)},
    {"aoti_torch_empty_strided", offsetof(TorchFunctions, empty_strided)},
    {"aoti_torch_delete_tensor_object", offsetof(TorchFunctions, delete_tensor)},
    {"torch_string_length", offsetof(TorchFunctions, get_length)},
    {"torch_string_c_str", offsetof(TorchFunctions, get_characters)},
    {"torch_delete_string", offsetof(TorchFunctions, delete_string)},
    {"torch_list_size", offsetof(TorchFunctions, get_size)},
    {"torch_list_get_item", offsetof(TorchFunctions, get_item)},
    {"torch_delete_list", offsetof(TorchFunctions, delete_list)},
    {"torch_new_list_reserve_size", offsetof(TorchFunctions, new_list)},
    {"torch_list_push_back", offsetof(TorchFunctions, append)},
    {"aoti_torch_check", offsetof(TorchFunctions, check)},
    {"aoti_torch_device_type_cpu", offsetof(TorchFunctions, cpu_type)},
    {"aoti_torch_device_type_cuda", offsetof(TorchFunctions, cuda_type)},
    {"torch_delete_stable_ivalue", offsetof(TorchFunctions, delete_value), true},
    {"torch_new_stable_ivalue", offsetof(TorchFunctions, new_value), true},
    {"torch_exception_get_what_without_backtrace", offsetof(TorchFunctions, last_error), true},
    {"aoti_torch_is_defined", offsetof(TorchFunctions, is_defined), true},
    {"aoti_torch_new_uninitialized_tensor", offsetof(TorchFunctions, new_undefined), true},
    {"aoti_torch_new_tensor_handle", offsetof(TorchFunctions, new_handle), true},
    {"aoti_torch_copy_", offsetof(TorchFunctions, copy), true},
    {"torch_call_dispatcher", offsetof(TorchFunctions, call), true},
    {"aoti_torch_aten_fill__Scalar", offsetof(TorchFunctions, fill), true},
    {"aoti_torch_grad_mode_is_enabled", offsetof(TorchFunctions, is_grad_enabled), true},
    {"_ZN2at13globalContextEv", offsetof(TorchFunctions, context), true},
    {"_ZNK2at7Context23deterministicAlgorithmsEv",
     offsetof(TorchFunctions, are_algorithms_deterministic), true},
    {"aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu",
     offsetof(TorchFunctions, attention_for_cpu), true},
    {"aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward",
     offsetof(TorchFunctions, attention_for_cpu_backward), true},
    {"torch_get_num_threads", offsetof(TorchFunctions, get_num_threads), true},
};

constexpr std::uint8_t small_float(int index) {
  return static_cast<std::uint8_t>(dlpack::kFloat8E3m4 + index);
}

// torch's dtypes have functions that tell their numbers, by which tensors name them.
struct KnownDType {
  const char* name;
  dlpack::DLDataType dtype;
};
constexpr KnownDType kKnownDTypes[] = {
    {"float16", {dlpack::kFloat, 16, 1}},
    {"bfloat16", {dlpack::kBfloat, 16, 1}},
    {"float32", {dlpack::kFloat, 32, 1}},
    {"float64", {dlpack::kFloat, 64, 1}},
    {"float8_e4m3fn", {dlpack::kFloat8E4m3fn, 8, 1}},
    {"float8_e4m3fnuz", {small_float(4), 8, 1}},
    {"float8_e5m2", {small_float(5), 8, 1}},
    {"float8_e5m2fnuz", {small_float(6), 8, 1}},
    {"float8_e8m0fnu", {small_float(7), 8, 1}},
    {"bool", {dlpack::kBool, 8, 1}},
    {"uint8", {dlpack::kUInt, 8, 1}},
    {"uint16", {dlpack::kUInt, 16, 1}},
    {"uint32", {dlpack::kUInt, 32, 1}},
    {"uint64", {dlpack::kUInt, 64, 1}},
    {"int8", {dlpack::kInt, 8, 1}},
    {"int16", {dlpack::kInt, 16, 1}},
    {"int32", {dlpack::kInt, 32, 1}},
    {"int64", {dlpack::kInt, 64, 1}},
    {"complex32", {dlpack::kComplex, 32, 1}},
    {"complex64", {dlpack::kComplex, 64, 1}},
    {"complex128", {dlpack::kComplex, 128, 1}},
};
std::int32_t dtype_numbers[std::size(kKnownDTypes)];  // -1: this torch lacks it

std::int32_t number_of(dlpack::DLDataType dtype) {
  for (std::size_t i = 0; i < std::size(kKnownDTypes); ++i) {
    if (same(kKnownDTypes[i].dtype, dtype)) return dtype_numbers[i];
  }
  unsupported("out: dtype is ", dtype_text(dtype), ", which torch does not have");
}

dlpack::DLDataType dtype_of(const char* name, std::int32_t number) {
  for (std::size_t i = 0; i < std::size(kKnownDTypes); ++i) {
    if (dtype_numbers[i] == number) return kKnownDTypes[i].dtype;
  }
  unsupported(name, ": dtype is torch's number ", number,
              "; accepted: float16, bfloat16, float32, float64, float8_e4m3fn");
}

// Whether every address from the first element to the last is that of one element.
bool is_dense(const Tensor& tensor) {
  if (tensor.num_elements() == 0) return false;
  std::int64_t reached = 1;
  for (bool found = true; found;) {
    found = false;
    for (int i = 0; i < tensor.ndim && !found; ++i) {
      found = tensor.shape[i] > 1 && tensor.strides[i] == reached;
      if (found) reached *= tensor.shape[i];
    }
  }
  return reached == tensor.num_elements();
}

}  // namespace

std::string load_torch(const std::string& folder) {
  const auto open = [&](const char* name) {
    return dlopen((folder + "/" + name + kExtension).c_str(), RTLD_NOLOAD | RTLD_LAZY);
  };
  void* const cpu = open("libtorch_cpu");
  if (!cpu) return "libtorch_cpu of this process does not lie in " + folder;
  TorchFunctions found{};
  const auto look_up = [](void* library, const char* name, void* function) {
    void* const symbol = dlsym(library, name);
    std::memcpy(function, &symbol, sizeof symbol);
    return symbol != nullptr;
  };
  for (const Symbol& symbol : kSymbols) {
    void* const function = reinterpret_cast<char*>(&found) + symbol.offset;
    if (!look_up(cpu, symbol.name, function) && !symbol.optional)
      return std::string("libtorch_cpu has no function ") + symbol.name;
  }
  if (void* const cuda = open("libtorch_cuda")) {
    look_up(cuda, "aoti_torch_get_current_cuda_stream", &found.get_current_cuda_stream);
    look_up(cuda, "aoti_torch_cuda__scaled_dot_product_flash_attention_backward",
            &found.flash_attention_backward);
    look_up(cuda, "aoti_torch_cuda__flash_attention_backward",
            &found.packed_flash_attention_backward);
    look_up(cuda, "aoti_torch_cuda__scaled_dot_product_efficient_attention_backward",
            &found.efficient_attention_backward);
    look_up(cuda, "aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward",
            &found.cudnn_attention_backward);
  }
  if (void* const python = open("libtorch_python")) {
    look_up(python, "_ZN5torch10PythonArgs11scalar_slowEP7_object", &found.to_scalar);
    // Some versions take the TensorBase by value, which the C++ ABI passes by its address too.
    if (!look_up(python, "_Z16THPVariable_WrapRKN2at10TensorBaseE", &found.to_object))
      look_up(python, "_Z16THPVariable_WrapN2at10TensorBaseE", &found.to_object);
  }
  if (torch_functions.check) return {};  // loaded before, and kernels may be running
  for (std::size_t i = 0; i < std::size(kKnownDTypes); ++i) {
    const std::string name = std::string("aoti_torch_dtype_") + kKnownDTypes[i].name;
    std::int32_t (*number)();
    dtype_numbers[i] = look_up(cpu, name.c_str(), &number) ? number() : -1;
  }
  torch_functions = found;
  return {};
}

namespace {

std::string failure_of(const char* what) {
  const char* const why = torch_functions.last_error ? torch_functions.last_error() : nullptr;
  return concat(what, " failed", why ? ": " : "", why ? why : "");
}

}  // namespace

void check_torch_error(torch_abi::Error error, const char* what) {
  if (error) throw std::runtime_error(failure_of(what));
}

OwnedTensor& OwnedTensor::operator=(OwnedTensor&& other) noexcept {
  if (this == &other) return *this;
  if (tensor_) torch_functions.delete_tensor(tensor_);
  tensor_ = other.release();
  return *this;
}

OwnedTensor::~OwnedTensor() {
  if (tensor_) torch_functions.delete_tensor(tensor_);
}

torch_abi::Tensor OwnedTensor::release() {
  const torch_abi::Tensor released = tensor_;
  tensor_ = nullptr;
  return released;
}

Tensor describe(torch_abi::Tensor from, const char* name, bool to_write) {
  const TorchFunctions& torch = torch_functions;
  std::int32_t dtype = 0, type = 0, index = 0;
  std::int64_t ndim = 0;
  std::int64_t *sizes = nullptr, *strides = nullptr;
  const void* data = nullptr;
  void* writable = nullptr;
  const bool failed =
      torch.get_dtype(from, &dtype) || torch.get_device_type(from, &type) ||
      torch.get_device_index(from, &index) || torch.get_dim(from, &ndim) ||
      torch.get_sizes(from, &sizes) || torch.get_strides(from, &strides) ||
      (to_write ? torch.get_data(from, &writable) : torch.get_const_data(from, &data));
  check_torch_error(failed, "reading a tensor");
  Tensor tensor;
  tensor.name = name;
  tensor.data = to_write ? writable : const_cast<void*>(data);
  tensor.dtype = dtype_of(name, dtype);
  if (type == torch.cuda_type()) {
    tensor.device = {DeviceType::kCuda, index};
  } else if (type != torch.cpu_type()) {
    unsupported(name, " is on a device of torch's type ", type, "; accepted: CPU and CUDA");
  }
  set_layout(&tensor, static_cast<int>(ndim), sizes, strides);
  return tensor;
}

OwnedTensor empty_tensor(const char* name, const std::int64_t* sizes, int ndim, DType dtype,
                         Device device, Tensor* described) {
  int order[kMaxDims];
  for (int i = 0; i < ndim; ++i) order[i] = i;
  OwnedTensor made = empty_tensor(name, sizes, order, ndim, dtype, device);
  *described = Tensor();
  described->name = name;
  check_torch_error(torch_functions.get_data(made.get(), &described->data), "reading a tensor");
  described->dtype = to_dlpack(dtype);
  described->device = device;
  described->ndim = ndim;
  std::copy_n(sizes, ndim, described->shape);
  contiguous_strides(described);
  return made;
}

OwnedTensor empty_tensor(const char* name, const std::int64_t* sizes, const int* order, int ndim,
                         DType dtype, Device device) {
  std::int64_t strides[kMaxDims];
  std::int64_t stride = 1;
  for (int i = ndim - 1; i >= 0; --i) {  // as torch counts where a size is 0
    const int dim = order[i];
    strides[dim] = stride;
    stride *= sizes[dim] > 1 ? sizes[dim] : 1;
  }
  return empty_strided(name, sizes, strides, ndim, dtype, device);
}

OwnedTensor empty_strided(const char* name, const std::int64_t* sizes, const std::int64_t* strides,
                          int ndim, DType dtype, Device device) {
  return empty_strided(name, sizes, strides, ndim, to_dlpack(dtype), device);
}

OwnedTensor empty_strided(const char* name, const std::int64_t* sizes, const std::int64_t* strides,
                          int ndim, dlpack::DLDataType dtype, Device device) {
  const TorchFunctions& torch = torch_functions;
  const bool cuda = device.type == DeviceType::kCuda;
  torch_abi::Tensor made = nullptr;
  const torch_abi::Error error = torch.empty_strided(ndim, sizes, strides, number_of(dtype),
                                                     cuda ? torch.cuda_type() : torch.cpu_type(),
                                                     cuda ? device.index : -1, &made);
  if (error) throw AllocationError(failure_of(concat("allocating ", name).c_str()));
  return OwnedTensor(made);
}

OwnedTensor empty_like(const char* name, torch_abi::Tensor like) {
  const Tensor tensor = describe(like, name);
  if (is_dense(tensor)) {
    return empty_strided(name, tensor.shape, tensor.strides, tensor.ndim, tensor.dtype,
                         tensor.device);
  }
  torch_abi::Tensor handle = nullptr;
  check_torch_error(torch_functions.new_handle(like, &handle), "taking a tensor");
  torch_abi::Value stack[6] = {
      reinterpret_cast<torch_abi::Value>(handle)};  // and no dtype, layout, device and others
  const torch_abi::Error error =
      torch_functions.call("aten::empty_like", "", stack, torch_abi::kVersion);
  if (error) check_torch_error(error, concat("allocating ", name).c_str());
  return OwnedTensor(reinterpret_cast<torch_abi::Tensor>(stack[0]));
}

OwnedTensor undefined_tensor() {
  torch_abi::Tensor made = nullptr;
  check_torch_error(torch_functions.new_undefined(&made), "making a tensor");
  return OwnedTensor(made);
}

void fill(const OwnedTensor& tensor, double number) {
  check_torch_error(torch_functions.fill(tensor.get(), number), "filling a tensor");
}

void make_infinities_positive(const OwnedTensor& tensor) {
  constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  torch_abi::Tensor handle = nullptr;
  check_torch_error(torch_functions.new_handle(tensor.get(), &handle), "taking a tensor");
  torch_abi::Value stack[4] = {reinterpret_cast<torch_abi::Value>(handle)};
  const double numbers[3] = {kNan, kInfinity, kInfinity};
  for (int i = 0; i < 3; ++i) {
    torch_abi::Value* number = nullptr;
    if (torch_functions.new_value) {
      check_torch_error(torch_functions.new_value(&number), "making a number");
    } else {
      number = new torch_abi::Value;
    }
    std::memcpy(number, &numbers[i], sizeof *number);
    stack[1 + i] = reinterpret_cast<torch_abi::Value>(number);
  }
  check_torch_error(torch_functions.call("aten::nan_to_num_", "", stack, torch_abi::kVersion),
                    "writing a tensor");
  const OwnedTensor same_tensor(reinterpret_cast<torch_abi::Tensor>(stack[0]));
}

nb::object object_of(const OwnedTensor& tensor) {
  return checked(torch_functions.to_object(tensor.get()));
}

void* current_cuda_stream(Device device) {
  void* stream = nullptr;
  check_torch_error(torch_functions.get_current_cuda_stream(device.index, &stream),
                    "asking for the current stream");
  return stream;
}

bool is_capturing(void* stream) {
  using IsCapturing = int(void* stream, int* status);
  // The driver's, which torch loads with its first tensor of a GPU. Threads that look for it at
  // the same time find the same.
  static std::atomic<IsCapturing*> known{nullptr};
  IsCapturing* of_driver = known.load();
  if (!of_driver) {
    void* const driver = dlopen("libcuda.so.1", RTLD_LAZY);
    if (driver) of_driver = reinterpret_cast<IsCapturing*>(dlsym(driver, "cuStreamIsCapturing"));
    known = of_driver;
  }
  int status = 0;
  if (!of_driver || of_driver(stream, &status)) throw std::runtime_error("no cuStreamIsCapturing");
  return status != 0;
}

bool are_deterministic_algorithms_enabled() {
  return torch_functions.are_algorithms_deterministic(torch_functions.context());
}

void throw_from_python(PyObject* raise) {
  torch_functions.to_scalar(nullptr, raise);
}

int cpu_threads_of_torch() {
  const int own = device_info({DeviceType::kCpu, 0}).num_threads;
  std::uint32_t count = 0;
  if (!torch_functions.get_num_threads || torch_functions.get_num_threads(&count)) return own;
  return count < static_cast<std::uint32_t>(own) ? static_cast<int>(count) : own;
}

}  // namespace dlattn::python
