#pragma once

#include "cuda/plan/tile_config.h"
#include "dlattn/attention.h"

// Shared by the launchers of the softmax's forms.
namespace dlattn {

// q, k, v and out are contiguous, (batch_size, num_heads, seqlen, head_dim), of float16.
inline AttentionParams contiguous_problem(const void* q, const void* k, const void* v, void* out,
                                          std::int64_t batch_size, std::int64_t num_heads,
                                          std::int64_t seqlen, std::int64_t head_dim,
                                          double softmax_scale, bool causal, int device) {
  AttentionParams p;
  p.q.data = q, p.k.data = k, p.v.data = v, p.out.data = out;
  p.device = {DeviceType::kCuda, device};
  p.batch_size = batch_size, p.num_heads = p.num_heads_kv = num_heads;
  p.seqlen_q = p.seqlen_k = seqlen, p.head_dim = p.head_dim_v = head_dim;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = head_dim;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = seqlen * head_dim;
  p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride =
      num_heads * seqlen * head_dim;
  p.softmax_scale = softmax_scale;
  p.causal = causal ? Causal::kBottomRight : Causal::kNone;
  return p;
}

// The plan of a tile.
inline Plan plan_of(const char* kernel, const AttentionParams& params, int head_dim_tile,
                    const TileConfig& config, std::int64_t grid) {
  Plan plan;
  plan.kernel = kernel;
  plan.dtype = params.q.dtype;
  plan.head_dim_tile = head_dim_tile;
  plan.block_m = config.block_m;
  plan.block_n = config.block_n;
  plan.num_warps = config.num_warps;
  plan.num_stages = config.num_stages;
  plan.smem_bytes = config.smem_bytes;
  plan.grid = grid;
  return plan;
}

}  // namespace dlattn
