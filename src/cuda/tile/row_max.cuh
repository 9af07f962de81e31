#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/vec.cuh"

// The row max of streaming softmaxes, which may be stale: how a kernel keeps it, when it no longer
// fits, how far it is raised then, and what becomes of it where its rounding in base 2 would be
// whole powers of two.
//
// A probability is 2^((score - base) * scale + neg), where scores are in units of their own (raw
// products q.k, or natural) and `scale` makes them base 2. One of base and neg is 0:
// - A scaled row max has base 0. It must be small enough (kMostScaled). One FFMA makes the
//   exponent, exactly, so that neg's own rounding cancels in out and lse.
// - An unscaled row max has neg 0. The ulp of neg would be whole powers of two there, whereas
//   score - base is exact for scores near base, and 0 for the row max itself.
// Kernels keep one word a row, neg or base, and one flag a warp that says which of the two it is.
namespace dlattn::tile {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

// The largest sum of a lane's probabilities of one slice of keys. Each of them must fit float16.
// bfloat16 has room for more, but V may be large there, and fp32 must hold the products.
constexpr float kMaxSum = 0x1p15f;

// The largest sum that is scaled down. Larger ones would take a subnormal factor.
constexpr float kLargest = 0x1p120f;

// neg of a row that has seen nothing: with it any finite score overflows, and -inf gives 0.
constexpr float kNothing = 3.402823466e+38f;

// The largest scaled row max, by magnitude, where probabilities have 16 bits. Its rounding is at
// most 2^-12, so that the probability of a row's largest score is within 2^-12 of 1: rounded to
// fp16 it is 1, its sum is not 1 by so little that a row of one key has that key's values, to the
// last bit. `most` below: this, or what a kernel has instead.
constexpr float kMostScaled = 0x1p13f;

struct RowMax {
  float base = 0.0f;     // in the scores' units; -inf: the row has seen nothing
  float neg = kNothing;  // negated, scaled to base 2; kNothing: the row has seen nothing

  // As kernels keep it: `word` is base or neg.
  __device__ __forceinline__ RowMax(float word, bool unscaled)
      : base(unscaled ? word : 0.0f), neg(unscaled ? 0.0f : word) {}

  __device__ __forceinline__ bool is_nothing() const {
    return base == -INFINITY || neg == kNothing;
  }
};

// Times this, what was accumulated relative to `from` is relative to `to`.
__device__ __forceinline__ float change_of_row_max(const RowMax& from, const RowMax& to,
                                                   float scale) {
  if (from.is_nothing()) return 1.0f;  // there is nothing yet
  return ptx::exp2(fmaf(from.base - to.base, scale, to.neg - from.neg));
}

// A row max raised to `scores_max`, the maximum of new scores, if that exceeds it by more than
// `slack`, in powers of two. NaN is no maximum. Whether it is kept scaled is decided afterwards,
// for all rows of the warp at once: needs_unscaled(), then word().
struct RaisedRowMax {
  RowMax from;
  bool exceeded;
  float base;  // in the scores' units

  __device__ __forceinline__ RaisedRowMax(const RowMax& from, float scores_max, float scale,
                                          float slack = 0.0f)
      : from(from) {
    exceeded = from.is_nothing() ? scores_max > -INFINITY
                                 : fmaf(scores_max - from.base, scale, from.neg) > slack;
    // By quarters: __fdividef takes a divisor beyond 2^126 for infinite.
    base = exceeded        ? scores_max
           : is_unscaled() ? from.base
                           : __fdividef(-0.25f * from.neg, 0.25f * scale);
    if (!exceeded && from.is_nothing()) base = -INFINITY;
  }

  // Whether it cannot be kept scaled. `may_hide_tiny_scores`: scores may be so small that, scaled,
  // kNothing does not tell them from -inf, as with a bias of the least finite value.
  __device__ __forceinline__ bool needs_unscaled(float scale, bool may_hide_tiny_scores,
                                                 float most = kMostScaled) const {
    return base == -INFINITY ? may_hide_tiny_scores : !(fabsf(base * scale) < most);
  }

  __device__ __forceinline__ float word(float scale, bool unscaled) const {
    if (unscaled) return base;
    if (base == -INFINITY) return kNothing;
    return exceeded || is_unscaled() ? -base * scale : from.neg;
  }

 private:
  __device__ __forceinline__ bool is_unscaled() const { return from.neg == 0.0f; }
};

// Whether a scaled row max is too large to stay scaled.
__device__ __forceinline__ bool is_beyond_scaled(float neg, float most) {
  return !(fabsf(neg) < most) && neg != kNothing;
}

// The greatest e with 2^e <= x, of a normal x > 0; less than -126 of 0, 128 of what is not finite.
__device__ __forceinline__ int exponent(float x) {
  std::int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return (bits >> 23) - 127;
}

// By how many powers of two to raise the max of a row whose probabilities sum to `sum`, so that
// they sum to 2^target or a little more. 0 if `sum` is less already, or NaN.
__device__ __forceinline__ int raise_by(float sum, int target = 0) {
  const int e = exponent(sum);
  return target < e && e < 128 ? e - target : 0;
}

// Whether a scaled row max can be raised by powers of two: a larger one's rounding may lose them.
__device__ __forceinline__ bool can_raise(float neg, float most = kMostScaled) {
  return fabsf(neg) < most || neg == kNothing;
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

// `row_sum`: the sum of all the row's probabilities. `sink`: the head's logit in the denominator,
// or null; with +inf out is 0. The result is that of logits that all have `shift` more than the
// row's scores. Straight-line code, so that the rows of a lane overlap.
__device__ __forceinline__ RowResult finalize(const RowMax& row_max, float scale, float row_sum,
                                              const float* sink, float shift = 0.0f) {
  float top = fmaf(row_max.base, scale * kLn2, -row_max.neg * kLn2);  // natural
  float factor = 1.0f;
  if (sink) {
    // The sink's probability is 2^excess, in one FFMA where the row max is scaled. The larger of
    // the two gets weight 1, so that nothing overflows.
    const float logit = *sink - shift;
    const float excess =
        row_max.base == 0.0f ? fmaf(logit, kLog2e, row_max.neg) : (logit - top) * kLog2e;
    const bool above = excess > 0.0f || row_sum == 0.0f;
    const float smaller = row_sum == 0.0f ? 0.0f : ptx::exp2(-fabsf(excess));
    factor = above ? smaller : 1.0f;
    row_sum = fmaf(row_sum, factor, above ? 1.0f : smaller);
    top = above ? logit : top;
  }
  // A row that attends to nothing has sum 0, whose logarithm is -inf.
  return {row_sum == 0.0f ? 0.0f : __fdividef(factor, row_sum), top + logf(row_sum)};
}

}  // namespace dlattn::tile
