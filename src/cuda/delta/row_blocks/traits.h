#pragma once

#include <cstdint>

#include "core/problem/alignment.h"
#include "core/util/inline.h"
#include "cuda/plan/backward_workspace.h"
#include "dlattn/plan.h"

// The numbers that plans, launcher and kernel share.
namespace dlattn::delta::row_blocks {

constexpr int kNumThreads = 256;
constexpr int kLanes = 8;  // of a row
constexpr int kSmemBytes = kNumThreads / 32 * 4;

// The arguments of the kernel beside the parameters. Made by the launcher.
struct Shape {
  std::uint32_t num_row_blocks;  // of each head, at least 1
  std::uint32_t num_tiles;       // with a block each; more blocks only clear memory
  bool wide;                     // rows of out and dout are read by 16 bytes
  std::int64_t clear_begin;      // bytes of the workspace that are set to zero
  std::int64_t clear_end;
};

inline std::int64_t num_tiles(const BackwardParams& b) {
  return delta_blocks(b.forward) * b.forward.num_heads * b.forward.batch_size;
}

inline Shape make_shape(const BackwardParams& b, const Plan& plan) {
  const AttentionParams& p = b.forward;
  const core::TensorSizes sizes = core::query_sizes(p);
  const std::int64_t bytes = size_of(p.q.dtype);
  Shape shape{};
  shape.num_row_blocks = static_cast<std::uint32_t>(greater<std::int64_t>(delta_blocks(p), 1));
  shape.num_tiles = static_cast<std::uint32_t>(num_tiles(b));
  shape.wide = p.head_dim_v * bytes % 16 == 0 && core::row_alignment(p.out, sizes, bytes) == 16 &&
               core::row_alignment(b.dout, sizes, bytes) == 16;
  shape.clear_begin = plan.workspace_bytes - plan.cleared_bytes;
  shape.clear_end = plan.workspace_bytes;
  return shape;
}

}  // namespace dlattn::delta::row_blocks
