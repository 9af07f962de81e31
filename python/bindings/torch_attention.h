#pragma once

#include <vector>

#include "core/operations/forward.h"
#include "problem.h"
#include "torch_arguments.h"

// The operators of attention in torch.ops.dlattn: those of the forward pass are in torch_ops.cpp,
// those of the backward pass in torch_backward.cpp.
namespace dlattn::python {

// Arguments that several operators have. They must be those of the schemas in
// dlattn/integrations/torch/{ops,backward}.py.
constexpr void add_lengths(Signature* made) {
  for (const char* name : {"cu_seqlens_q", "cu_seqlens_k"}) made->add("Tensor", name);
  for (const char* name : {"max_seqlen_q", "max_seqlen_k"}) made->add("int", name);
  made->add("Optional[Tensor]", "seqused_k");
}
constexpr void add_scores(Signature* made) {
  for (const core::Operand& operand : core::kForwardOperands) {
    if (operand.has(core::kInTorch)) made->add("Optional[Tensor]", operand.name);
  }
  made->add("int", "causal");
  made->add("Optional[float]", "scale");
  for (const char* name : {"window_left", "window_right"}) made->add("int", name);
  made->add("float", "softcap");
}

// An operator, with where its arguments stand that are no inputs of attention; -1: it has none of
// that name.
struct AttentionOperator {
  Signature signature;
  int max_seqlen_q, max_seqlen_k, causal, scale, window_left, window_right, softcap, precision,
      bhsd, batch_invariant, out, lse, dout, dlse, needs, deterministic;

  constexpr explicit AttentionOperator(const Signature& signature)
      : signature(signature),
        max_seqlen_q(signature.index("max_seqlen_q")),
        max_seqlen_k(signature.index("max_seqlen_k")),
        causal(signature.index("causal")),
        scale(signature.index("scale")),
        window_left(signature.index("window_left")),
        window_right(signature.index("window_right")),
        softcap(signature.index("softcap")),
        precision(signature.index("precision")),
        bhsd(signature.index("bhsd")),
        batch_invariant(signature.index("batch_invariant")),
        out(signature.index("out")),
        lse(signature.index("lse")),
        dout(signature.index("dout")),
        dlse(signature.index("dlse")),
        needs(signature.index("needs")),
        deterministic(signature.index("deterministic")) {}

  constexpr bool is_input(int i) const {
    return signature.arguments[i].is_tensor() && i != out && i != lse && i != dout && i != dlse;
  }
};

// Takes in the settings of a call, and its inputs, which are returned.
std::vector<Tensor> read_inputs(const AttentionOperator& op, const Arguments& arguments,
                                Problem* problem);

// An operator and its kernel.
struct TorchOperator {
  const char* name;
  torch_abi::Kernel* kernel;
  const Signature& signature;
};
extern const TorchOperator kBackwardOperators[2];

}  // namespace dlattn::python
