#pragma once

#include "core/problem/rounding.h"
#include "cuda/quantize/key_blocks/rows.cuh"
#include "cuda/tile/warp.cuh"

// The mean of the sampled keys of a head of a sequence. A warp takes 16 columns: a lane 8 of every
// 16th key, which it adds up in order, and the 16 lanes of the same columns add up theirs. That is
// the order of sums in core/quantized.h.
namespace dlattn::quantize::key_blocks {

constexpr int kSampledColumns = 2 * kChunk;  // of a warp
static_assert(kPartialSums * 2 == 32, "two lanes for each partial sum");

// The sums of a lane's keys, of the `count` of a sequence: of 8 columns, which are the first ones
// of the last `columns`.
template <bool kWhole, typename T>
__device__ __forceinline__ void add_sampled(const std::uint16_t* from, std::int64_t row_stride,
                                            int columns, int count, int lane,
                                            float (&sums)[kChunk]) {
  constexpr int kKeys = kSampledKeys / kPartialSums;
  const int sampled = min(count, kSampledKeys);
  // Loads of whole chunks are on their way together; of single numbers there are too many.
#pragma unroll(kWhole ? kKeys : 1)
  for (int n = 0; n < kKeys; ++n) {
    const int i = lane / 2 + n * kPartialSums;
    // Where there are fewer, these are all keys: no division but by a power of two.
    const std::int64_t key =
        sampled == kSampledKeys ? sampled_key(i, kSampledKeys, count) : std::int64_t{i};
    const Chunk chunk = load_chunk<kWhole>(from + key * row_stride, i < sampled ? columns : 0);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const float x = number<T>(chunk, j);
      sums[j] = __fadd_rn(sums[j], magnitude_bits(x) < kInfinityBits ? x : 0.0f);
    }
  }
}

// The sum over the 16 lanes that have the same columns: that of column column_of_lane(), of the
// lane's 8, which another lane has too.
__device__ __forceinline__ float sum_of_lanes(float (&sums)[kChunk], int lane) {
  // Two lanes each add up one half of the columns that both have.
#pragma unroll
  for (int half = kChunk / 2, apart = 16; half > 0; half /= 2, apart /= 2) {
    const bool upper = lane & apart;
#pragma unroll
    for (int j = 0; j < half; ++j) {
      const float kept = upper ? sums[j + half] : sums[j];
      const float given = upper ? sums[j] : sums[j + half];
      sums[j] = kept + __shfl_xor_sync(tile::kFullMask, given, apart);
    }
  }
  return sums[0] + __shfl_xor_sync(tile::kFullMask, sums[0], 2);
}
__device__ __forceinline__ int column_of_lane(int lane) {
  return (lane & 16 ? 4 : 0) + (lane & 8 ? 2 : 0) + (lane & 4 ? 1 : 0);
}

}  // namespace dlattn::quantize::key_blocks
