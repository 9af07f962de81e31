#pragma once

#include <cstdint>

#include "cuda/tile/boxes.h"
#include "cuda/wmma/traits.h"
#include "dlattn/params.h"

// What the copy engine is told of the tensors of a problem of fixed length, as plain host code: the
// plan asks whether it can be told, the launch tells it.
namespace dlattn::wmma {

struct TensorBoxes {
  tile::TensorBox q, k, v;
};

// A box is one segment (tile::SwizzledRows) of a warp's rows of Q, of a tile's of K and V.
inline TensorBoxes tensor_boxes(const AttentionParams& p, int head_dim_tile, int variant) {
  const TileShape shape = tile_shape(head_dim_tile, variant);
  const auto box = [&](const char* name, const void* data, std::int64_t columns, std::int64_t rows,
                       std::int64_t row_stride, std::int64_t heads, std::int64_t head_stride,
                       std::int64_t batch_stride, int box_rows) {
    tile::TensorBox box =
        tile::tensor_box(name, rows > 0 ? data : p.q, columns, rows, row_stride, heads, head_stride,
                         p.batch_size, batch_stride, box_rows);  // without rows it may be null
    box.box_columns = head_dim_tile % 64 == 0 ? 64 : 32;
    return box;
  };
  return {box("q", p.q, p.head_dim, p.seqlen_q, p.q_row_stride, p.num_heads, p.q_head_stride,
              p.q_batch_stride, shape.row_tiles * 16),
          box("k", p.k, p.head_dim, p.seqlen_k, p.k_row_stride, p.num_heads_kv, p.k_head_stride,
              p.k_batch_stride, shape.block_n),
          box("v", p.v, p.head_dim_v, p.seqlen_k, p.v_row_stride, p.num_heads_kv, p.v_head_stride,
              p.v_batch_stride, shape.block_n)};
}

}  // namespace dlattn::wmma
