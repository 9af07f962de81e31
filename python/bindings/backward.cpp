#include "dlattn/backward.h"

#include <optional>
#include <string>

#include "attention.h"
#include "backward_tensors.h"
#include "errors.h"
#include "gil.h"
#include "quantized.h"
#include "report.h"

namespace dlattn::python {
namespace {

// The results: each a tensor, or null where it is not wanted.
struct Gradients {
  nb::object each[kNumGradients];
};
nb::list list_of(const Gradients& gradients) {
  nb::list outputs;
  for (const nb::object& one : gradients.each) {
    if (one.is_valid()) outputs.append(one);
  }
  return outputs;
}
nb::object result_of(const Gradients& gradients) {
  nb::list outputs;
  for (const nb::object& one : gradients.each) outputs.append(one.is_valid() ? one : nb::none());
  return nb::tuple(outputs);
}

// A call with its tensors taken in.
class BackwardProblem {
 public:
  BackwardProblem(const BackwardCall& call, const AttentionCall& forward, Problem problem)
      : call_(call), forward_(forward), problem_(std::move(problem)) {
    params_.deterministic = parse_flag(call.deterministic, "deterministic");
    if (is_quantized_kv(forward.k))
      unsupported("k is a QuantizedKV; accepted: a tensor, as quantised keys have no gradients");
    read_needs();
  }

  bool wants(int i) const { return wanted_[i]; }

  const BackwardParams& params() const { return params_; }
  const Options& options() const { return problem_.options; }

  // The problem of a call that is only asked about: no gradient is allocated.
  void plan(const Target& target) { read_call(target, nullptr); }

  Gradients compute(const Target& target, Held* held) {
    Gradients results;
    std::optional<Allocation> made[kNumGradients];
    read_call(target, made);
    run(target);
    for (int i = 0; i < kNumGradients; ++i) {
      if (!wants(i)) continue;
      const nb::handle given = this->given(i);
      if (!given.is_none()) mark_modified(given, kGradients[i]);
      if (held && made[i]) held->push_back(made[i]->tensor.owner);
      results.each[i] = made[i] ? take(target, &*made[i]) : nb::borrow(given);
    }
    if (held) hold(held);
    return results;
  }

 private:
  // The tensors of a call, and where its gradients go: to those of the caller's, else to new ones,
  // or without `made` to memory that there is not.
  void read_call(const Target& target, std::optional<Allocation>* made) {
    num_tensors_ = problem_.num_tensors = 0;  // JAX may run it again
    read_tensors(forward_, target, &problem_);
    read_results(target);
    for (int i = 0; i < kNumGradients; ++i) {
      if (wants(i)) place(i, target, made ? &made[i] : nullptr);
    }
    if (!call_.workspace.is_none()) read_workspace(call_.workspace, target, &problem_);
    params_.forward = problem_.params;
  }

  // Which gradients to compute. None: of all that the call is given.
  void read_needs() {
    const nb::handle needs = call_.needs;
    for (int i = 0; i < kNumGradients; ++i) {
      const nb::handle input = PyDict_GetItemString(call_.options.ptr(), kInputs[i]);
      has_input_[i] = input.is_valid() && !input.is_none();
      wanted_[i] = needs.is_none() && has_input_[i];
    }
    if (!needs.is_none()) {
      if (nb::isinstance<nb::str>(needs) || nb::isinstance<nb::bytes>(needs)) {
        unsupported("needs is a ", type_text(needs),
                    "; accepted: None, or a sequence of names, as (\"dq\", \"dk\")");
      }
      const nb::tuple names = names_of(needs);
      for (const nb::handle name : names) want(name);
      if (nb::len(names) == 0) refuse_needs(repr_text(needs));
    }
    for (int i = 0; i < kNumGradients; ++i) {
      if (!given(i).is_none() && !wanted_[i]) {
        unsupported(kGradients[i], " is given and is not among those to compute; accepted: None");
      }
    }
  }

  static nb::tuple names_of(nb::handle needs) {
    nb::object names =
        nb::steal<nb::object>(guarded([&] { return PySequence_Tuple(needs.ptr()); }));
    if (names.is_valid()) return nb::tuple(names);
    nb::python_error error;
    if (!error.matches(PyExc_TypeError)) throw error;
    wrong_type_from(error, concat("needs is of type ", type_text(needs),
                                  "; accepted: None, or a sequence of names, as (\"dq\", \"dk\")"));
  }

  void want(nb::handle name) {
    for (int i = 0; i < kNumGradients; ++i) {
      const bool same = PyUnicode_Check(name.ptr()) &&
                        PyUnicode_CompareWithASCIIString(name.ptr(), kGradients[i]) == 0;
      if (!same) continue;
      if (!has_input_[i]) {
        unsupported("needs has ", kGradients[i], " and ", kInputs[i],
                    " is None; accepted: gradients of what is given");
      }
      wanted_[i] = true;
      return;
    }
    unsupported("needs has ", repr_text(name),
                "; accepted: dq, dk, dv, dbias, dalibi_slopes, dsinks");
  }

  // The caller's tensor for a gradient, or None.
  nb::handle given(int i) const {
    const nb::handle tensor = PyDict_GetItemString(call_.gradients.ptr(), kGradients[i]);
    return tensor.is_valid() ? tensor : nb::handle(Py_None);
  }

  const Tensor& import(nb::handle object, const char* name, const Target& target) {
    return tensors_[num_tensors_++] = import_tensor(object, name, target);
  }

  // out and lse, and their gradients.
  void read_results(const Target& target) {
    set_out(import(call_.out, "out", target), &problem_);
    const Tensor& lse = import(call_.lse, "lse", target);
    check_dtype(lse, kFloat32);
    set_lse(lse, &problem_);
    if (!call_.dout.is_none()) set_dout(import(call_.dout, "dout", target), problem_, &params_);
    if (!call_.dlse.is_none()) set_dlse(import(call_.dlse, "dlse", target), problem_, &params_);
  }

