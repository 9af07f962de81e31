#pragma once

// The same as kernel.cuh of precision int8_fp8: q of 16 bits, which the kernel itself rotates and
// rounds to 8-bit integers, a scale for each row; keys and values from a buffer that quantize_kv()
// wrote, a scale for each 64 keys. Q goes from global memory to registers, by no shared memory.
// A tile of 64 keys has its own maximum, relative to which P is rounded to e4m3, and its products
// with V are added to the output times a factor of the row's.
// The only difference of int8_fp16 is that P and V are fp16. kGeneral: with a mask.

#include "cuda/forward/wmma8/consumer.cuh"
#include "cuda/forward/wmma8/int8_inputs.cuh"

namespace dlattn::wmma8 {

template <int kHeadDim, bool kGeneral, Precision kPrecision>
__global__ void __launch_bounds__(tile_shape(kHeadDim).num_warps * 32,
                                  blocks_per_sm(kHeadDim, kGeneral, value_bytes(kPrecision)))
    int8_kernel(const __grid_constant__ AttentionParams params,
                const __grid_constant__ LaunchShape shape,
                const __grid_constant__ QuantizedView view) {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 890
  constexpr bool kHasCode = true;
#else
  constexpr bool kHasCode = kPrecision == Precision::kInt8Fp16;
#endif
  if constexpr (kHasCode) attend(Int8Inputs<kHeadDim, kGeneral, kPrecision>{params, shape, view});
}

}  // namespace dlattn::wmma8
