#include "torch_attention.h"

#include <algorithm>
#include <string>

#include "errors.h"

namespace dlattn::python {
namespace {

std::int64_t count_of(std::int64_t count, const char* name) {
  if (count < 0 || count > INT32_MAX)
    unsupported(name, " is ", count, "; accepted: an int from 0 to ", INT32_MAX);
  return count;
}

Causal causal_of(std::int64_t causal) {
  switch (causal) {
    case 0:
      return Causal::kNone;
    case 1:
      return Causal::kBottomRight;
    case 2:
      return Causal::kTopLeft;
    default:
      unsupported("causal is ", causal, "; accepted: 0 (no), 1 (bottom-right), 2 (top-left)");
  }
}

Precision precision_of(const std::string& name) {
  for (const Precision precision : {Precision::kInt8Fp8, Precision::kInt8Fp16, Precision::kFp8}) {
    if (name == to_string(precision)) return precision;
  }
  unsupported("precision is ", shortened("'" + name + "'"), "; accepted: ", kPrecisions);
}

std::int64_t window_of(std::int64_t tokens) {
  return tokens < 0 ? -1 : std::min(tokens, kMaxWindow);
}

void read_settings(const AttentionOperator& op, const Arguments& arguments, Problem* problem) {
  AttentionParams& p = problem->params;
  p.causal = causal_of(arguments.integer(op.causal));
  if (op.max_seqlen_q >= 0) {
    p.seqlen_q = count_of(arguments.integer(op.max_seqlen_q), "max_seqlen_q");
    p.seqlen_k = count_of(arguments.integer(op.max_seqlen_k), "max_seqlen_k");
  }
  if (arguments.given(op.scale)) p.softmax_scale = arguments.number(op.scale);
  p.window_left = window_of(arguments.integer(op.window_left));
  p.window_right = window_of(arguments.integer(op.window_right));
  p.softcap = arguments.number(op.softcap);
  if (op.precision >= 0 && arguments.given(op.precision))
    p.precision = precision_of(arguments.text(op.precision));
  problem->layout = arguments.flag(op.bhsd) ? Layout::kBhsd : Layout::kBshd;
  if (op.batch_invariant >= 0)
    problem->options.batch_invariant = arguments.flag(op.batch_invariant);
  problem->return_lse = true;
}

}  // namespace

std::vector<Tensor> read_inputs(const AttentionOperator& op, const Arguments& arguments,
                                Problem* problem) {
  AttentionParams& p = problem->params;
  read_settings(op, arguments, problem);
  std::vector<Tensor> tensors;
  constexpr std::size_t kMost = 8;  // in most calls; more than a few KB take longer to allocate
  tensors.reserve(kMost);
  for (int i = 0; i < op.signature.count; ++i) {
    if (!op.is_input(i) || !arguments.given(i)) continue;
    const char* const name = op.signature.arguments[i].name;
    tensors.push_back(describe(arguments.tensor(i), name));
    check_device(name, tensors.back().device, tensors.front().device, "q");
  }
  p.device = tensors.front().device;
  read_tensors(tensors, problem);
  if (!arguments.given(op.scale)) p.softmax_scale = default_scale(p);
  return tensors;
}

}  // namespace dlattn::python
