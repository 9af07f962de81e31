#pragma once

#include "core/util/inline.h"

// The steps from a product q.k to the softmax, in this order, each step rounded as it stands:
//
//   score = softcap(softmax_scale * q.k)     softcapped()
//         - slope * |position - key|         alibi_penalty(), of a limited_slope()
//         + bias
//   score = -inf where the mask or positions.h hide the key
//
// The definition that the CPU backend, the scalar kernel and the reference of the kernels' tests
// compute. Tensor-core kernels compute the same in units of their own, by fewer instructions: how
// is in their DESIGN.md.
namespace dlattn {

// A slope within 2^64 of 0, so that its product with a distance is finite. Beyond, a softmax cannot
// tell slopes apart: the nearest key has it all. NaN stays NaN.
template <typename Real>
DLATTN_SHARED Real limited_slope(Real slope) {
  constexpr Real kSteepest = static_cast<Real>(0x1p64);
  return magnitude(slope) > kSteepest ? with_sign(kSteepest, slope) : slope;
}

// cap * tanh(score / cap); a cap of 0 is none. Score may be a vector of Real.
template <typename Score, typename Real, typename Tanh>
DLATTN_SHARED Score softcapped(Score score, Real cap, Tanh tanh) {
  return cap == Real(0) ? score : cap * tanh(score / cap);
}

// The penalty of ALiBi, which is subtracted from a score. It is rounded before it is taken, so that
// keys at one distance have one penalty: callers keep the difference from being fused with it.
template <typename Real>
DLATTN_SHARED Real alibi_penalty(Real slope, Real distance) {
  return slope * magnitude(distance);
}

}  // namespace dlattn
