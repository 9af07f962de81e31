#pragma once

namespace dlattn::ptx {

// PTX ISA, "Floating Point Instructions: ex2". 2^x with a relative error below 2^-22. 2^-inf = 0,
// 2^inf = inf, NaN stays NaN; subnormal inputs and results are flushed to zero.
__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace dlattn::ptx
