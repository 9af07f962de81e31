#pragma once

// For what kernels share with host code. Always inlined: the CPU kernels are compiled once per
// instruction set, and none of them may call what the linker kept of another one's (cpu/simd.h).
#if defined(__CUDACC__)
#define DLATTN_SHARED __host__ __device__ __forceinline__
#else
#define DLATTN_SHARED inline __attribute__((always_inline))
#endif

namespace dlattn {

// On a GPU these are instructions, which nvcc makes of nothing but its own functions reliably.
template <typename T>
DLATTN_SHARED T lesser(T a, T b) {
#if defined(__CUDA_ARCH__)
  return min(a, b);
#else
  return a < b ? a : b;
#endif
}
template <typename T>
DLATTN_SHARED T greater(T a, T b) {
#if defined(__CUDA_ARCH__)
  return max(a, b);
#else
  return a > b ? a : b;
#endif
}

template <typename Real>
DLATTN_SHARED Real magnitude(Real x) {
#if defined(__CUDA_ARCH__)
  return fabs(x);
#else
  return static_cast<Real>(__builtin_fabs(x));
#endif
}
// A positive number with the sign of another one.
template <typename Real>
DLATTN_SHARED Real with_sign(Real x, Real sign) {
#if defined(__CUDA_ARCH__)
  return copysign(x, sign);
#else
  return static_cast<Real>(__builtin_copysign(x, sign));
#endif
}

}  // namespace dlattn
