#pragma once

#include "core/problem/tensor_sizes.h"
#include "cuda/forward/sm90_latent/traits.h"
#include "cuda/plan/tensor_box.h"

// How the keys are described to TMA, as plain host code: the plan asks whether they can be, the
// launch does it.
namespace dlattn::sm90_latent {

struct KeyBoxes {
  cuda::TensorBox box;
  int page_rows;  // from one page, or sequence, to the next (cuda::page_rows())
};

// Pages of a pool, entries of a cache, or keys of sequences of one length.
inline KeyBoxes key_boxes(const AttentionParams& p) {
  const core::TensorSizes sizes = core::key_sizes(p);
  TensorView k = p.k;
  if (sizes.rows == 0) k.data = p.q.data;  // without keys there may be no address
  return {cuda::page_box("k", k, p.head_dim, sizes.rows, sizes.heads, sizes.batch,
                         cuda::page_box_rows(p, kBlockN)),
          static_cast<int>(cuda::page_rows(k, sizes.batch))};
}

}  // namespace dlattn::sm90_latent
