#pragma once

#include "core/rounding.h"
#include "cuda/quantize/key_blocks/traits.h"
#include "cuda/tile/warp.cuh"

// The rotation of core/rounding.h of a row whose columns lie 16 each in neighbouring lanes.
namespace dlattn::quantize::key_blocks {

// Bit c: whether the rotation negates column c of the lane's.
__device__ __forceinline__ unsigned negated_columns(int lane) {
  struct Signs {
    std::uint32_t pairs[4] = {};  // of lanes
    constexpr Signs() {
      for (int c = 0; c < 128; ++c) pairs[c / 32] |= std::uint32_t{rotation_negates(c)} << c % 32;
    }
  };
  constexpr Signs kSigns;
  const std::uint32_t low = lane & 2 ? kSigns.pairs[1] : kSigns.pairs[0];
  const std::uint32_t high = lane & 2 ? kSigns.pairs[3] : kSigns.pairs[2];
  return (lane & 4 ? high : low) >> (lane & 1) * kThreadColumns;
}

// What column c of the lane's is multiplied by first: its sign, divided by the number of columns.
template <int kColumns>
__device__ __forceinline__ float rotation_factor(unsigned negated, int c) {
  // A power of two, so that the product is the quotient.
  return float_of_bits(bits_of(1.0f / kColumns) | (negated << (31 - c) & 0x80000000u));
}

// x already has its factors.
template <int kColumns>
__device__ __forceinline__ void rotate(float (&x)[kThreadColumns], int lane) {
#pragma unroll
  for (int apart = 1; apart < kThreadColumns; apart *= 2) {
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c) {
      if (c & apart) continue;
      const float a = x[c], b = x[c + apart];
      x[c] = __fadd_rn(a, b);
      x[c + apart] = __fadd_rn(a, -b);
    }
  }
#pragma unroll
  for (int apart = 1; apart < kColumns / kThreadColumns; apart *= 2) {
    // a + b of the lower lane, a - b of the upper one, which holds b: b times -1 is exact.
    const float own_sign = lane & apart ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c)
      x[c] = fmaf(x[c], own_sign, __shfl_xor_sync(tile::kFullMask, x[c], apart));
  }
}

}  // namespace dlattn::quantize::key_blocks
