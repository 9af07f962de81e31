#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/smem.cuh"
#include "harness/wgmma.h"

namespace dlattn::ptx {

inline std::uint64_t wgmma_descriptor(SmemAddress first, int block_bytes) {
  return std::uint64_t{1} << 62 | std::uint64_t{1024 >> 4} << 32 |
         static_cast<std::uint64_t>(block_bytes >> 4) << 16 | (first & 0x3ffff) >> 4;
}

inline std::uint64_t wgmma_advance(std::uint64_t descriptor, int bytes) {
  return descriptor + static_cast<std::uint64_t>(bytes >> 4);
}

inline void wgmma_fence() {
  simt::fence_wgmma();
}

inline void wgmma_commit() {
  simt::commit_wgmma();
}

template <int kPending>
void wgmma_wait() {
  simt::wait_wgmma(kPending);
}

namespace model {

template <typename T, int kCount>
simt::WgmmaOperation wgmma_operation(std::uint64_t b, bool transpose_b, bool accumulate) {
  constexpr bool kE4m3 = std::is_same_v<T, __nv_fp8_e4m3>;
  static_assert(kE4m3 || std::is_same_v<T, half> || std::is_same_v<T, __nv_bfloat16>,
                "wgmma takes half, bfloat16 or e4m3");
  if (kE4m3 && transpose_b) simt::die("rows of 8-bit operands run along K");
  simt::WgmmaOperation operation{};
  operation.descriptor_b = b;
  operation.n = 2 * kCount;
  operation.b_mn_major = transpose_b;
  operation.elements = kE4m3                              ? simt::WgmmaElements::kE4m3
                       : std::is_same_v<T, __nv_bfloat16> ? simt::WgmmaElements::kBFloat16
                                                          : simt::WgmmaElements::kHalf;
  operation.accumulate = accumulate;
  return operation;
}

}  // namespace model

template <typename T, bool kTransposeB, bool kTransposeA = false, int kCount>
void wgmma_ss(float (&d)[kCount], std::uint64_t a, std::uint64_t b, bool accumulate) {
  simt::WgmmaOperation operation = model::wgmma_operation<T, kCount>(b, kTransposeB, accumulate);
  operation.descriptor_a = a;
  operation.a_mn_major = kTransposeA;
  simt::issue_wgmma(operation, d, nullptr);
}

template <typename T, bool kTransposeB, int kCount>
void wgmma_rs(float (&d)[kCount], const std::uint32_t (&a)[4], std::uint64_t b, bool accumulate) {
  simt::issue_wgmma(model::wgmma_operation<T, kCount>(b, kTransposeB, accumulate), d, a);
}

}  // namespace dlattn::ptx
