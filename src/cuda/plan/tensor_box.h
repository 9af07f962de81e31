#pragma once

#include <cstdint>

#include "core/problem/limits.h"
#include "core/util/inline.h"
#include "dlattn/forward.h"
#include "dlattn/tensor.h"

// How tensors are described to TMA, as plain host code: a plan asks whether TMA accepts them
// (tensor_refusal.h), and a launch encodes them (cuda/tensor_map.h).
namespace dlattn::cuda {

constexpr int kBoxRowBytes = 128;  // the widest swizzle's

// A tensor and the box of it that one copy moves.
struct TensorBox {
  const char* name;
  const void* data;
  std::int64_t sizes[5];    // columns, rows, heads, batch; at least 1; varlen: see varlen_box
  std::int64_t strides[5];  // in bytes; of a dimension of one element, any that is accepted
  int box_rows;
  int element_bytes = 2;
  int box_columns = kBoxRowBytes / 2;  // which fill a row of the swizzle's, or half of one
  int rank = 4;
  int box_depth = 1;   // of the third dimension
  int l2_bytes = 256;  // that L2 reads of memory at a time: 128 or 256
};

// Rows of all sequences of one length: [batch][heads][rows][columns].
template <typename T>
TensorBox tensor_box(const char* name, const BasicTensorView<T>& x, std::int64_t columns,
                     std::int64_t rows, std::int64_t heads, std::int64_t batch, int box_rows,
                     int element_bytes = 2) {
  constexpr std::int64_t kAnyStride = 16;
  if (rows == 0 || columns == 0)  // never copied, but something must be told
    columns = rows = heads = batch = 1;
  const auto stride = [=](std::int64_t size, std::int64_t elements) {
    return size > 1 ? elements * element_bytes : kAnyStride;
  };
  return {name,
          x.data,
          {columns, rows, heads, batch},
          {element_bytes, stride(rows, x.row_stride), stride(heads, x.head_stride),
           stride(batch, x.batch_stride)},
          box_rows,
          element_bytes,
          element_bytes == 4 ? kBoxRowBytes / 4 : kBoxRowBytes / 2};
}

// Rows of varlen sequences. A box must end with its sequence: what follows in memory is another's,
// or nobody's. So rows are counted from the end of their dimension: a box whose sequence has r more
// rows begins at row kVarlenEnd - r, and there TMA takes the tensor to end. The fourth
// dimension walks along the tensor in steps of a row, too, to where the sequence ends; and the last
// one takes the kVarlenEnd rows back, for its coordinate kVarlenEnd stands for 2^64 - kVarlenEnd
// rows, and addresses wrap.
constexpr std::int64_t kVarlenEnd = std::int64_t{1} << 30;
constexpr std::int64_t kVarlenWrap = std::int64_t{1} << 34;  // 2^64 / kVarlenEnd
static_assert(kVarlenEnd > core::kMaxSeqlen);

template <typename T>
TensorBox varlen_box(const char* name, const BasicTensorView<T>& x, std::int64_t columns,
                     std::int64_t rows, std::int64_t heads, int box_rows, int element_bytes = 2) {
  TensorBox box = tensor_box(name, x, columns, rows, heads, 1, box_rows, element_bytes);
  box.rank = 5;
  box.sizes[1] = kVarlenEnd;
  box.sizes[3] = greater<std::int64_t>(rows, 1) + 1;
  box.sizes[4] = kVarlenEnd + 1;
  box.strides[3] = box.strides[1];
  box.strides[4] = kVarlenWrap - box.strides[1];
  return box;
}

// How many rows lie between the first rows of two neighbouring pages or entries of a cache.
template <typename T>
std::int64_t page_rows(const BasicTensorView<T>& x, std::int64_t pages) {
  return pages > 1 && x.row_stride != 0 ? x.batch_stride / x.row_stride : 0;
}

// Rows of the pages or entries of a cache, as those of one varlen tensor, in which a page is a
// sequence: so a box ends where the keys of a sequence end within its page, and TMA is told the
// pool's own address. One before it would need fewer dimensions, but the driver and TMA may read
// where they are told that a tensor begins, and before a pool there may be no memory.
template <typename T>
TensorBox page_box(const char* name, const BasicTensorView<T>& x, std::int64_t columns,
                   std::int64_t rows, std::int64_t heads, std::int64_t pages, int box_rows,
                   int element_bytes = 2) {
  const std::int64_t all_rows = greater<std::int64_t>(pages - 1, 0) * page_rows(x, pages) + rows;
  return varlen_box(name, x, columns, all_rows, heads, box_rows, element_bytes);
}

// The rows of a box of keys in a cache for tiles of `block_n`, a power of two: as many as a tile's
// and a page's first rows have between them at least.
DLATTN_SHARED int page_box_rows(const AttentionParams& p, int block_n) {
  if (!p.page_table.data) return block_n;
  const std::int64_t even = p.page_size & -p.page_size;
  return even < block_n ? static_cast<int>(even) : block_n;
}

}  // namespace dlattn::cuda
