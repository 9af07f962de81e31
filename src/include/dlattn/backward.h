#pragma once

#include "dlattn/forward.h"

// Attention, backward: the gradients of what forward() computes.
namespace dlattn {

// The gradients of one attention problem. With P = exp(score - lse) and, for a row i and a key j,
//   delta_i = sum_d dout_id out_id - dlse_i,  dS_ij = P_ij (dout_i . v_j - delta_i)
// they are
//   dv = P^T dout,  dq = softmax_scale dX k,  dk = softmax_scale dX^T q,
// where dX is dS, with a softcap times 1 - (capped score / softcap)^2; each of dk and dv is the sum
// over the query heads that share the key's head; and
//   dbias = the sum of dS over the dimensions along which bias has one element,
//   dalibi_slopes = - sum of dS_ij |i + shift - j|,  dsinks = - sum of exp(sink - lse_i) delta_i.
// Source: the backward pass of FlashAttention-2 (arXiv 2307.08691, section 3.1), with the terms of
// the scores added.
//
// Keys that no row sees have gradients of 0: these are written, as are those of rows of q, k and v
// that belong to no sequence, or lie behind seqused_k. Sums are in fp32 (float64 for float64
// tensors) and rounded once. out and lse may be those of a larger whole of which these keys are a
// part: the gradients are then the part's share.
struct BackwardParams {
  // The call of forward() whose gradients these are; its out and lse are read. precision is
  // kInputs; there are no 8-bit tensors, and keys do not lie in a cache. The workspace is that of
  // the backward pass.
  AttentionParams forward;

  // Gradients of the results. At least one is given; null: zeros.
  TensorView dout;                    // as out, of its dtype; dimensions may have a stride of 0
  BasicTensorView<const float> dlse;  // as lse

  // The gradients to compute; null: not wanted.
  MutableTensorView dq;  // as q, of its dtype
  MutableTensorView dk;  // as k
  MutableTensorView dv;  // as v
  // As bias, of its dtype, and as alibi_slopes. A dimension of stride 0 has one element, which gets
  // the sum over it, as a bias that is broadcast has.
  MutableTensorView dbias;
  BasicTensorView<float> dalibi_slopes;
  BasicTensorView<float> dsinks;  // [num_heads]

  // On a GPU: the same bits at every call, whatever else runs. On the CPU they are always, and with
  // this a sequence has the same ones in any batch.
  bool deterministic = false;
};

// Whether backward() would run `params` on `device`; never launches, never throws for wrong params.
DLATTN_API Support supported(const BackwardParams& params, const DeviceInfo& device,
                             const Options& options = {});
// The plan that backward() would follow on `device`. Throws UnsupportedError.
DLATTN_API Plan plan(const BackwardParams& params, const DeviceInfo& device,
                     const Options& options = {});

// Computes gradients; stream, memory and errors as forward(). Options::num_splits, split_size and,
// on a GPU, batch_invariant are refused.
DLATTN_API void backward(const BackwardParams& params, void* stream = nullptr,
                         const Options& options = {});

}  // namespace dlattn
