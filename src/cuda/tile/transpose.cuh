#pragma once

#include <cstdint>

#include "cuda/tile/warp.cuh"

namespace dlattn::tile {

// Transposes 4 x 4 words over a lane quad: word r of lane c becomes word c of lane r.
__device__ __forceinline__ void transpose_in_quad(std::uint32_t (&words)[4], int lane) {
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i & step) continue;
      const std::uint32_t given = upper ? words[i] : words[i + step];
      const std::uint32_t got = __shfl_xor_sync(kFullMask, given, step);
      (upper ? words[i] : words[i + step]) = got;
    }
  }
}

}  // namespace dlattn::tile
