#include <vector>

#include "backward_tensors.h"
#include "errors.h"
#include "torch_sdpa_kernels.h"

namespace dlattn::python {

bool is_tensor(const Arguments& arguments, int i) {
  bool defined = false;
  if (!arguments.given(i)) return false;
  check_torch_error(torch_functions.is_defined(arguments.tensor(i), &defined), "reading a tensor");
  return defined;
}

void check_dense(const SdpaOperator& op, const Arguments& arguments) {
  // torch draws numbers of 32 bits: with less than one in 2**32 it drops nothing.
  constexpr double kLeastDropout = 1.0 / (std::int64_t{1} << 32);
  const double dropout_p = arguments.number(op.dropout_p);
  if (dropout_p >= kLeastDropout) unsupported("dropout_p is above 0");
  if (!(dropout_p >= 0.0)) unsupported("dropout_p is no probability");  // NaN too
  if (op.return_debug_mask >= 0 && arguments.flag(op.return_debug_mask))
    unsupported("return_debug_mask is True");
}

void read_forward(const SdpaOperator& op, const Arguments& arguments, Causal causal,
                  Problem* problem) {
  AttentionParams& p = problem->params;
  std::vector<Tensor> tensors;
  tensors.reserve(4);
  tensors.push_back(describe(arguments.tensor(op.query), "q"));
  tensors.push_back(describe(arguments.tensor(op.key), "k"));
  tensors.push_back(describe(arguments.tensor(op.value), "v"));
  if (op.attn_mask >= 0 && is_tensor(arguments, op.attn_mask))
    tensors.push_back(describe(arguments.tensor(op.attn_mask), "bias"));
  p.device = tensors[0].device;
  for (const Tensor& tensor : tensors) check_device(tensor.name, tensor.device, p.device, "q");
  p.causal = arguments.flag(op.is_causal) ? causal : Causal::kNone;
  problem->layout = Layout::kBhsd;
  read_tensors(tensors, problem);
  p.softmax_scale = arguments.given(op.scale) ? arguments.number(op.scale) : default_scale(p);
}

OwnedTensor read_dout(torch_abi::Tensor given, const Problem& problem, BackwardParams* params) {
  const DType dtype = problem.params.out.dtype;
  Tensor dout = describe(given, "dout");
  const bool has_rows =
      dout.ndim == 0 || dout.shape[dout.ndim - 1] <= 1 || dout.strides[dout.ndim - 1] == 1;
  OwnedTensor copied;
  if (!has_rows || !same(dout.dtype, to_dlpack(dtype))) {
    Tensor made;
    copied = empty_tensor("dout", dout.shape, dout.ndim, dtype, dout.device, &made);
    check_torch_error(torch_functions.copy(copied.get(), given, 0), "copying dout");
    dout = made;
  }
  check_device("dout", dout.device, problem.params.device, "q");
  set_dout(dout, problem, params);
  return copied;
}

OwnedTensor new_gradient(int i, torch_abi::Tensor input, bool rows_first, const Problem& problem,
                         BackwardParams* params) {
  const Tensor described = describe(input, kInputs[i]);
  OwnedTensor made;
  if (rows_first) {
    const int order[4] = {0, 2, 1, 3};
    made = empty_tensor(kGradients[i], described.shape, order, 4, gradient_dtype(i, described),
                        described.device);
  } else {
    made = empty_like(kGradients[i], input);
  }
  set_gradient(i, describe(made.get(), kGradients[i], true), described, problem, params);
  return made;
}

}  // namespace dlattn::python
