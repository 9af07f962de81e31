#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/vec.cuh"

// What a row's scores are taken relative to before the softmax's exponential, in streaming
// softmaxes whose row max may be stale: when such a reference no longer fits, how far it is raised
// then, and what becomes of references that fp32 cannot tell apart by powers of two.
//
// A probability is 2^((score - base) * scale + neg), where scores are in units of their own (raw
// products q.k, or natural) and `scale` makes them base 2. One of base and neg is 0:
// - base, as long as the reference is small enough (kMostScaled): then one FFMA makes the exponent,
//   exactly, so that neg's own rounding cancels in out and lse;
// - neg, where it is not. There the ulp of the scaled reference would be whole powers of two,
//   whereas score - base is exact for scores near it, and 0 for the row max itself.
// Kernels keep one word a row, and a flag a warp that says which of the two it is.
namespace dlattn::tile {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The most that a lane's probabilities of some keys may come to: what float16, which holds each of
// them, has room for. bfloat16 has more, but of fp32's room V, which may be large, needs the rest.
constexpr float kMaxSum = 0x1p15f;

// The largest sum that is scaled down: by a factor that is no subnormal.
constexpr float kLargest = 0x1p120f;

// neg of a row that has seen nothing: with it any finite score is too large, and -inf gives 0.
constexpr float kNothing = 3.402823466e+38f;

// The largest scaled reference, by magnitude. Its rounding is at most 4, so that a probability of
// the row max is within 2^-4 and 2^4.
constexpr float kMostScaled = 0x1p26f;

struct Reference {
  float base = 0.0f;     // in the scores' units; -inf: the row has seen nothing
  float neg = kNothing;  // negated, scaled to base 2; kNothing: the row has seen nothing

  // As kernels keep it: `word` is base or neg.
  __device__ __forceinline__ Reference(float word, bool unscaled)
      : base(unscaled ? word : 0.0f), neg(unscaled ? 0.0f : word) {}

  __device__ __forceinline__ bool is_nothing() const {
    return base == -INFINITY || neg == kNothing;
  }
};

// What is accumulated relative to `from`, times this, is relative to `to`.
__device__ __forceinline__ float change_of_reference(const Reference& from, const Reference& to,
                                                     float scale) {
  if (from.is_nothing()) return 1.0f;  // there is nothing yet
  return ptx::exp2(fmaf(from.base - to.base, scale, to.neg - from.neg));
}

// A row's reference as it becomes when its scores' maximum is `row_max`, where that exceeds it by
// more than `slack`, in powers of two. NaN is no maximum. How it is kept is decided between a
// warp's rows then.
struct RaisedReference {
  Reference from;
  bool exceeded;
  float base;  // in the scores' units

  __device__ __forceinline__ RaisedReference(const Reference& from, float row_max, float scale,
                                             float slack = 0.0f)
      : from(from) {
    exceeded = from.is_nothing() ? row_max > -INFINITY
                                 : fmaf(row_max - from.base, scale, from.neg) > slack;
    // By quarters: __fdividef takes a divisor beyond 2^126 for infinite.
    base = exceeded        ? row_max
           : is_unscaled() ? from.base
                           : __fdividef(-0.25f * from.neg, 0.25f * scale);
    if (!exceeded && from.is_nothing()) base = -INFINITY;
  }

  // Whether it cannot be kept scaled. `faint`: scores may be so small that, scaled, kNothing does
  // not tell them from -inf, as with a bias of the least finite value.
  __device__ __forceinline__ bool needs_unscaled(float scale, bool faint) const {
    return base == -INFINITY ? faint : !(fabsf(base * scale) < kMostScaled);
  }

  __device__ __forceinline__ float word(float scale, bool unscaled) const {
    if (unscaled) return base;
    if (base == -INFINITY) return kNothing;
    return exceeded || is_unscaled() ? -base * scale : from.neg;
  }

 private:
  __device__ __forceinline__ bool is_unscaled() const { return from.neg == 0.0f; }
};

// Whether a scaled reference cannot stay so.
__device__ __forceinline__ bool is_beyond_scaled(float neg) {
  return !(fabsf(neg) < kMostScaled) && neg != kNothing;
}

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

// Whether a scaled reference can be raised by powers of two: another might be lost in its rounding.
__device__ __forceinline__ bool can_raise(float neg) {
  return fabsf(neg) < kMostScaled || neg == kNothing;
}

struct RowResult {
  float scale;  // out = scale * accumulator; 0 if the row attends to nothing: then out is 0
                // whatever was accumulated
  float lse;    // natural log
};

// An accumulator times its row's scale.
__device__ __forceinline__ float scaled(float accumulator, float scale) {
  return scale == 0.0f ? 0.0f : accumulator * scale;
}

// `row_sum`: of the whole row's probabilities. `sink`: the head's logit in the denominator, or
// null; +inf takes all of it, so that out is 0. Straight-line code: rows' overlap.
__device__ __forceinline__ RowResult finalize(const Reference& reference, float scale,
                                              float row_sum, const float* sink) {
  float top = fmaf(reference.base, scale * kLn2, -reference.neg * kLn2);  // natural
  float factor = 1.0f;
  if (sink) {
    // The sink's probability is 2^excess: that of a natural logit, without rounding where the
    // reference is scaled. Relative to whichever is larger, none overflows.
    const float logit = *sink;
    const float excess =
        reference.base == 0.0f ? fmaf(logit, kLog2e, reference.neg) : (logit - top) * kLog2e;
    const bool above = excess > 0.0f || row_sum == 0.0f;
    const float smaller = row_sum == 0.0f ? 0.0f : ptx::exp2(-fabsf(excess));
    factor = above ? smaller : 1.0f;
    row_sum = fmaf(row_sum, factor, above ? 1.0f : smaller);
    top = above ? logit : top;
  }
  // Of nothing the sum is 0, and its logarithm -inf.
  return {row_sum == 0.0f ? 0.0f : __fdividef(factor, row_sum), top + logf(row_sum)};
}

}  // namespace dlattn::tile
