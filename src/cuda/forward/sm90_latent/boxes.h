#pragma once

#include <cstdint>

#include "core/problem/tensor_sizes.h"
#include "core/util/inline.h"
#include "cuda/forward/sm90_latent/traits.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/tile/key_parts/shape.h"

// How the keys are described to TMA, and the thread blocks that add up parts, as plain host code:
// the plan asks for it as well as the launch.
namespace dlattn::sm90_latent {

struct KeyBoxes {
  cuda::TensorBox box;
  int page_rows;  // from one page, or sequence, to the next (cuda::page_rows())
};

inline int key_bytes(const AttentionParams& p) {
  return static_cast<int>(size_of(p.k.dtype));
}

// Pages of a pool, entries of a cache, or keys of sequences of one length.
inline KeyBoxes key_boxes(const AttentionParams& p) {
  const core::TensorSizes sizes = core::key_sizes(p);
  TensorView k = p.k;
  if (sizes.rows == 0) k.data = p.q.data;  // without keys there may be no address
  KeyBoxes boxes = {cuda::page_box("k", k, p.head_dim, sizes.rows, sizes.heads, sizes.batch,
                                   cuda::page_box_rows(p, kBlockN), key_bytes(p)),
                    static_cast<int>(cuda::page_rows(k, sizes.batch))};
  // An H200 read 64 sequences of 4096 keys in 89 us instead of 95 so.
  boxes.box.l2_bytes = 128;
  return boxes;
}

// Row blocks that come in pairs are a cluster's, side by side, which then share their keys' way
// from L2; others' keys are divided among the blocks of a cluster where that is possible.
inline bool are_side_by_side(const AttentionParams& p) {
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  return (rows + kBlockM - 1) / kBlockM % 2 == 0;
}
inline DecodeShape decode_shape(const AttentionParams& p, const Plan& plan) {
  return make_decode_shape(p, plan,
                           are_side_by_side(p) ? ClusterUse::kSideBySide : ClusterUse::kJoin);
}

// How many thread blocks of the combine kernel share a row block, each of which has some columns of
// a row at least: as many in all as the SMs of the kernel before hold at once. Most of them often
// have nothing to do, and more would only let them wait for each other.
inline CombineGrid combine_grid(const AttentionParams& p, const Plan& plan) {
  const std::int64_t row_blocks = num_row_blocks(p, kBlockM);
  const std::int64_t rows = lesser<std::int64_t>(p.seqlen_q * plan.packed_heads, kBlockM);
  const std::int64_t most = greater<std::int64_t>(rows * combine_blocks(kWideTile), 1);
  const std::int64_t wanted =
      kResidentCombineBlocks * plan.grid / greater<std::int64_t>(row_blocks, 1);
  return {row_blocks,
          static_cast<int>(greater<std::int64_t>(lesser<std::int64_t>(wanted, most), 1))};
}

}  // namespace dlattn::sm90_latent