  // The tensor that came in as the input of a gradient.
  const Tensor& input(int i) const {
    int n = 0;
    while (std::string_view(problem_.tensors[n].name) != kInputs[i]) ++n;
    return problem_.tensors[n];
  }

  // Where a gradient goes: the caller's tensor, or a new one.
  void place(int i, const Target& target, std::optional<Allocation>* made) {
    const Tensor& of = input(i);
    const nb::handle given = this->given(i);
    if (given.is_none()) {
      const DType dtype = gradient_dtype(i, of);
      if (made) {
        made->emplace(allocate(target, kGradients[i], of.shape, of.ndim, dtype));
        set_gradient(i, (*made)->tensor, of, problem_, &params_);
        return;
      }
      const Tensor none = stand_in(kGradients[i], i, shape_of(of), to_dlpack(dtype), target.device);
      set_gradient(i, none, of, problem_, &params_);
      return;
    }
    if (target.type->deferred)
      unsupported(kGradients[i], ": JAX arrays are immutable; accepted: None");
    Tensor& tensor = tensors_[num_tensors_++];
    tensor = import_tensor(given, kGradients[i], target, true);
    check_writable(tensor);
    set_gradient(i, tensor, of, problem_, &params_);
  }

  struct Workspace {
    BackwardProblem* self;
    const Target& target;
    Unlocked* unlocked;
  };

  void run(const Target& target) {
    Workspace workspace{this, target, nullptr};
    if (target.type->gives_workspace) {
      problem_.options.workspace = {[](void* context, std::int64_t bytes) {
                                      auto& given = *static_cast<Workspace*>(context);
                                      return given.unlocked->with_gil([&] {
                                        return given.self->take_workspace(given.target, bytes);
                                      });
                                    },
                                    &workspace};
    }
    check_unchanged_tensors();
    without_gil([&](Poll poll, Unlocked& unlocked) {
      problem_.options.poll = poll;
      workspace.unlocked = &unlocked;
      wait_for_owners(problem_.tensors, problem_.tensors + problem_.num_tensors, target);
      wait_for_owners(tensors_, tensors_ + num_tensors_, target);
      dlattn::backward(params_, target.stream, problem_.options);
    });
  }

  void* take_workspace(const Target& target, std::int64_t bytes) {
    memory_ = allocate_workspace(target, bytes, forward_.stream);
    check_unchanged_tensors();  // Python has run
    return import_tensor(memory_, "workspace", target).data;
  }

  void check_unchanged_tensors() const {
    check_unchanged(problem_.tensors, problem_.tensors + problem_.num_tensors);
    check_unchanged(tensors_, tensors_ + num_tensors_);
  }

  void hold(Held* held) const {
    for (int i = 0; i < problem_.num_tensors; ++i) held->push_back(problem_.tensors[i].owner);
    for (int i = 0; i < num_tensors_; ++i) held->push_back(tensors_[i].owner);
    if (memory_.is_valid()) held->push_back(memory_);
  }

  const BackwardCall& call_;
  const AttentionCall& forward_;
  Problem problem_;
  BackwardParams params_;
  bool has_input_[kNumGradients], wanted_[kNumGradients];
  Tensor tensors_[4 + kNumGradients];  // out, lse, their gradients, and those to write to
  int num_tensors_ = 0;
  nb::object memory_;  // the workspace that the framework gave
};

// The forward call of a backward call.
AttentionCall forward_of(const BackwardCall& call) {
  const bool varlen = call.options.contains("cu_seqlens_q");
  return call_of(varlen ? Function::kVarlen : Function::kAttention, call.options);
}

// use(problem) with the problem of a call that is only asked about.
template <typename Use>
auto with_planned_problem(const BackwardCall& call, const Use& use) {
  const AttentionCall forward = forward_of(call);
  BackwardProblem problem(call, forward, read_options(forward, backward_kernel_names()));
  Target target = make_target(forward.q, "q");
  set_stream(forward.stream, &target);
  problem.plan(target);
  return use(problem.params(), device_info(problem.params().forward.device), problem.options());
}

}  // namespace

nb::object supported_backward(const BackwardCall& call) {
  return support_tuple([&] {
    return with_planned_problem(call, [](const auto&... problem) { return supported(problem...); });
  });
}

nb::object plan_backward(const BackwardCall& call) {
  return with_planned_problem(
      call,
      [](const BackwardParams& params, const DeviceInfo& device,
         const Options& options) -> nb::object {
        const Plan chosen = plan(params, device, options);
        return plan_fields(chosen, params.forward.device,
                           passed_over(params, device, options, chosen, backward_kernel_names()));
      });
}

nb::object attention_backward(const BackwardCall& call) {
  const AttentionCall forward = forward_of(call);
  BackwardProblem problem(call, forward, read_options(forward, backward_kernel_names()));
  Target target = make_target(forward.q, "q");
  const nb::object outputs = run_on(target, forward.stream, [&](const Target& settled, Held* held) {
    return problem.compute(settled, held);
  });
  if (!target.type->deferred) return outputs;
  // Those that are wanted, in their order.
  nb::list all;
  int next = 0;
  const bool is_one = !nb::isinstance<nb::tuple>(outputs);
  for (int i = 0; i < kNumGradients; ++i) {
    if (!problem.wants(i)) {
      all.append(nb::none());
    } else {
      all.append(is_one ? outputs : nb::object(outputs[next++]));
    }
  }
  return nb::tuple(all);
}

}  // namespace dlattn::python
