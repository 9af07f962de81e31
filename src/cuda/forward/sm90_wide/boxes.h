#pragma once

#include "cuda/forward/sm90_wide/traits.h"
#include "cuda/plan/tensor_box.h"

// How the tensors are described to TMA, as plain host code: the plan asks whether they can be, the
// launch does it.
namespace dlattn::sm90_wide {

struct TensorBoxes {
  cuda::TensorBox q, k, v;
};

inline TensorBoxes tensor_boxes(const AttentionParams& p) {
  TensorView k = p.k, v = p.v;
  if (p.seqlen_k == 0) k.data = v.data = p.q.data;  // without keys there may be no address
  return {
      cuda::tensor_box("q", p.q, p.head_dim, p.seqlen_q, p.num_heads, p.batch_size, kRows),
      cuda::tensor_box("k", k, p.head_dim, p.seqlen_k, p.num_heads_kv, p.batch_size, kBlockN),
      cuda::tensor_box("v", v, p.head_dim_v, p.seqlen_k, p.num_heads_kv, p.batch_size, kStepKeys)};
}

}  // namespace dlattn::sm90_wide
