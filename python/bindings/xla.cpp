#include "xla.h"

#include <algorithm>
#include <cfenv>
#include <cstring>
#include <new>
#include <string>
#include <vector>

#include "errors.h"
#include "xla_abi.h"

namespace dlattn::python {
namespace {

// XLA calls its handlers on its own threads, without the GIL: nothing below that serves them
// touches Python.

dlpack::DLDataType dtype_of(const char* name, std::int32_t dtype) {
  switch (dtype) {
    case xla::kPred:
      return {dlpack::kBool, 8, 1};
    case xla::kS32:
      return {dlpack::kInt, 32, 1};
    case xla::kF16:
      return {dlpack::kFloat, 16, 1};
    case xla::kBF16:
      return {dlpack::kBfloat, 16, 1};
    case xla::kF32:
      return {dlpack::kFloat, 32, 1};
    case xla::kF64:
      return {dlpack::kFloat, 64, 1};
    case xla::kF8E4M3FN:
      return {dlpack::kFloat8E4m3fn, 8, 1};
    default:  // the call was traced with one of the above
      unsupported(name, ": dtype is XLA's number ", dtype);
  }
}

Tensor tensor_of(const char* name, const xla::Buffer& buffer, Device device) {
  Tensor tensor;
  tensor.name = name;
  tensor.data = buffer.data;
  tensor.dtype = dtype_of(name, buffer.dtype);
  tensor.device = device;
  if (buffer.rank > kMaxDims) unsupported(name, " has ", buffer.rank, " dimensions");
  tensor.ndim = static_cast<int>(buffer.rank);
  for (int i = 0; i < tensor.ndim; ++i) tensor.shape[i] = buffer.dims[i];
  contiguous_strides(&tensor);
  return tensor;
}

// The attributes of a call, which xla_call made.
class Attributes {
 public:
  explicit Attributes(const xla::Attributes& given) : given_(given) {}

  std::int64_t integer(const char* name) const { return scalar<std::int64_t>(name, xla::kS64); }
  // Takes the numbers from 0 to `last`.
  std::int64_t integer(const char* name, std::int64_t last) const {
    const std::int64_t value = integer(name);
    if (value < 0 || value > last)
      unsupported("attribute ", name, " is ", value, "; accepted: 0 to ", last);
    return value;
  }
  template <typename Enum>
  Enum enumerator(const char* name, Enum last) const {
    return static_cast<Enum>(integer(name, static_cast<std::int64_t>(last)));
  }
  bool flag(const char* name) const { return integer(name, 1) != 0; }
  double number(const char* name) const { return scalar<double>(name, xla::kF64); }
  std::string text(const char* name) const {
    const auto& span = *static_cast<const xla::ByteSpan*>(find(name, xla::kString));
    return {span.begin, span.size};
  }

 private:
  const void* find(std::string_view name, std::int32_t type) const {
    for (std::int64_t i = 0; i < given_.size; ++i) {
      const xla::ByteSpan& span = *given_.names[i];
      if (std::string_view(span.begin, span.size) == name && given_.types[i] == type)
        return given_.values[i];
    }
    unsupported("attribute ", name, " is missing; accepted: what dlattn.jax of version ",
                DLATTN_VERSION, " passes");
  }
  template <typename T>
  T scalar(const char* name, std::int32_t dtype) const {
    const auto& scalar = *static_cast<const xla::Scalar*>(find(name, xla::kScalar));
    if (scalar.dtype != dtype) unsupported("attribute ", name, " is of XLA's type ", scalar.dtype);
    T value;
    std::memcpy(&value, scalar.value, sizeof value);
    return value;
  }

