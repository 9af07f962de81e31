#pragma once

#include "cpu/simd.h"
#include "dlattn/types.h"

// Elements in memory, whose dtype is known at run time, and in the type that is computed with: so
// the kernels are compiled for float and double, and not for each dtype.
namespace dlattn::cpu::DLATTN_CPU_ISA {

// Calls function(In{}) with the storage type of elements that are computed with in T.
template <typename T, typename Function>
DLATTN_INLINE void with_element(DType dtype, Function function) {
  if constexpr (sizeof(T) == 8) {
    function(T{});
  } else {
    switch (dtype) {
      case DType::kFloat16:
        return function(Half{});
      case DType::kBFloat16:
        return function(BFloat16{});
      case DType::kFloat32:
        return function(0.0f);
      case DType::kFloat8E4M3:
        return function(Float8{});
      case DType::kInt8:
        return function(Int8{});
      case DType::kFloat64:
        break;  // in double
    }
  }
}

// to = the `num_rows` rows of `width` elements at `from`, `stride` elements apart, without gaps.
template <typename T>
void read_elements(DType dtype, const void* from, std::int64_t num_rows, std::int64_t stride,
                   std::int64_t width, T* to) {
  with_element<T>(dtype, [&](auto zero) {
    const auto* row = static_cast<const decltype(zero)*>(from);
    for (std::int64_t n = 0; n < num_rows; ++n, row += stride)
      convert_row(row, width, to + n * width);
  });
}

// Writes a row, rounded to nearest even. No result has 8 bits.
template <typename T>
void write_elements(DType dtype, const T* from, std::int64_t width, void* to) {
  with_element<T>(dtype, [&](auto zero) {
    if constexpr (sizeof(zero) > 1) convert_row(from, width, static_cast<decltype(zero)*>(to));
  });
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
