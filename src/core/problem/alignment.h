#pragma once

#include <cstdint>

#include "core/problem/tensor_sizes.h"
#include "core/util/inline.h"
#include "dlattn/forward.h"

// How many bytes, up to 16, the rows of tensors are aligned to, which is how wide an access to them
// may be.
namespace dlattn::core {

// The largest power of two up to 16 that divides all `bits` are made of; no access is narrower than
// one element.
constexpr int access_bytes(std::uint64_t bits, std::int64_t element_bytes) {
  int bytes = 16;
  while (bytes > element_bytes && bits % bytes != 0) bytes /= 2;
  return bytes;
}

// The alignment of a tensor's rows, wherever they begin. The stride of a dimension of one element
// does not count.
template <typename T>
int row_alignment(const BasicTensorView<T>& x, const TensorSizes& sizes,
                  std::int64_t element_bytes) {
  std::uint64_t bits = reinterpret_cast<std::uintptr_t>(x.data);
  const auto add = [&](std::int64_t size, std::int64_t stride) {
    if (size > 1) bits |= static_cast<std::uint64_t>(stride * element_bytes);
  };
  add(sizes.batch, x.batch_stride);
  add(sizes.rows, x.row_stride);
  add(sizes.heads, x.head_stride);
  return access_bytes(bits, element_bytes);
}

// The widest copy of q, k and v. A row is copied in whole steps, so its length counts as well.
inline int copy_bytes(const AttentionParams& p) {
  const auto of = [](const TensorView& x, const TensorSizes& sizes, std::int64_t columns) {
    const std::int64_t element_bytes = size_of(x.dtype);
    return lesser(row_alignment(x, sizes, element_bytes),
                  access_bytes(static_cast<std::uint64_t>(columns * element_bytes), element_bytes));
  };
  const TensorSizes keys = key_sizes(p);
  return lesser(of(p.q, query_sizes(p), p.head_dim),
                lesser(of(p.k, keys, p.head_dim), of(p.v, keys, p.head_dim_v)));
}

// The widest store to out.
inline int store_bytes(const AttentionParams& p) {
  return row_alignment(p.out, query_sizes(p), size_of(p.out.dtype));
}

// The widest load of bias or mask along the keys; 0: a row's keys share one element; -1: they are
// no neighbours in memory.
template <typename T>
int score_load_bytes(const AttentionParams& p, const BasicTensorView<T>& x,
                     std::int64_t element_bytes) {
  if (x.col_stride == 0) return 0;
  if (x.col_stride != 1) return -1;
  return row_alignment(x, {p.batch_size, p.seqlen_q, p.num_heads}, element_bytes);
}

}  // namespace dlattn::core
