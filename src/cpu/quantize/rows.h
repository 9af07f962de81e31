#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "core/problem/quantized.h"
#include "core/problem/rounding.h"
#include "cpu/convert.h"
#include "dlattn/tensor.h"

// Rows of q and k rotated and rounded to 8 bits, as core/problem/rounding.h says.
namespace dlattn::cpu {

// A row of a 16-bit tensor, in fp32.
class Row16 {
 public:
  Row16(const TensorView& x, std::int64_t batch, std::int64_t row, std::int64_t head)
      : data_(static_cast<const std::uint16_t*>(x.data) + batch * x.batch_stride +
              row * x.row_stride + head * x.head_stride),
        half_(x.dtype == DType::kFloat16) {}

  float operator[](std::int64_t column) const {
    const std::uint16_t bits = data_[column];
    return half_ ? to_float(Half{bits}) : to_float(BFloat16{bits});
  }

 private:
  const std::uint16_t* data_;
  bool half_;
};

// One sequence's rows of a tensor.
struct Rows {
  std::int64_t batch;  // of the tensor; 0 with variable length
  std::int64_t begin, count;
};
// Those of k and v that are in use. `Params`: AttentionParams or QuantizeParams.
template <typename Params>
Rows key_rows(const Params& p, std::int64_t sequence) {
  if (!p.cu_seqlens_k) return {sequence, 0, p.seqlen_k};
  const std::int64_t begin = p.cu_seqlens_k[sequence];
  return {0, begin, p.seqused_k ? p.seqused_k[sequence] : p.cu_seqlens_k[sequence + 1] - begin};
}

// The first `head_dim` numbers of x, of which the others are 0, rotated in place.
inline void rotate(float* x, int columns) {
  for (int c = 0; c < columns; ++c) {
    x[c] /= static_cast<float>(columns);
    // Zeros are positive, as sums are that cancel.
    x[c] = (rotation_negates(c) ? -x[c] : x[c]) + 0.0f;
  }
  for (int apart = 1; apart < columns; apart *= 2) {
    for (int c = 0; c < columns; ++c) {
      if (c & apart) continue;
      const float a = x[c], b = x[c + apart];
      x[c] = a + b;
      x[c + apart] = a - b;
    }
  }
}

inline std::uint32_t largest_magnitude(const float* x, std::int64_t count) {
  std::uint32_t largest = 0;
  for (std::int64_t i = 0; i < count; ++i) largest = std::max(largest, magnitude_bits(x[i]));
  return largest;
}

// NaN becomes 0: then the scale is NaN.
inline std::int8_t to_int8(float x, const Rounding& rounding) {
  const float rounded = std::nearbyintf(x * rounding.up * rounding.inverse);
  return rounded == rounded ? static_cast<std::int8_t>(rounded) : std::int8_t{0};
}

// Infinity becomes NaN.
inline std::uint8_t to_e4m3(float x, const Rounding& rounding) {
  Float8 byte;
  const bool finite = magnitude_bits(x) < kInfinityBits;
  from_float(finite ? x * rounding.inverse : float_of_bits(0x7fc00000u), &byte);
  return byte.bits;
}

// The bits of a half. Numbers that are not finite become the NaN of GPUs' conversions.
inline std::uint16_t to_fp16(float x, const Rounding& rounding) {
  if (magnitude_bits(x) >= kInfinityBits) return 0x7fff;
  Half half;
  from_float(x * rounding.inverse, &half);
  return half.bits;
}

}  // namespace dlattn::cpu
