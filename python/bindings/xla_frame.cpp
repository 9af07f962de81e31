#include "xla_frame.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "core/util/default_floats.h"
#include "errors.h"

namespace dlattn::python {
namespace {

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

void set_options(const XlaAttributes& attributes, Problem* problem) {
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

xla::Error* error(const xla::CallFrame& frame, std::int32_t code, const char* message) noexcept {
  xla::ErrorArguments arguments{sizeof arguments, nullptr, message, code};
  return frame.api->create_error(&arguments);
}

}  // namespace

std::int64_t XlaAttributes::integer(const char* name) const {
  return scalar<std::int64_t>(name, xla::kS64);
}

std::int64_t XlaAttributes::integer(const char* name, std::int64_t last) const {
  const std::int64_t value = integer(name);
  if (value < 0 || value > last)
    unsupported("attribute ", name, " is ", value, "; accepted: 0 to ", last);
  return value;
}

double XlaAttributes::number(const char* name) const {
  return scalar<double>(name, xla::kF64);
}

std::string XlaAttributes::text(const char* name) const {
  const auto& span = *static_cast<const xla::ByteSpan*>(find(name, xla::kString));
  return {span.begin, span.size};
}

const void* XlaAttributes::find(std::string_view name, std::int32_t type) const {
  for (std::int64_t i = 0; i < given_.size; ++i) {
    const xla::ByteSpan& span = *given_.names[i];
    if (std::string_view(span.begin, span.size) == name && given_.types[i] == type)
      return given_.values[i];
  }
  unsupported("attribute ", name, " is missing; accepted: what dlattn.jax of version ",
              DLATTN_VERSION, " passes");
}

template <typename T>
T XlaAttributes::scalar(const char* name, std::int32_t dtype) const {
  const auto& scalar = *static_cast<const xla::Scalar*>(find(name, xla::kScalar));
  if (scalar.dtype != dtype) unsupported("attribute ", name, " is of XLA's type ", scalar.dtype);
  T value;
  std::memcpy(&value, scalar.value, sizeof value);
  return value;
}

std::vector<std::string> names_in(const std::string& text) {
  std::vector<std::string> names;
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t end = std::min(text.find(' ', begin), text.size());
    names.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return names;
}

XlaCall::XlaCall(const xla::CallFrame& frame, DeviceType type)
    : attributes(frame.attributes), frame_(frame) {
  problem.params.device = type == DeviceType::kCuda ? device_of(frame) : Device{};
  set_options(attributes, &problem);
  kernel_ = attributes.text("kernel");
  if (const std::size_t colon = kernel_.find(':'); colon != std::string::npos) {
    variant_ = kernel_.substr(colon + 1);
    kernel_.resize(colon);
    problem.options.variant = variant_.c_str();
  }
  problem.options.kernel = kernel_;
  names_ = names_in(attributes.text("operands"));
  names_.resize(static_cast<std::size_t>(frame.inputs.size));
  for (std::int64_t i = 0; i < frame.inputs.size; ++i) {
    const auto& buffer = *static_cast<const xla::Buffer*>(frame.inputs.items[i]);
    const std::string& name = names_[static_cast<std::size_t>(i)];
    tensors.push_back(tensor_of(name.c_str(), buffer, problem.params.device));
  }
}

const xla::Buffer& XlaCall::result(std::int64_t n) const {
  if (n >= frame_.results.size) unsupported("result ", n, " is missing");
  return *static_cast<const xla::Buffer*>(frame_.results.items[n]);
}

Tensor XlaCall::next_result(const char* name) {
  return tensor_of(name, result(num_results_++), problem.params.device);
}

void XlaCall::take_workspace() {
  if (num_results_ == frame_.results.size) return;
  const xla::Buffer& memory = result(num_results_);
  if (memory.rank != 1 || memory.dtype != xla::kU8) {
    unsupported("the workspace has ", memory.rank, " dimensions and XLA's dtype ", memory.dtype,
                "; accepted: 1 dimension, of uint8");
  }
  const auto address = reinterpret_cast<std::uintptr_t>(memory.data);
  const std::uintptr_t aligned =
      (address + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
  problem.params.workspace = reinterpret_cast<void*>(aligned);
  problem.params.workspace_bytes = memory.dims[0] - static_cast<std::int64_t>(aligned - address);
}

void* XlaCall::stream() const {
  return problem.params.device.type == DeviceType::kCuda ? stream_of(frame_) : nullptr;
}

xla::Error* handle(xla::CallFrame* frame, DeviceType type, XlaRun run) noexcept {
  for (xla::Extension* extension = frame->extensions; extension; extension = extension->next) {
    if (extension->type != xla::kMetadataExtension) continue;
    xla::Metadata* metadata = reinterpret_cast<xla::MetadataExtension*>(extension)->metadata;
    metadata->api_version = {sizeof(xla::ApiVersion), nullptr, xla::kMajorVersion,
                             xla::kMinorVersion};
    // The same launches with the same arguments each time, and no synchronisation.
    metadata->traits = type == DeviceType::kCuda ? xla::kCommandBufferCompatible : xla::kNoTraits;
    return nullptr;
  }
  if (frame->stage != xla::kExecute) return nullptr;
  // XLA's threads take denormal numbers for 0.
  const core::DefaultFloats floats;
  try {
    run(*frame, type);
    return nullptr;
  } catch (const UnsupportedError& e) {
    return error(*frame, xla::kInvalidArgument, e.what());
  } catch (const std::bad_alloc&) {
    return error(*frame, xla::kResourceExhausted, "out of memory on the host");
  } catch (const std::exception& e) {
    return error(*frame, xla::kInternal, e.what());
  }
}

}  // namespace dlattn::python
