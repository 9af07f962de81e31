#include "attention.h"

#include <optional>

#include "errors.h"

namespace dlattn::python {
namespace {

Outcome compute(const AttentionCall& call, const Target& target) {
  Problem problem = read_problem(call, target);
  const AttentionParams& params = problem.params;

  std::optional<Allocation> out;
  Tensor given;
  if (call.out.is_none()) {
    out.emplace(allocate(target, "out", problem.out.sizes, problem.out.ndim, params.dtype));
  } else {
    if (target.type->deferred) unsupported("out: JAX arrays are immutable; accepted: None");
    given = import_tensor(call.out, "out", target);
    check_writable(given);
  }
  set_out(out ? out->tensor : given, &problem);
  std::optional<Allocation> lse;
  if (problem.return_lse) {
    lse.emplace(allocate(target, "lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32));
    set_lse(lse->tensor, &problem);
  }
  {
    nb::gil_scoped_release unlocked;
    forward(params, target.stream, problem.options);
  }
  Outcome outcome;
  outcome.outputs.append(out ? take(target, &*out) : nb::borrow(call.out));
  if (lse) outcome.outputs.append(take(target, &*lse));
  if (!target.type->deferred) return outcome;
  for (int i = 0; i < problem.num_inputs; ++i) outcome.held.append(problem.inputs[i].owner);
  outcome.held.append(out->tensor.owner);
  if (lse) outcome.held.append(lse->tensor.owner);
  return outcome;
}

}  // namespace

nb::object attention(const AttentionCall& call) {
  Target target = make_target(call.q, "q");
  const bool return_lse = parse_flag(call.return_lse, "return_lse");
  return run_on(target, call.stream, return_lse,
                [&](const Target& settled) { return compute(call, settled); });
}

}  // namespace dlattn::python
