#pragma once

#include "core/problem/tensor_sizes.h"
#include "cpu/simd.h"
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
  if constexpr (sizeof(T) == 8) {
    convert_row(reinterpret_cast<const T*>(from), count, to);
  } else if (view.dtype == DType::kFloat16) {
    convert_row(reinterpret_cast<const Half*>(from), count, to);
  } else if (view.dtype == DType::kBFloat16) {
    convert_row(reinterpret_cast<const BFloat16*>(from), count, to);
  } else {
    convert_row(reinterpret_cast<const T*>(from), count, to);
  }
}

template <typename T>
DLATTN_INLINE void write_row(const MutableTensorView& view, std::int64_t batch, std::int64_t row,
                             std::int64_t head, std::int64_t count, const T* from) {
  char* const to = static_cast<char*>(view.data) + row_offset(view, batch, row, head);
  if constexpr (sizeof(T) == 8) {
    convert_row(from, count, reinterpret_cast<T*>(to));
  } else if (view.dtype == DType::kFloat16) {
    convert_row(from, count, reinterpret_cast<Half*>(to));
  } else if (view.dtype == DType::kBFloat16) {
    convert_row(from, count, reinterpret_cast<BFloat16*>(to));
  } else {
    convert_row(from, count, reinterpret_cast<T*>(to));
  }
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
