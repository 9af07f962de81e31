#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/sm90/score_params.h"
#include "cuda/sm90/traits.h"
#include "cuda/tile/launch_shape.h"
#include "dlattn/params.h"

// What the copy engine is told of the tensors, as plain host code: the plan asks whether it can be
// told, the launch tells it.
namespace dlattn::sm90 {

// A tensor and the box of it that one copy moves.
struct TensorBox {
  const char* name;
  const void* data;
  std::int64_t sizes[5];    // columns, rows, heads, batch; at least 1; of a pack, see packed_box
  std::int64_t strides[5];  // in bytes; of a dimension of one element, any that is accepted
  int box_rows;
  int element_bytes = 2;
  int box_columns = kBlockColumns;  // which fill a row of the swizzle's
  int rank = 4;
};

struct TensorBoxes {
  TensorBox q, k, v, out;
  TensorBox bias, mask;  // without data if there is none
};

// Rows of all sequences of one length: [batch][heads][rows][columns].
inline TensorBox tensor_box(const char* name, const void* data, std::int64_t columns,
                            std::int64_t rows, std::int64_t row_stride, std::int64_t heads,
                            std::int64_t head_stride, std::int64_t batch, std::int64_t batch_stride,
                            int box_rows, int element_bytes = 2) {
  constexpr std::int64_t kAnyStride = 16;
  if (rows == 0 || columns == 0)  // never copied, but something must be told
    columns = rows = heads = batch = 1;
  const auto stride = [=](std::int64_t size, std::int64_t elements) {
    return size > 1 ? elements * element_bytes : kAnyStride;
  };
  return {name,
          data,
          {columns, rows, heads, batch},
          {element_bytes, stride(rows, row_stride), stride(heads, head_stride),
           stride(batch, batch_stride)},
          box_rows,
          element_bytes,
          element_bytes == 4 ? kBlockRowBytes / 4 : kBlockColumns};
}

// Rows of packed sequences. A box must end with its sequence: what follows in memory is another's,
// or nobody's. So rows are counted from the end of their dimension: a box whose sequence has r more
// rows begins at row kPackEnd - r, and there the copy engine takes the tensor to end. The fourth
// dimension walks along the pack in steps of a row, too, to where the sequence ends; and the last
// one takes the kPackEnd rows back, for its coordinate kPackEnd stands for 2^64 - kPackEnd rows,
// and addresses wrap.
constexpr std::int64_t kPackEnd = std::int64_t{1} << 30;
constexpr std::int64_t kPackTurn = std::int64_t{1} << 34;  // 2^64 / kPackEnd
static_assert(kPackEnd > kMaxSeqlen);

inline TensorBox packed_box(const char* name, const void* data, std::int64_t columns,
                            std::int64_t rows, std::int64_t row_stride, std::int64_t heads,
                            std::int64_t head_stride, int box_rows) {
  TensorBox box =
      tensor_box(name, data, columns, rows, row_stride, heads, head_stride, 1, 0, box_rows);
  box.rank = 5;
  box.sizes[1] = kPackEnd;
  box.sizes[3] = std::max<std::int64_t>(rows, 1) + 1;
  box.sizes[4] = kPackEnd + 1;
  box.strides[3] = box.strides[1];
  box.strides[4] = kPackTurn - box.strides[1];
  return box;
}

// The shape that a problem has in the instance of a tile.
inline TileShape tile_shape(const AttentionParams& p, int head_dim_tile) {
  return tile_shape(head_dim_tile, head_dim_v_tile(head_dim_tile, p.head_dim_v), terms_of(p));
}

inline TensorBoxes tensor_boxes(const AttentionParams& p, int head_dim_tile) {
  const int block_n = tile_shape(p, head_dim_tile).block_n;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t rows_k = varlen ? p.total_k : p.seqlen_k;
  // Without keys there may be no address.
  const void* k = rows_k > 0 ? p.k : p.q;
  const void* v = rows_k > 0 ? p.v : p.q;
  if (varlen) {
    return {packed_box("q", p.q, p.head_dim, p.total_q, p.q_row_stride, p.num_heads,
                       p.q_head_stride, kWarpgroupRows),
            packed_box("k", k, p.head_dim, rows_k, p.k_row_stride, p.num_heads_kv, p.k_head_stride,
                       block_n),
            packed_box("v", v, p.head_dim_v, rows_k, p.v_row_stride, p.num_heads_kv,
                       p.v_head_stride, block_n),
            packed_box("out", p.out, p.head_dim_v, p.total_q, p.out_row_stride, p.num_heads,
                       p.out_head_stride, kWarpgroupRows),
            {},
            {}};
  }
  TensorBoxes boxes = {
      tensor_box("q", p.q, p.head_dim, p.seqlen_q, p.q_row_stride, p.num_heads, p.q_head_stride,
                 p.batch_size, p.q_batch_stride, kWarpgroupRows),
      tensor_box("k", k, p.head_dim, p.seqlen_k, p.k_row_stride, p.num_heads_kv, p.k_head_stride,
                 p.batch_size, p.k_batch_stride, block_n),
      tensor_box("v", v, p.head_dim_v, p.seqlen_k, p.v_row_stride, p.num_heads_kv, p.v_head_stride,
                 p.batch_size, p.v_batch_stride, block_n),
      tensor_box("out", p.out, p.head_dim_v, p.seqlen_q, p.out_row_stride, p.num_heads,
                 p.out_head_stride, p.batch_size, p.out_batch_stride, kWarpgroupRows),
      {},
      {}};
  if (p.bias) {
    boxes.bias = tensor_box("bias", p.bias, p.seqlen_k, p.seqlen_q, p.bias_row_stride, p.num_heads,
                            p.bias_head_stride, p.batch_size, p.bias_batch_stride, kTermRows,
                            static_cast<int>(size_of(p.bias_dtype)));
  }
  if (p.mask) {
    boxes.mask = tensor_box("mask", p.mask, p.seqlen_k, p.seqlen_q, p.mask_row_stride, p.num_heads,
                            p.mask_head_stride, p.batch_size, p.mask_batch_stride, kTermRows, 1);
  }
  return boxes;
}

// Where the items of a pack's sequence begin, which has first row `start` of q. Rounded, so that it
// takes no sum over the sequences before: of the items up to the next one's up to num_heads are
// none.
constexpr unsigned first_item(int start, int sequence, int num_heads, int block_m) {
  return static_cast<unsigned>(start / block_m + sequence) * static_cast<unsigned>(num_heads);
}

// Work items of the whole problem: blocks of query rows, of a pack at most.
inline std::int64_t num_items(const AttentionParams& p, int head_dim_tile) {
  const int rows = block_m(tile_shape(p, head_dim_tile));
  if (p.cu_seqlens_q) return (p.total_q / rows + p.batch_size) * p.num_heads;
  return (p.seqlen_q + rows - 1) / rows * p.num_heads * p.batch_size;
}

}  // namespace dlattn::sm90