  const xla::Attributes& given_;
};

// Takes a name off the front of a text of names.
std::string take_name(std::string* names) {
  const std::size_t end = std::min(names->find(' '), names->size());
  std::string name = names->substr(0, end);
  names->erase(0, end + 1);
  return name;
}

[[noreturn]] void fail_with_api() {
  throw DeviceError("XLA's FFI did not give its stream or the ordinal of its device");
}

Device device_of(const xla::CallFrame& frame) {
  const xla::Api& api = *frame.api;
  if (api.struct_size < sizeof(xla::Api)) {
    throw DeviceError(
        "this jaxlib does not tell on which GPU a call runs; accepted: that of JAX 0.8 or later");
  }
  xla::OrdinalArguments arguments{sizeof arguments, nullptr, frame.context, 0};
  if (api.get_ordinal(&arguments)) fail_with_api();
  return {DeviceType::kCuda, arguments.ordinal};
}

void* stream_of(const xla::CallFrame& frame) {
  xla::StreamArguments arguments{sizeof arguments, nullptr, frame.context, nullptr};
  if (frame.api->get_stream(&arguments)) fail_with_api();
  return arguments.stream;
}

void set_options(const Attributes& attributes, Problem* problem) {
  AttentionParams& p = problem->params;
  p.causal = attributes.enumerator("causal", Causal::kTopLeft);
  p.precision = attributes.enumerator("precision", Precision::kInt8Fp16);
  p.softmax_scale = attributes.number("softmax_scale");
  p.softcap = attributes.number("softcap");
  p.window_left = attributes.integer("window_left");
  p.window_right = attributes.integer("window_right");
  p.seqlen_q = attributes.integer("max_seqlen_q");
  p.seqlen_k = attributes.integer("max_seqlen_k");
  problem->layout = attributes.enumerator("layout", Layout::kBhsd);
  problem->out_dtype = attributes.enumerator("out_dtype", DType::kFloat8E4M3);
  problem->return_lse = attributes.flag("return_lse");
  problem->options.batch_invariant = attributes.flag("batch_invariant");
}

// The results of a call are out, lse if it is wanted, and the workspace if the plan has any.
void set_results(const xla::CallFrame& frame, Problem* problem) {
  AttentionParams& p = problem->params;
  const auto result = [&](std::int64_t n) -> const xla::Buffer& {
    if (n >= frame.results.size) unsupported("result ", n, " is missing");
    return *static_cast<const xla::Buffer*>(frame.results.items[n]);
  };
  std::int64_t count = 0;
  set_out(tensor_of("out", result(count++), p.device), problem);
  if (problem->return_lse) set_lse(tensor_of("lse", result(count++), p.device), problem);
  if (count == frame.results.size) return;
  const xla::Buffer& memory = result(count);
  if (memory.rank != 1 || memory.dtype != xla::kU8) {
    unsupported("the workspace has ", memory.rank, " dimensions and XLA's dtype ", memory.dtype,
                "; accepted: 1 dimension, of uint8");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data);
  const std::uintptr_t aligned =
      (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  p.workspace = reinterpret_cast<void*>(aligned);
  p.workspace_bytes = memory.dims[0] - static_cast<std::int64_t>(aligned - address);
}

void run(const xla::CallFrame& frame, DeviceType type) {
  const Attributes attributes(frame.attributes);
  Problem problem;
  AttentionParams& p = problem.params;
  p.device = type == DeviceType::kCuda ? device_of(frame) : Device{};
  set_options(attributes, &problem);

  std::string names = attributes.text("operands");
  std::vector<std::string> kept;
  std::vector<Tensor> tensors;
  kept.reserve(static_cast<std::size_t>(frame.inputs.size));  // tensors point to these names
  tensors.reserve(static_cast<std::size_t>(frame.inputs.size));
  for (std::int64_t i = 0; i < frame.inputs.size; ++i) {
    kept.push_back(take_name(&names));
    const auto& buffer = *static_cast<const xla::Buffer*>(frame.inputs.items[i]);
    tensors.push_back(tensor_of(kept.back().c_str(), buffer, p.device));
  }
  read_tensors(tensors, &problem);
  set_results(frame, &problem);

  std::string kernel = attributes.text("kernel"), variant;
  if (const std::size_t colon = kernel.find(':'); colon != std::string::npos) {
    variant = kernel.substr(colon + 1);
    kernel.resize(colon);
    problem.options.variant = variant.c_str();
  }
  problem.options.kernel = kernel;
  forward(p, type == DeviceType::kCuda ? stream_of(frame) : nullptr, problem.options);
}

// XLA's threads take denormal numbers for 0. Here they count, and the threads that a call starts
// inherit that.
class DefaultFloats {
 public:
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
  std::fenv_t before_;
};

xla::Error* error(const xla::CallFrame& frame, std::int32_t code, const char* message) noexcept {
  xla::ErrorArguments arguments{sizeof arguments, nullptr, message, code};
  return frame.api->create_error(&arguments);
}

template <DeviceType kType>
xla::Error* handle(xla::CallFrame* frame) noexcept {
  for (xla::Extension* extension = frame->extensions; extension; extension = extension->next) {
    if (extension->type != xla::kMetadataExtension) continue;
    xla::Metadata* metadata = reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
    metadata->api_version = {sizeof(xla::ApiVersion), nullptr, xla::kMajorVersion,
                             xla::kMinorVersion};
    // The same launches with the same arguments each time, and no synchronisation.
    metadata->traits = kType == DeviceType::kCuda ? xla::kCommandBufferCompatible : xla::kNoTraits;
    return nullptr;
  }
  if (frame->stage != xla::kExecute) return nullptr;
  const DefaultFloats floats;
  try {
    run(*frame, kType);
    return nullptr;
  } catch (const UnsupportedError& e) {
    return error(*frame, xla::kInvalidArgument, e.what());
  } catch (const std::bad_alloc&) {
    return error(*frame, xla::kResourceExhausted, "out of memory on the host");
  } catch (const std::exception& e) {
    return error(*frame, xla::kInternal, e.what());
  }
}

// The dtype that has this name.
dlpack::DLDataType dtype_named(const char* argument, const std::string& name) {
  for (std::uint8_t code = 0; code <= dlpack::kFloat8E4m3fn; ++code) {
    for (std::uint8_t bits = 8; bits <= 128 && bits > 0;
         bits = static_cast<std::uint8_t>(2 * bits)) {
      const dlpack::DLDataType dtype{code, bits, 1};
      if (dtype_text(dtype) == name) return dtype;
    }
  }
  unsupported(argument, ": dtype is ", name, ", which dlattn does not have");
}

// Makes tensors out of shapes. Their memory is not accessed, but for lists of lengths.
class Shapes {
 public:
  Tensor tensor(const char* name, nb::handle spec) {
    const nb::tuple pair = nb::borrow<nb::tuple>(spec);
    const nb::tuple sizes = nb::borrow<nb::tuple>(pair[1]);
    if (nb::len(sizes) > kMaxDims) unsupported(name, " has ", nb::len(sizes), " dimensions");
    Tensor tensor;
    tensor.name = name;
    tensor.dtype = dtype_named(name, text(pair[0]));
    std::int64_t elements = 1;
    for (const nb::handle size : sizes) {
      std::int64_t number = 0;  // a symbolic size is no int
      if (!nb::try_cast(size, number))
        unsupported(name, ": shape is ", text(sizes), "; accepted: a tuple of ints");
      if (number < 0 || __builtin_mul_overflow(elements, number, &elements) ||
          elements > kMaxElements) {
        unsupported(name, ": dimension ", tensor.ndim, " is of size ", number,
                    "; accepted: sizes whose product is up to ", kMaxElements);
      }
      tensor.shape[tensor.ndim++] = number;
    }
    place(&tensor);
    return tensor;
  }
  Tensor result(const char* name, const Shape& shape, DType dtype) {
    Tensor tensor;
    tensor.name = name;
    tensor.dtype = to_dlpack(dtype);
    for (; tensor.ndim < shape.ndim; ++tensor.ndim)
      tensor.shape[tensor.ndim] = shape.sizes[tensor.ndim];
    place(&tensor);
    return tensor;
  }

 private:
  void place(Tensor* tensor) {
    contiguous_strides(tensor);
    const std::int64_t count = tensor->num_elements();
    const core::Operand* const operand = core::find(core::kForwardOperands, tensor->name);
    if (operand && operand->kind == core::Kind::kList) {  // the CPU's checks read them
      lengths_.emplace_back(static_cast<std::size_t>(count) + 1, 0);
      tensor->data = lengths_.back().data();
      return;
    }
    tensor->data = reinterpret_cast<void*>(next_);
    const auto bytes = static_cast<std::uintptr_t>(count) * tensor->dtype.bits / 8;
    next_ += (bytes / kWorkspaceAlignment + 1) * kWorkspaceAlignment;
  }

  std::uintptr_t next_ = std::uintptr_t{1} << 20;
  std::vector<std::vector<double>> lengths_;  // of doubles: large enough for any dtype
};

// Bytes of workspace that the call needs on a GPU. Throws if no device that there is can run it:
// on which one it will is not known before it is compiled.
std::int64_t workspace_bytes(Problem* problem) {
  const bool gpu = device_count() > 0;
  std::string refused;
  if (gpu) {
    problem->params.device = {DeviceType::kCuda, 0};
    try {
      return plan(problem->params, device_info(problem->params.device), problem->options)
          .workspace_bytes;
    } catch (const UnsupportedError& error) {
      refused = error.what();
    }
  }
  problem->params.device = {};
  try {
    plan(problem->params, device_info(problem->params.device), problem->options);
  } catch (const UnsupportedError& error) {
    throw UnsupportedError(gpu ? refused : error.what());
  }
  return 0;
}

nb::tuple shape_of(const Shape& shape) {
  nb::list sizes;
  for (int i = 0; i < shape.ndim; ++i) sizes.append(shape.sizes[i]);
  return nb::tuple(sizes);
}

std::string kernel_text(const Options& options) {
  std::string kernel(options.kernel);
  return options.variant ? kernel + ":" + options.variant : kernel;
}

nb::object str(const std::string& text) {
  return nb::str(text.data(), text.size());
}

}  // namespace

nb::dict xla_handlers() {
  const auto capsule = [](xla::Handler* handler) {
    return nb::steal<nb::object>(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
  };
  nb::dict handlers;
  handlers["cpu"] = capsule(handle<DeviceType::kCpu>);
  handlers["CUDA"] = capsule(handle<DeviceType::kCuda>);
  return handlers;
}

nb::object xla_call(const AttentionCall& call) {
  Problem problem = read_options(call);
  if (!call.out.is_none()) unsupported("out: JAX arrays are immutable; accepted: None");
  if (!call.stream.is_none()) {
    unsupported("stream is given; accepted: None for JAX arrays, as JAX orders its work itself");
  }
  Shapes shapes;
  std::vector<Tensor> tensors;
  std::string operands;
  for (const GivenTensor& given : given_tensors(call)) {
    tensors.push_back(shapes.tensor(given.name, given.value));
    operands += (operands.empty() ? "" : " ") + std::string(given.name);
  }
  const AttentionParams& p = problem.params;
  read_tensors(tensors, &problem);
  if (call.softmax_scale.is_none()) problem.params.softmax_scale = default_scale(p);
  set_out(shapes.result("out", problem.out, p.out.dtype), &problem);
  if (problem.return_lse) set_lse(shapes.result("lse", problem.lse, DType::kFloat32), &problem);
  const std::int64_t bytes = workspace_bytes(&problem);

  nb::dict attributes;
  attributes["operands"] = str(operands);
  attributes["causal"] = static_cast<std::int64_t>(p.causal);
  attributes["precision"] = static_cast<std::int64_t>(p.precision);
  attributes["softmax_scale"] = p.softmax_scale;
  attributes["softcap"] = p.softcap;
  attributes["window_left"] = p.window_left;
  attributes["window_right"] = p.window_right;
  attributes["max_seqlen_q"] = p.seqlen_q;
  attributes["max_seqlen_k"] = p.seqlen_k;
  attributes["layout"] = static_cast<std::int64_t>(problem.layout);
  attributes["out_dtype"] = static_cast<std::int64_t>(p.out.dtype);
  attributes["return_lse"] = static_cast<std::int64_t>(problem.return_lse);
  attributes["batch_invariant"] = static_cast<std::int64_t>(problem.options.batch_invariant);
  attributes["kernel"] = str(kernel_text(problem.options));
  return nb::make_tuple(attributes,
                        nb::make_tuple(str(to_string(p.out.dtype)), shape_of(problem.out)),
                        shape_of(problem.lse), bytes);
}

}  // namespace dlattn::python
