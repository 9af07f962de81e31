#pragma once

#include <cstdint>
#include <utility>

#include "core/problem/positions.h"
#include "core/problem/tensor_sizes.h"
#include "core/util/inline.h"
#include "cuda/plan/launch_shape.h"
#include "cuda/tile/key_parts/work_partition.h"
#include "cuda/tile/key_parts/workspace.h"

// Numbers that the host computes once per launch.
namespace dlattn::tile::key_parts {

struct DecodeShape : LaunchShape {
  Divider num_blocks;  // of the kernel that walks the keys; clusters, where it has them
  // Blocks, or clusters, have whole row blocks: nothing goes to the workspace, and nothing is left
  // to be added up.
  bool whole;
  // How the tiles of keys of a row block are divided into units (schedule.cuh). Neither: a tile is
  // one.
  int split_tiles;   // not 0: a unit ends at each multiple of so many tiles from key 0
  int num_splits;    // not 0: a unit is one of so many parts of the row block
  int part_tiles;    // uniform: what work_partition.h decides
  bool is_bfloat16;  // q and out, with 8-bit keys
  // All sequences have as many queries and keys, and the host knows how many.
  bool uniform;
  bool latent;        // is_latent()
  Divider page_size;  // without pages more than there are keys
  std::uint32_t* starts;
  void* stats;
  float* outs;
  // Thread blocks of a cluster, which have a row block's keys together: 1 << cluster_log2.
  int cluster_log2;
  // Thread blocks of a cluster that have a row block each, side by side, and the same keys: 1 <<
  // pair_log2. A part in the workspace is one's.
  int pair_log2;
  // Thread blocks are in clusters of two without that, each of which adds up a row block of which
  // its blocks have a part each.
  bool joins;
};

// The most row blocks of all KV heads and sequences: the number if all are as long as the problem
// says.
inline std::int64_t num_row_blocks(const AttentionParams& p, int block_m) {
  const std::int64_t rows = p.seqlen_q * (p.num_heads / p.num_heads_kv);
  return (rows + block_m - 1) / block_m * p.num_heads_kv * p.batch_size;
}

// The parts that blocks leave in the workspace, at most. With evenly divided tiles a block has at
// most one part that began before its own tiles, and one that goes on behind them.
inline std::int64_t num_parts(const AttentionParams& p, const Plan& plan) {
  if (plan.split_size == 0 && !plan.fixed_splits) return 2 * plan.grid;
  return num_row_blocks(p, plan.block_m) * plan.num_splits;
}

// The tiles of a part, where all sequences are as long as the problem says. `side_by_side`: row
// blocks that a cluster has so.
inline int part_tiles_of(const AttentionParams& p, const Plan& plan, int side_by_side) {
  const PositionMask<std::int64_t> mask(
      window_of<std::int64_t>(p), position_shift(p.causal, p.seqlen_q, p.seqlen_k), p.seqlen_k);
  const dlattn::Range<std::int64_t> tiles = tiles_of<std::int64_t>(
      mask.any_row(0, greater<std::int64_t>(p.seqlen_q - 1, 0)), plan.block_n);
  const auto each = static_cast<unsigned>(greater<std::int64_t>(tiles.end - tiles.begin, 0));
  const auto blocks = static_cast<unsigned>(num_row_blocks(p, plan.block_m * side_by_side));
  return part_tiles(Divider(static_cast<std::uint32_t>(plan.grid / side_by_side)),
                    static_cast<unsigned>(fixed_overhead_tiles(plan.block_n)),
                    each > 0 ? blocks : 0, blocks * each, each);
}

// Whether V is the first columns of K's rows, as the latents of MLA are, which kernels for wide
// heads copy once.
inline bool is_latent(const AttentionParams& p) {
  const core::TensorSizes keys = core::key_sizes(p);
  const auto same = [](std::int64_t size, std::int64_t k, std::int64_t v) {
    return size <= 1 || k == v;
  };
  return p.v.data == p.k.data && p.head_dim_v <= p.head_dim &&
         same(keys.batch, p.k.batch_stride, p.v.batch_stride) &&
         same(keys.rows, p.k.row_stride, p.v.row_stride) &&
         same(keys.heads, p.k.head_stride, p.v.head_stride);
}

// Whether scores are modified between q.k and the softmax.
inline bool is_general(const AttentionParams& p) {
  return p.softcap != 0.0 || p.mask.data || p.alibi_slopes.data;
}

// Whether the host knows how many queries and keys each sequence has: as many as the others.
inline bool host_knows_lengths(const AttentionParams& p) {
  return !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_k && !p.leftpad_k;
}

// For the blocks of a cluster: to share a row block's keys, to have row blocks side by side, or to
// join the two parts of a row block.
enum class ClusterUse { kShare, kSideBySide, kJoin };
inline DecodeShape make_decode_shape(const AttentionParams& p, const Plan& plan,
                                     ClusterUse use = ClusterUse::kShare) {
  DecodeShape shape{};
  static_cast<LaunchShape&>(shape) = make_launch_shape(p, plan, p.num_heads / p.num_heads_kv);
  while (1 << shape.cluster_log2 < plan.cluster_size) ++shape.cluster_log2;
  shape.num_blocks = Divider(static_cast<std::uint32_t>(plan.grid) >> shape.cluster_log2);
  if (use != ClusterUse::kShare) std::swap(shape.cluster_log2, shape.pair_log2);
  if (use == ClusterUse::kJoin) {
    shape.joins = shape.pair_log2 == 1;
    shape.pair_log2 = 0;
    shape.num_blocks = Divider(static_cast<std::uint32_t>(plan.grid));
  }
  shape.whole = plan.num_splits == 1 || shape.cluster_log2 > 0;
  shape.split_tiles = shape.whole ? 0 : static_cast<int>(plan.split_size / plan.block_n);
  shape.num_splits = plan.fixed_splits && !shape.whole ? plan.num_splits : 0;
  shape.is_bfloat16 = p.q.dtype == DType::kBFloat16;
  shape.uniform = host_knows_lengths(p);
  shape.latent = is_latent(p);
  shape.part_tiles =
      shape.uniform && !shape.whole ? part_tiles_of(p, plan, 1 << shape.pair_log2) : 0;
  constexpr std::uint32_t kAllKeys = 0x7fffffff;
  shape.page_size = Divider(p.page_table.data ? static_cast<std::uint32_t>(p.page_size) : kAllKeys);
  if (shape.whole) return shape;
  const WorkspaceMap map =
      workspace_map(p.batch_size, num_parts(p, plan), plan.block_m, plan.head_dim_tile);
  auto* const bytes = static_cast<unsigned char*>(p.workspace);
  shape.starts = reinterpret_cast<std::uint32_t*>(bytes + map.starts);
  shape.stats = bytes + map.stats;
  shape.outs = reinterpret_cast<float*>(bytes + map.outs);
  return shape;
}

}  // namespace dlattn::tile::key_parts
