#pragma once

#include <algorithm>

#include "cuda/tile/launch_shape.h"

namespace dlattn::scalar {

// What the host works out once per launch. Copies are as wide as q, k and v are aligned, but of
// 8-bit keys, which are converted one by one and leave q its own element.
inline LaunchShape make_shape(const AttentionParams& p, const Plan& plan) {
  LaunchShape shape = make_launch_shape(p, plan);
  shape.copy_bytes = std::max(shape.copy_bytes, static_cast<int>(size_of(p.q.dtype)));
  return shape;
}

}  // namespace dlattn::scalar
