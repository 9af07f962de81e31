#include "xla_call.h"

#include "errors.h"

namespace dlattn::python {
namespace {

// The dtype that has this name.
dlpack::DLDataType dtype_named(const char* argument, const std::string& name) {
  for (std::uint8_t code = 0; code <= dlpack::kFloat8E4m3fn; ++code) {
    for (std::uint8_t bits = 8; bits <= 128 && bits > 0;
         bits = static_cast<std::uint8_t>(2 * bits)) {
      const dlpack::DLDataType dtype{code, bits, 1};
      if (dtype_text(dtype) == name) return dtype;
    }
  }
  unsupported(argument, ": dtype is ", name,
              "; accepted: bool, bfloat16, float8_e4m3fn, or numbers of 8 to 64 bits");
}

std::string kernel_text(const Options& options) {
  std::string kernel(options.kernel);
  return options.variant ? kernel + ":" + options.variant : kernel;
}

}  // namespace

Tensor XlaShapes::tensor(const char* name, nb::handle spec) {
  const nb::tuple pair = nb::borrow<nb::tuple>(spec);
  const nb::tuple sizes = nb::borrow<nb::tuple>(pair[1]);
  if (nb::len(sizes) > kMaxDims)
    unsupported(name, " has ", nb::len(sizes), " dimensions; accepted: at most ", kMaxDims);
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

Tensor XlaShapes::result(const char* name, const Shape& shape, DType dtype) {
  Tensor tensor;
  tensor.name = name;
  tensor.dtype = to_dlpack(dtype);
  for (; tensor.ndim < shape.ndim; ++tensor.ndim)
    tensor.shape[tensor.ndim] = shape.sizes[tensor.ndim];
  place(&tensor);
  return tensor;
}

void XlaShapes::place(Tensor* tensor) {
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

nb::dict attributes_of(const Problem& problem, const std::vector<Tensor>& tensors) {
  const AttentionParams& p = problem.params;
  std::string operands;
  for (const Tensor& tensor : tensors)
    operands += (operands.empty() ? "" : " ") + std::string(tensor.name);
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
  return attributes;
}

nb::object str(const std::string& text) {
  return nb::str(text.data(), text.size());
}

nb::tuple tuple_of(const Shape& shape) {
  nb::list sizes;
  for (int i = 0; i < shape.ndim; ++i) sizes.append(shape.sizes[i]);
  return nb::tuple(sizes);
}

}  // namespace dlattn::python
