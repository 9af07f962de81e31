#include "xla.h"

#include <string>
#include <vector>

#include "errors.h"
#include "xla_call.h"

namespace dlattn::python {
namespace {

// The results of a call are out, lse if it is wanted, and the workspace.
void run(const xla::CallFrame& frame, DeviceType type) {
  XlaCall call(frame, type);
  Problem& problem = call.problem;
  read_tensors(call.tensors, &problem);
  set_out(call.next_result("out"), &problem);
  if (problem.return_lse) set_lse(call.next_result("lse"), &problem);
  call.take_workspace();
  forward(problem.params, call.stream(), problem.options);
}

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

}  // namespace

nb::dict xla_handlers() {
  return handlers_of<run>();
}

nb::object xla_call(const AttentionCall& call) {
  Problem problem = read_options(call);
  if (!call.out.is_none()) unsupported("out: JAX arrays are immutable; accepted: None");
  if (!call.stream.is_none()) {
    unsupported("stream is given; accepted: None for JAX arrays, as JAX orders its work itself");
  }
  XlaShapes shapes;
  std::vector<Tensor> tensors;
  for (const GivenTensor& given : given_tensors(call)) {
    tensors.push_back(shapes.tensor(given.name, given.value));
  }
  const AttentionParams& p = problem.params;
  read_tensors(tensors, &problem);
  if (call.softmax_scale.is_none()) problem.params.softmax_scale = default_scale(p);
  set_out(shapes.result("out", problem.out, p.out.dtype), &problem);
  if (problem.return_lse) set_lse(shapes.result("lse", problem.lse, DType::kFloat32), &problem);
  const std::int64_t bytes = workspace_bytes(&problem);

  return nb::make_tuple(attributes_of(problem, tensors),
                        nb::make_tuple(str(to_string(p.out.dtype)), tuple_of(problem.out)),
                        tuple_of(problem.lse), bytes);
}

}  // namespace dlattn::python
