#pragma once

#include <cstdint>

#include "core/problem/quantized.h"
#include "core/problem/tensor_sizes.h"
#include "cuda/forward/sm90_fp8/traits.h"
#include "cuda/plan/launch_shape.h"
#include "cuda/plan/tensor_box.h"
#include "dlattn/forward.h"

// How the tensors are described to TMA, as plain host code: the plan asks whether they can be, the
// launch does it.
namespace dlattn::sm90_fp8 {

struct TensorBoxes {
  cuda::TensorBox q, k, v;
};

// A box has 128 columns of a warpgroup's rows of q, or of a tile's keys of k and v.
inline TensorBoxes tensor_boxes(const AttentionParams& p, int head_dim_tile) {
  const int block_n = tile_shape(head_dim_tile).block_n;
  const std::int64_t rows_k = core::key_sizes(p).rows;
  TensorView k = p.k, v = p.v;
  if (rows_k == 0) k.data = v.data = p.q.data;  // without keys there may be no address
  const auto box = [&p](const char* name, const TensorView& x, std::int64_t columns,
                        std::int64_t rows, std::int64_t heads, int box_rows) {
    cuda::TensorBox described =
        p.cu_seqlens_q ? cuda::varlen_box(name, x, columns, rows, heads, box_rows, 1)
                       : cuda::tensor_box(name, x, columns, rows, heads, p.batch_size, box_rows, 1);
    described.box_columns = kBlockColumns;
    return described;
  };
  return {box("q", p.q, p.head_dim, core::query_sizes(p).rows, p.num_heads, kWarpgroupRows),
          box("k", k, p.head_dim, rows_k, p.num_heads_kv, block_n),
          box("v", v, p.head_dim_v, rows_k, p.num_heads_kv, block_n)};
}

// 16-bit inputs that were quantised (core/problem/quantized.h): the scales of their blocks, a power
// of two each, and what the results have of the inputs themselves.
struct BlockScales {
  QuantizedQueries queries;
  QuantizedView keys;
  TensorView inputs_q;    // q of 16 bits
  std::int64_t head_dim;  // its columns
};
// Those of a problem at launch, when the quantised inputs are in its workspace.
inline BlockScales block_scales(const AttentionParams& p) {
  const bool varlen = p.cu_seqlens_q;
  return {view_of(query_layout(p), p.workspace, varlen),
          view_of(quantized_layout(keys_of(p)), p.quantized_kv, varlen), p.q, p.head_dim};
}

// A problem of 16-bit inputs as that of what they were quantised to.
inline AttentionParams quantized_problem(const AttentionParams& p, const BlockScales& scales) {
  AttentionParams inner = p;
  inner.head_dim = quantized_columns(p.head_dim, p.head_dim_v);
  const auto view = [&](TensorView* x, const std::uint8_t* data, std::int64_t batch_stride,
                        std::int64_t head_stride) {
    *x = {data, batch_stride, inner.head_dim, head_stride, 1, DType::kFloat8E4M3};
  };
  view(&inner.q, scales.queries.q, scales.queries.batch_stride, scales.queries.head_stride);
  view(&inner.k, scales.keys.k, scales.keys.batch_stride, scales.keys.head_stride);
  view(&inner.v, scales.keys.v, scales.keys.batch_stride, scales.keys.head_stride);
  return inner;
}

// Work tiles of the whole problem.
inline std::int64_t num_work_tiles(const AttentionParams& p, int head_dim_tile) {
  return num_tiles(p, block_m(tile_shape(head_dim_tile)));
}

}  // namespace dlattn::sm90_fp8
