#pragma once

#include <cstdint>

#include "cuda/forward/decode/traits.h"
#include "cuda/tile/launch_shape.h"

// What the host works out once per launch.
namespace dlattn::decode {

struct DecodeShape : LaunchShape {
  unsigned num_blocks;  // of the kernel that walks the keys
  // Blocks have whole row blocks: there are no parts, and nothing is left to be added up.
  bool whole;
  // All sequences have as many queries and keys, and the host knows how many.
  bool uniform;
  Divider page_size;  // 1 without pages
  std::uint32_t* starts;
  void* stats;
  float* outs;
};

// Whether scores are modified between q.k and the softmax.
inline bool is_general(const AttentionParams& p) {
  return p.softcap != 0.0 || p.mask.data || p.alibi_slopes.data;
}

inline DecodeShape make_decode_shape(const AttentionParams& p, const Plan& plan) {
  DecodeShape shape{};
  static_cast<LaunchShape&>(shape) = make_launch_shape(p, plan, p.num_heads / p.num_heads_kv);
  shape.num_blocks = static_cast<unsigned>(plan.grid);
  shape.whole = plan.num_splits == 1;
  shape.uniform = !p.cu_seqlens_q && !p.cu_seqlens_k && !p.seqused_k && !p.leftpad_k;
  shape.page_size = Divider(p.page_table.data ? static_cast<std::uint32_t>(p.page_size) : 1);
  if (shape.whole) return shape;
  const WorkspaceMap map = workspace_map(p.batch_size, plan.grid, plan.block_m, plan.head_dim_tile);
  auto* const bytes = static_cast<unsigned char*>(p.workspace);
  shape.starts = reinterpret_cast<std::uint32_t*>(bytes + map.starts);
  shape.stats = bytes + map.stats;
  shape.outs = reinterpret_cast<float*>(bytes + map.outs);
  return shape;
}

}  // namespace dlattn::decode
