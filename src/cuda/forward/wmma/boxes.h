#pragma once

#include <cstdint>

#include "cuda/forward/wmma/traits.h"
#include "cuda/plan/tensor_box.h"
#include "dlattn/forward.h"

// The boxes by which TMA loads the tensors of a problem of fixed length, as plain host code: the
// plan asks whether TMA accepts them, the launch encodes them.
namespace dlattn::wmma {

struct TensorBoxes {
  cuda::TensorBox q, k, v;
};

// Columns of a segment of tile::SwizzledRows.
constexpr int segment_columns(int head_dim_tile) {
  return (head_dim_tile % 64 == 0 ? 128 : 64) / kElementBytes;
}

// A box is one segment (tile::SwizzledRows) of a warp's rows of Q, or of a tile's rows of K or V.
inline TensorBoxes tensor_boxes(const AttentionParams& p, int head_dim_tile, int variant) {
  const TileShape shape = tile_shape(head_dim_tile, variant);
  const auto box = [&](const char* name, TensorView x, std::int64_t columns, std::int64_t rows,
                       std::int64_t heads, int box_rows) {
    if (rows == 0) x.data = p.q.data;  // x.data may be null
    cuda::TensorBox box = cuda::tensor_box(name, x, columns, rows, heads, p.batch_size, box_rows);
    box.box_columns = segment_columns(head_dim_tile);
    return box;
  };
  return {box("q", p.q, p.head_dim, p.seqlen_q, p.num_heads, shape.row_tiles * 16),
          box("k", p.k, p.head_dim, p.seqlen_k, p.num_heads_kv, shape.block_n),
          box("v", p.v, p.head_dim_v, p.seqlen_k, p.num_heads_kv, shape.block_n)};
}

// Whether the tensors have every column of a box, or none of them. Then one copy may load all
// segments: see all_segments().
inline bool full_segments(const AttentionParams& p, int head_dim_tile) {
  const int columns = segment_columns(head_dim_tile);
  return p.head_dim % columns == 0 && p.head_dim_v % columns == 0;
}

// The same rows in one box, with the segments of a row as a dimension of their own after the rows:
// [batch][heads][segments][rows][columns].
inline cuda::TensorBox all_segments(cuda::TensorBox box, int head_dim_tile) {
  const std::int64_t segments = box.sizes[0] / box.box_columns;
  for (int i = 4; i > 2; --i) {
    box.sizes[i] = box.sizes[i - 1];
    box.strides[i] = box.strides[i - 1];
  }
  box.sizes[0] = box.box_columns;
  box.sizes[2] = segments > 0 ? segments : 1;
  box.strides[2] = box.box_columns * box.element_bytes;
  box.rank = 5;
  box.box_depth = head_dim_tile / box.box_columns;
  return box;
}

}  // namespace dlattn::wmma
