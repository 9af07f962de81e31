#pragma once

// Included before everything else when a kernel's source is compiled as host C++: CUDA's built-ins
// on top of the real CUDA headers' host pass. src/cuda/ptx/README.md lists the built-ins that
// kernels may use; the rest does not compile here.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstring>

#include "harness/block.h"

#undef __forceinline__
#define __forceinline__ inline
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

#define threadIdx (::simt::this_thread().thread_idx)
#define blockIdx (::simt::this_thread().block_idx)
#define blockDim (::simt::this_thread().block_dim)
#define gridDim (::simt::this_thread().grid_dim)

#define __syncthreads() ::simt::sync_threads(__FILE__, __LINE__)

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) {
  ::simt::sync_warp(mask);
}

namespace simt {

template <typename T>
T shuffle(const char* name, unsigned mask, T value, int source) {
  static_assert(sizeof(T) <= sizeof(std::uint64_t), "shuffles move up to 8 bytes");
  Shuffle operand{0, 0, source};
  std::memcpy(&operand.value, &value, sizeof value);
  warp_collective(name, mask, combine_shuffle, &operand);
  T result;
  std::memcpy(&result, &operand.result, sizeof result);
  return result;
}

inline unsigned vote(const char* name, unsigned mask, bool predicate) {
  Vote operand{predicate, 0};
  warp_collective(name, mask, combine_vote, &operand);
  return operand.ballot;
}

}  // namespace simt

// Lanes exchange within groups of `width`; one that would reach beyond its group gets its own
// value.
template <typename T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  const int lane = ::simt::this_thread().lane, group = lane / width * width;
  return ::simt::shuffle("__shfl_sync", mask, value, group + (source & (width - 1)));
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = 32) {
  const int lane = ::simt::this_thread().lane, source = lane ^ lane_mask;
  return ::simt::shuffle("__shfl_xor_sync", mask, value,
                         source / width <= lane / width ? source : lane);
}

template <typename T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = ::simt::this_thread().lane, source = lane + static_cast<int>(delta);
  return ::simt::shuffle("__shfl_down_sync", mask, value,
                         source / width == lane / width ? source : lane);
}

template <typename T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
  const int lane = ::simt::this_thread().lane, source = lane - static_cast<int>(delta);
  return ::simt::shuffle("__shfl_up_sync", mask, value,
                         source >= lane / width * width ? source : lane);
}

namespace simt {

// Reduces over all lanes of a warp.
template <typename Operation>
unsigned reduce(unsigned mask, unsigned x, Operation operation) {
  for (int apart = 16; apart > 0; apart /= 2) x = operation(x, __shfl_xor_sync(mask, x, apart));
  return x;
}

}  // namespace simt

inline unsigned __reduce_add_sync(unsigned mask, unsigned x) {
  return ::simt::reduce(mask, x, [](unsigned a, unsigned b) { return a + b; });
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  return ::simt::reduce(mask, x, [](unsigned a, unsigned b) { return a < b ? b : a; });
}
inline unsigned __reduce_min_sync(unsigned mask, unsigned x) {
  return ::simt::reduce(mask, x, [](unsigned a, unsigned b) { return a < b ? a : b; });
}

inline unsigned __ballot_sync(unsigned mask, int predicate) {
  return ::simt::vote("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
  return ::simt::vote("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
  return ::simt::vote("__all_sync", mask, predicate != 0) == mask;
}

inline int __ffs(int x) {
  return __builtin_ffs(x);
}
inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}
inline float __logf(float x) {
  return std::log(x);
}
inline float __expf(float x) {
  return std::exp(x);
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __fdividef(float x, float y) {
  return x / y;
}
inline float __int_as_float(int x) {
  float y;
  std::memcpy(&y, &x, sizeof y);
  return y;
}
template <typename T>
T __ldg(const T* p) {
  return *p;
}

// CUDA has these in the global namespace, for all arithmetic types.
template <typename A, typename B>
constexpr auto min(A a, B b) -> decltype(a + b) {
  return a < b ? a : b;
}
template <typename A, typename B>
constexpr auto max(A a, B b) -> decltype(a + b) {
  return a > b ? a : b;
}
