#include <string>
#include <vector>

#include "attention.h"
#include "backward_tensors.h"
#include "errors.h"
#include "xla.h"
#include "xla_call.h"

namespace dlattn::python {
namespace {

const Tensor* find(const std::vector<Tensor>& tensors, std::string_view name) {
  for (const Tensor& tensor : tensors) {
    if (tensor.name == name) return &tensor;
  }
  return nullptr;
}

const Tensor& require(const std::vector<Tensor>& tensors, const char* name) {
  const Tensor* const tensor = find(tensors, name);
  if (!tensor) unsupported(name, " is missing; accepted: one, in a backward pass");
  return *tensor;
}

// The inputs of a backward pass: those of the call of attention, out and lse, and the gradients of
// one of them or of both.
void read_inputs(const std::vector<Tensor>& tensors, Problem* problem, BackwardParams* params) {
  read_tensors(tensors, problem);
  set_out(require(tensors, "out"), problem);
  const Tensor& lse = require(tensors, "lse");
  check_dtype(lse, kFloat32);
  set_lse(lse, problem);
  if (const Tensor* const dout = find(tensors, "dout")) set_dout(*dout, *problem, params);
  if (const Tensor* const dlse = find(tensors, "dlse")) set_dlse(*dlse, *problem, params);
}

// make(i, input) for each gradient that is among the names, which are in the order of kGradients.
template <typename Make>
void for_each_gradient(const std::vector<std::string>& needs, const std::vector<Tensor>& tensors,
                       const Make& make) {
  std::size_t next = 0;
  for (int i = 0; i < kNumGradients && next < needs.size(); ++i) {
    if (needs[next] != kGradients[i]) continue;
    make(i, require(tensors, kInputs[i]));
    ++next;
  }
  if (next < needs.size()) {
    unsupported("needs has ", needs[next],
                "; accepted: dq, dk, dv, dbias, dalibi_slopes, dsinks, in this order");
  }
}

// The results of a call are the gradients that it needs, and the workspace.
void run_backward(const xla::CallFrame& frame, DeviceType type) {
  XlaCall call(frame, type);
  BackwardParams params;
  read_inputs(call.tensors, &call.problem, &params);
  for_each_gradient(
      names_in(call.attributes.text("needs")), call.tensors, [&](int i, const Tensor& input) {
        set_gradient(i, call.next_result(kGradients[i]), input, call.problem, &params);
      });
  call.take_workspace();
  params.deterministic = call.attributes.flag("deterministic");
  params.forward = call.problem.params;
  backward(params, call.stream(), call.problem.options);
}

}  // namespace

nb::dict xla_backward_handlers() {
  return handlers_of<run_backward>();
}

nb::object xla_call_backward(const nb::dict& options, const nb::dict& results, nb::handle needs,
                             bool deterministic) {
  const bool varlen = options.contains("cu_seqlens_q");
  const AttentionCall call = call_of(varlen ? Function::kVarlen : Function::kAttention, options);
  Problem problem = read_options(call, backward_kernel_names());
  XlaShapes shapes;
  std::vector<Tensor> tensors;
  for (const GivenTensor& given : given_tensors(call))
    tensors.push_back(shapes.tensor(given.name, given.value));
  for (const char* name : {"out", "lse", "dout", "dlse"}) {
    if (results.contains(name)) tensors.push_back(shapes.tensor(name, results[name]));
  }
  BackwardParams params;
  read_inputs(tensors, &problem, &params);
  if (call.softmax_scale.is_none()) problem.params.softmax_scale = default_scale(problem.params);
  nb::list made;
  const std::string names = text(needs);
  for_each_gradient(names_in(names), tensors, [&](int i, const Tensor& input) {
    const DType dtype = gradient_dtype(i, input);
    const Tensor gradient = shapes.result(kGradients[i], shape_of(input), dtype);
    set_gradient(i, gradient, input, problem, &params);
    made.append(nb::make_tuple(str(to_string(dtype)), tuple_of(shape_of(input))));
  });
  params.deterministic = deterministic;
  // Where there is a GPU the call may run on it, and the CPU, which takes no workspace, runs all
  // that a GPU does.
  const bool gpu = device_count() > 0;
  problem.params.device = gpu ? Device{DeviceType::kCuda, 0} : Device{};
  params.forward = problem.params;
  const Plan chosen = plan(params, device_info(problem.params.device), problem.options);
  const std::int64_t bytes = gpu ? chosen.workspace_bytes : 0;

  nb::dict attributes = attributes_of(problem, tensors);
  attributes["needs"] = str(names);
  attributes["deterministic"] = static_cast<std::int64_t>(deterministic);
  return nb::make_tuple(attributes, nb::tuple(made), bytes);
}

}  // namespace dlattn::python
