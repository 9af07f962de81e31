#pragma once

#include "core/util/inline.h"
#include "cuda/plan/launch_shape.h"

namespace dlattn::scalar {

// Numbers that the host computes once per launch. Copies are as wide as q, k and v are aligned;
// 8-bit keys are converted one by one, so q has its own element for the width then.
inline LaunchShape make_shape(const AttentionParams& p, const Plan& plan) {
  LaunchShape shape = make_launch_shape(p, plan);
  shape.copy_bytes = greater(shape.copy_bytes, static_cast<int>(size_of(p.q.dtype)));
  return shape;
}

}  // namespace dlattn::scalar
