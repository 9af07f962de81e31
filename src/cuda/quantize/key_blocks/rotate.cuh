#pragma once

#include "core/problem/rounding.h"
#include "cuda/quantize/key_blocks/traits.h"
#include "cuda/tile/warp.cuh"

// The rotation of core/problem/rounding.h of a row that lies in neighbouring lanes: chunk i of a
// lane's begins at column i * kColumns / 2 + lane * kChunk.
namespace dlattn::quantize::key_blocks {

// The factor that a column has first: its sign, divided by the number of columns.
template <int kColumns>
__device__ __forceinline__ float rotation_factor(int column) {
  // A power of two, so that the product is the quotient.
  return rotation_negates(column) ? -1.0f / kColumns : 1.0f / kColumns;
}

// One step of it, of columns so far apart in x.
template <int kApart>
__device__ __forceinline__ void add_and_subtract(float (&x)[kThreadColumns]) {
#pragma unroll
  for (int c = 0; c < kThreadColumns; ++c) {
    if (c & kApart) continue;
    const float a = x[c], b = x[c + kApart];
    x[c] = __fadd_rn(a, b);
    x[c + kApart] = __fadd_rn(a, -b);
  }
}

// x already has its factors.
template <int kColumns>
__device__ __forceinline__ void rotate(float (&x)[kThreadColumns], int lane) {
  add_and_subtract<1>(x);
  add_and_subtract<2>(x);
  add_and_subtract<4>(x);
#pragma unroll
  for (int apart = 1; apart < kColumns / kThreadColumns; apart *= 2) {
    // a + b of the lower lane, a - b of the upper one, which holds b: b times -1 is exact.
    const float own_sign = lane & apart ? -1.0f : 1.0f;
#pragma unroll
    for (int c = 0; c < kThreadColumns; ++c)
      x[c] = fmaf(x[c], own_sign, __shfl_xor_sync(tile::kFullMask, x[c], apart));
  }
  add_and_subtract<kChunk>(x);
}

}  // namespace dlattn::quantize::key_blocks
