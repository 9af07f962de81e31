#include "attention.h"

#include <optional>

#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

// Gives a call the workspace that its plan asks for: a tensor of the target's framework, which may
// be let go of as soon as the work is enqueued, if nobody else keeps it.
struct Workspace {
  const AttentionCall& call;
  const Target& target;
  const Problem& problem;
  Unlocked* unlocked = nullptr;
  nb::object memory;

  void* allocate(std::int64_t bytes) {
    return unlocked->with_gil([&] {
      memory =
          call_method(target.type->adapter, "workspace", target.like, bytes, target.device.index,
                      call.stream.is_none()
                          ? nb::none()
                          : nb::object(nb::int_(reinterpret_cast<std::uintptr_t>(target.stream))));
      // Python has run since they were looked at.
      check_unchanged(problem.tensors, problem.tensors + problem.num_tensors);
      return import_tensor(memory, "workspace", target).data;
    });
  }
};

Outcome compute(const AttentionCall& call, const Target& target, Problem& problem, Held* held) {
  read_tensors(call, target, &problem);
  const AttentionParams& params = problem.params;

  std::optional<Allocation> out;
  if (call.out.is_none()) {
    out.emplace(allocate(target, "out", problem.out.sizes, problem.out.ndim, params.out.dtype));
    set_out(out->tensor, &problem);
  } else {
    set_out(take_in_to_write(call.out, "out", target, &problem), &problem);
  }
  std::optional<Allocation> lse;
  if (problem.return_lse) {
    lse.emplace(allocate(target, "lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32));
    set_lse(lse->tensor, &problem);
  }
  if (call.workspace.is_valid() && !call.workspace.is_none())
    read_workspace(call.workspace, target, &problem);
  Workspace workspace{call, target, problem};
  // A precision needs one in any case: then the framework says why it gives none.
  if (target.type->gives_workspace || params.precision != Precision::kInputs) {
    problem.options.workspace = {[](void* self, std::int64_t bytes) {
                                   return static_cast<Workspace*>(self)->allocate(bytes);
                                 },
                                 &workspace};
  }
  const auto tell_autograd = [&] {
    if (!out) tell_written(call.out, "out");
  };
  check_unchanged(problem.tensors, problem.tensors + problem.num_tensors);
  try {
    without_gil([&](Poll poll, Unlocked& unlocked) {
      problem.options.poll = poll;
      workspace.unlocked = &unlocked;
      wait_for_owners(problem.tensors, problem.tensors + problem.num_tensors, target);
      forward(params, target.stream, problem.options);
    });
  } catch (const nb::python_error&) {
    tell_autograd();  // a part may have been written
    throw;
  }
  tell_autograd();
  if (held) {
    for (int i = 0; i < problem.num_tensors; ++i) held->push_back(problem.tensors[i].owner);
    held->push_back(out->tensor.owner);
    if (lse) held->push_back(lse->tensor.owner);
    if (workspace.memory.is_valid()) held->push_back(workspace.memory);
  }
  Outcome outcome;
  outcome.out = out ? take(target, &*out) : nb::borrow(call.out);
  if (lse) outcome.lse = take(target, &*lse);
  return outcome;
}

}  // namespace

nb::object attention(const AttentionCall& call) {
  Problem problem = read_options(call);
  Target target = make_target(call.q, "q");
  return run_on(target, call.stream, [&](const Target& settled, Held* held) {
    return compute(call, settled, problem, held);
  });
}

}  // namespace dlattn::python
