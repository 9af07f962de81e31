#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "backward_tensors.h"
#include "errors.h"
#include "torch_attention.h"
#include "torch_kernel.h"

// The operators of gradients in torch.ops.dlattn.
namespace dlattn::python {
namespace {

using torch_abi::Value;

constexpr Signature backward_signature(bool varlen) {
  Signature made;
  made.add("Optional[Tensor]", "dout");
  for (const char* name : {"q", "k", "v", "out", "lse"}) made.add("Tensor", name);
  made.add("Optional[Tensor]", "dlse");
  if (varlen) add_lengths(&made);
  add_scores(&made);
  made.add("bool", "bhsd");
  made.add("List[bool]", "needs");
  made.add("bool", "deterministic");
  return made;
}

// Takes in out and lse, and the gradients of them that are given.
void read_results(const AttentionOperator& op, const Arguments& arguments, Problem* problem,
                  BackwardParams* params) {
  const auto take = [&](int i) {
    Tensor tensor = describe(arguments.tensor(i), op.signature.arguments[i].name);
    check_device(tensor.name, tensor.device, problem->params.device, "q");
    return tensor;
  };
  set_out(take(op.out), problem);
  const Tensor lse = take(op.lse);
  check_dtype(lse, kFloat32);
  set_lse(lse, problem);
  if (arguments.given(op.dout)) set_dout(take(op.dout), *problem, params);
  if (arguments.given(op.dlse)) set_dlse(take(op.dlse), *problem, params);
}

const Tensor& input_of(int i, const std::vector<Tensor>& inputs) {
  for (const Tensor& input : inputs) {
    if (std::string_view(input.name) == kInputs[i]) return input;
  }
  unsupported("needs has ", kGradients[i], " and ", kInputs[i],
              " is None; accepted: gradients of what is given");
}

torch_abi::List list_of(std::vector<OwnedTensor>& tensors) {
  torch_abi::List list = nullptr;
  check_torch_error(torch_functions.new_list(tensors.size(), &list), "making a list");
  for (OwnedTensor& tensor : tensors) {
    const auto value = reinterpret_cast<Value>(tensor.release());
    check_torch_error(torch_functions.append(list, value), "making a list");
  }
  return list;
}

// The result is the list of the gradients that are wanted.
void run_backward(const AttentionOperator& op, Value* stack) {
  const Arguments arguments(op.signature, stack);
  Problem problem;
  BackwardParams params;
  const std::vector<Tensor> inputs = read_inputs(op, arguments, &problem);
  read_results(op, arguments, &problem, &params);
  const Device device = problem.params.device;
  bool wanted[kNumGradients];
  arguments.flags(op.needs, wanted, kNumGradients);
  if (std::none_of(wanted, wanted + kNumGradients, [](bool one) { return one; }))
    refuse_needs("[]");
  std::vector<OwnedTensor> gradients;
  for (int i = 0; i < kNumGradients; ++i) {
    if (!wanted[i]) continue;
    const Tensor& input = input_of(i, inputs);
    Tensor made;
    gradients.push_back(empty_tensor(kGradients[i], input.shape, input.ndim,
                                     gradient_dtype(i, input), device, &made));
    set_gradient(i, made, input, problem, &params);
  }
  params.deterministic = arguments.flag(op.deterministic);
  params.forward = problem.params;
  TorchWorkspace workspace{device, {}};
  problem.options.workspace = workspace.allocator();
  backward(params, stream_of(device), problem.options);
  *stack = reinterpret_cast<Value>(list_of(gradients));
}

template <bool kVarlen>
constexpr AttentionOperator kBackward(backward_signature(kVarlen));

template <bool kVarlen>
void backward_kernel(Value* stack, std::uint64_t, std::uint64_t) {
  run_or_throw([&] { run_backward(kBackward<kVarlen>, stack); });
}

}  // namespace

const TorchOperator kBackwardOperators[2] = {
    {"attention_backward", backward_kernel<false>, kBackward<false>.signature},
    {"attention_varlen_backward", backward_kernel<true>, kBackward<true>.signature},
};

}  // namespace dlattn::python
