#pragma once

#include "core/problem/tensor_sizes.h"
#include "cpu/elements.h"
#include "dlattn/tensor.h"

// Rows of a head in memory and in the type that is computed with.
namespace dlattn::cpu::DLATTN_CPU_ISA {

// The bytes from the first element to row `row` of a head of an entry.
template <typename View>
DLATTN_INLINE std::int64_t row_offset(const View& view, std::int64_t batch, std::int64_t row,
                                      std::int64_t head) {
  return (batch * view.batch_stride + row * view.row_stride + head * view.head_stride) *
         size_of(view.dtype);
}

template <typename T>
DLATTN_INLINE void read_row(const TensorView& view, std::int64_t batch, std::int64_t row,
                            std::int64_t head, std::int64_t count, T* to) {
  const char* const from = static_cast<const char*>(view.data) + row_offset(view, batch, row, head);
  read_elements(view.dtype, from, 1, 0, count, to);
}

template <typename T>
DLATTN_INLINE void write_row(const MutableTensorView& view, std::int64_t batch, std::int64_t row,
                             std::int64_t head, std::int64_t count, const T* from) {
  char* const to = static_cast<char*>(view.data) + row_offset(view, batch, row, head);
  write_elements(view.dtype, from, count, to);
}

// A part of a row, from column `first` on, of a tensor with any stride between columns. Elements
// are those that are computed with, or float beside double.
template <typename T>
void write_columns(MutableTensorView view, std::int64_t batch, std::int64_t row, std::int64_t head,
                   std::int64_t first, std::int64_t count, const T* from) {
  const bool as_float = sizeof(T) == 8 && view.dtype == DType::kFloat32;
  const std::int64_t step = view.col_stride * size_of(view.dtype);
  view.data = static_cast<char*>(view.data) + first * step;
  if (view.col_stride == 1 && !as_float) return write_row(view, batch, row, head, count, from);
  for (std::int64_t n = 0; n < count; ++n) {
    const float rounded = static_cast<float>(from[n]);
    if (as_float)
      write_row(view, batch, row, head, 1, &rounded);
    else
      write_row(view, batch, row, head, 1, from + n);
    view.data = static_cast<char*>(view.data) + step;
  }
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
