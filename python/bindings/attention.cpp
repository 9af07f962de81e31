#include "attention.h"

#include <optional>

#include "append_problem.h"
#include "core/validate/names_of_caches.h"
#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

template <typename T>
TensorView as_input(const BasicTensorView<T>& written) {
  TensorView view;
  view.data = written.data, view.dtype = written.dtype;
  view.batch_stride = written.batch_stride;
  view.row_stride = written.row_stride, view.head_stride = written.head_stride;
  return view;
}

// Gives a call the workspace that its plan asks for: a tensor of the target's framework, which may
// be let go of as soon as the work is enqueued, if nobody else keeps it.
struct Workspace {
  const AttentionCall& call;
  const Target& target;
  const Problem& problem;
  const AppendProblem* append;  // null: none
  Unlocked* unlocked = nullptr;
  nb::object memory{};

  void* allocate(std::int64_t bytes) {
    return unlocked->with_gil([&] {
      memory = allocate_workspace(target, bytes, call.stream);
      // Python has run since they were looked at.
      check_unchanged(problem.tensors, problem.tensors + problem.num_tensors);
      if (append) append->check_unchanged();
      return import_tensor(memory, "workspace", target).data;
    });
  }
};

// Where the result goes: the caller's tensor, or a new one.
std::optional<Allocation> place_out(const AttentionCall& call, const Target& target,
                                    Problem* problem) {
  if (!call.out.is_none()) {
    set_out(import_tensor_to_write(call.out, "out", target, problem), problem);
    return {};
  }
  std::optional<Allocation> out(
      allocate(target, "out", problem->out.sizes, problem->out.ndim, problem->params.out.dtype));
  set_out(out->tensor, problem);
  return out;
}

// `append`: new keys and values, to be written before attention reads them. Null: none.
Outcome compute(const AttentionCall& call, const Target& target, Problem& problem, Held* held,
                AppendProblem* append = nullptr) {
  const AttentionParams& params = problem.params;
  const auto read = [&] {
    read_tensors(call, target, &problem);
    return place_out(call, target, &problem);
  };
  std::optional<Allocation> out = append ? core::in_names_of_caches(read) : read();
  std::optional<Allocation> q_out;
  if (append && append->has_queries()) {
    q_out.emplace(append->allocate_queries());
    problem.params.q = as_input(append->params.q_out);
  }
  std::optional<Allocation> lse;
  if (problem.return_lse) {
    lse.emplace(allocate(target, "lse", problem.lse.sizes, problem.lse.ndim, DType::kFloat32));
    set_lse(lse->tensor, &problem);
  }
  if (call.workspace.is_valid() && !call.workspace.is_none())
    read_workspace(call.workspace, target, &problem);
  Workspace workspace{call, target, problem, append};
  // A precision needs one in any case: then the framework says why it gives none.
  if (target.type->gives_workspace || params.precision != Precision::kInputs) {
    problem.options.workspace = {[](void* self, std::int64_t bytes) {
                                   return static_cast<Workspace*>(self)->allocate(bytes);
                                 },
                                 &workspace};
  }
  const auto tell_autograd = [&] {
    if (!out) mark_modified(call.out, "out");
    if (!append) return;
    mark_modified(call.k, "k_cache");
    mark_modified(call.v, "v_cache");
  };
  check_unchanged(problem.tensors, problem.tensors + problem.num_tensors);
  if (append) append->check_unchanged();
  try {
    without_gil([&](Poll poll, Unlocked& unlocked) {
      problem.options.poll = poll;
      workspace.unlocked = &unlocked;
      wait_for_owners(problem.tensors, problem.tensors + problem.num_tensors, target);
      if (!append) return forward(params, target.stream, problem.options);
      append->wait_for_owners();
      append_and_attend(append->params, params, target.stream, problem.options);
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

nb::object append_and_attend(const NewKeys& given, const nb::dict& options) {
  const AttentionCall call = call_of(Function::kKvcache, options);
  Problem problem = read_options(call);
  Target target = make_target(call.q, "q");
  if (target.type->deferred) {
    unsupported(
        "q is a JAX array and k is given; accepted: a tensor of another library, as a JAX array "
        "cannot be a cache that is written");
  }
  const auto option = [&](const char* name) {
    return options.contains(name) ? nb::object(options[name]) : nb::none();
  };
  const bool rotates = !given.rotary_cos.is_none();
  const nb::object none = nb::none(), no = nb::bool_(false);
  const nb::object k_descale = option("k_descale"), v_descale = option("v_descale");
  AppendCall append;
  append.k = given.k, append.v = given.v;
  append.k_cache = call.k, append.v_cache = call.v;
  append.seqused_k = given.seqused_k, append.page_table = call.page_table;
  append.slots = append.cu_seqlens_q = none;
  append.cache_batch_idx = call.cache_batch_idx;
  append.leftpad_k = rotates ? given.leftpad_k : none;
  append.q = rotates ? call.q : none;
  append.rotary_cos = given.rotary_cos, append.rotary_sin = given.rotary_sin;
  append.rotary_interleaved = given.rotary_interleaved, append.q_fixed_position = no;
  append.k_descale = k_descale, append.v_descale = v_descale;
  return run_on(target, call.stream, [&](const Target& settled, Held* held) {
    AppendProblem appended(append, problem.layout, settled);
    const AttentionParams& p = problem.params;
    const bool sees_all = p.causal == Causal::kNone && p.window_left < 0 && p.window_right < 0;
    appended.params.q_fixed_position = rotates && sees_all;
    return compute(call, settled, problem, held, &appended);
  });
}

}  // namespace dlattn::python
