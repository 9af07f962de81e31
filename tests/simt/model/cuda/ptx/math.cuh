#pragma once

#include <cmath>

namespace dlattn::ptx {

// Subnormal results are flushed to zero as ex2.approx.ftz does.
inline float exp2(float x) {
  constexpr float kSmallestNormal = 1.17549435e-38f;
  const float y = std::exp2(x);
  return y < kSmallestNormal ? 0.0f : y;
}

}  // namespace dlattn::ptx
