#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/vec.cuh"

// What softmaxes have in common that take a row's scores relative to a reference which is not its
// maximum but near enough: when a reference no longer fits, and how far it is raised then. Of a
// reference its negative is kept.
namespace dlattn::tile {

// The most that a lane's probabilities of some keys may come to: what T, which holds each of them,
// has room for. Of bfloat16's room, which is fp32's, enough is left for V and for the sums.
template <typename T>
constexpr float kMaxSum = 0x1p15f;
template <>
constexpr float kMaxSum<__nv_bfloat16> = 0x1p60f;

// The largest sum that is scaled down: by a factor that is no subnormal.
constexpr float kLargest = 0x1p120f;

// -reference of a row that has seen nothing: with it any finite score is too large, and -inf gives
// 0.
constexpr float kNothing = 3.402823466e+38f;

// The greatest e with 2^e <= x, of a normal x > 0; less than -126 of 0, 128 of what is not finite.
__device__ __forceinline__ int exponent(float x) {
  std::int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits >> 23) - 127;
}

// By how many powers of two to raise the reference of a row whose probabilities come to `sum`, so
// that they come to 1 or a little more. 0 if that is less already, or NaN.
__device__ __forceinline__ int raise_by(float sum) {
  const int e = exponent(sum);
  return 0 < e && e < 128 ? e : 0;
}

// The state of a row with this reference, whose probabilities have come to `row_sum`.
__device__ __forceinline__ OnlineSoftmax row_state(float neg_reference, float row_sum) {
  const float reference = -neg_reference;
  return {reference == -kNothing ? -INFINITY : reference, row_sum};
}

}  // namespace dlattn::tile
