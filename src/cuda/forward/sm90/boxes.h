#pragma once

#include <cstdint>

#include "core/problem/tensor_sizes.h"
#include "cuda/forward/sm90/score_params.h"
#include "cuda/forward/sm90/traits.h"
#include "cuda/plan/launch_shape.h"
#include "cuda/plan/tensor_box.h"
#include "dlattn/forward.h"

// How the tensors are described to TMA, as plain host code: the plan asks whether they can be, the
// launch does it.
namespace dlattn::sm90 {

struct TensorBoxes {
  cuda::TensorBox q, k, v, out;
  cuda::TensorBox bias, mask;            // without data if there is none
  int k_page_rows = 0, v_page_rows = 0;  // of keys in a cache (cuda::page_rows())
};

// The shape that a problem has in the instance of a tile.
inline TileShape tile_shape(const AttentionParams& p, int head_dim_tile, Variant variant) {
  return tile_shape(head_dim_tile, head_dim_v_tile(head_dim_tile, p.head_dim_v), variant);
}

inline TensorBoxes tensor_boxes(const AttentionParams& p, int head_dim_tile, Variant variant) {
  const int block_n = tile_shape(p, head_dim_tile, variant).block_n;
  const std::int64_t rows_k = core::key_sizes(p).rows;
  TensorView k = p.k, v = p.v;
  if (rows_k == 0) k.data = v.data = p.q.data;  // without keys there may be no address
  if (is_cache(p)) {
    AttentionParams queries = p;  // whose own boxes are those of other problems
    queries.seqused_k = queries.cache_batch_idx = queries.leftpad_k = nullptr;
    queries.page_table.data = nullptr;
    TensorBoxes boxes = tensor_boxes(queries, head_dim_tile, variant);
    const core::TensorSizes sizes = core::key_sizes(p);
    const auto keys = [&](const char* name, const TensorView& x, std::int64_t columns) {
      return cuda::page_box(name, x, columns, sizes.rows, sizes.heads, sizes.batch,
                            cuda::page_box_rows(p, block_n));
    };
    boxes.k = keys("k", k, p.head_dim);
    boxes.v = keys("v", v, p.head_dim_v);
    boxes.k_page_rows = static_cast<int>(cuda::page_rows(k, sizes.batch));
    boxes.v_page_rows = static_cast<int>(cuda::page_rows(v, sizes.batch));
    return boxes;
  }
  if (p.cu_seqlens_q) {
    return {cuda::varlen_box("q", p.q, p.head_dim, p.total_q, p.num_heads, kWarpgroupRows),
            cuda::varlen_box("k", k, p.head_dim, rows_k, p.num_heads_kv, block_n),
            cuda::varlen_box("v", v, p.head_dim_v, rows_k, p.num_heads_kv, block_n),
            cuda::varlen_box("out", p.out, p.head_dim_v, p.total_q, p.num_heads, kWarpgroupRows),
            {},
            {}};
  }
  const auto box = [&p](const char* name, const auto& x, std::int64_t columns, std::int64_t rows,
                        std::int64_t heads, int box_rows, std::int64_t element_bytes = 2) {
    return cuda::tensor_box(name, x, columns, rows, heads, p.batch_size, box_rows,
                            static_cast<int>(element_bytes));
  };
  TensorBoxes boxes = {box("q", p.q, p.head_dim, p.seqlen_q, p.num_heads, kWarpgroupRows),
                       box("k", k, p.head_dim, p.seqlen_k, p.num_heads_kv, block_n),
                       box("v", v, p.head_dim_v, p.seqlen_k, p.num_heads_kv, block_n),
                       box("out", p.out, p.head_dim_v, p.seqlen_q, p.num_heads, kWarpgroupRows),
                       {},
                       {}};
  if (p.bias.data)
    boxes.bias = box("bias", p.bias, p.seqlen_k, p.seqlen_q, p.num_heads, kBiasMaskRows,
                     size_of(p.bias.dtype));
  if (p.mask.data)
    boxes.mask = box("mask", p.mask, p.seqlen_k, p.seqlen_q, p.num_heads, kBiasMaskRows, 1);
  return boxes;
}

// Work tiles of the whole problem.
inline std::int64_t num_work_tiles(const AttentionParams& p, int head_dim_tile, Variant variant) {
  return num_tiles(p, block_m(tile_shape(p, head_dim_tile, variant)));
}

}  // namespace dlattn::sm90
