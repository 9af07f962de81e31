#pragma once

// The same as kernel.cuh for heads of more columns than a warp's registers hold, as the latents of
// MLA: 576 columns of K, of which the first 512 are V.
//
// A thread block takes segments as there (schedule.cuh): kBlockM rows of a KV head, those of all
// its query heads, with consecutive slices of 16 keys, or 32 of 8 bits. All warps copy a slice into
// a ring of stages by cp.async (WideProducer). Where V is the first columns of K, it is copied once
// and multiplied twice. Two or four warps share 16 rows, each with some of the columns of Q, K, V
// and out (WideConsumer). A warp leaves the scores that its columns give in shared memory; all of
// these warps add up the same numbers, and have the same softmax. Sums over all tiles of the row
// block are the result, others go to the workspace, where the combine kernel adds them up. Shared
// memory: WideSmemMap. Barriers: the block's, once a slice: it has arrived, and the stage of the
// one before is free; those of the warps that share rows, before they read scores; the block's
// before the next segment.

#include "cuda/forward/decode/wide_consumer.cuh"

namespace dlattn::decode {

// T: what is multiplied, and but for 8-bit keys q and out. KV: elements of K and V.
template <typename T, typename KV, int kVariant>
__global__ void __launch_bounds__(num_warps(shape_of(kWideTile, kVariant, sizeof(KV))) * 32,
                                  kVariant == kRows16 ? 2 : 1)
    wide_kernel(const __grid_constant__ AttentionParams params,
                const __grid_constant__ DecodeShape shape) {
  using Consumer = WideConsumer<T, KV, kVariant>;
  begin_access();
  DecodeSchedule<Consumer::kBlockM, Consumer::kSlice> units(params, shape);
  for (;;) {
    const Segment segment = units.next();
    if (segment.is_none()) break;
    const Consumer consumer(params, shape, segment, Lengths(params, segment.sequence));
    consumer.run();
  }
  // By the block that has least to do.
  if (!shape.whole && !shape.uniform && blockIdx.x == gridDim.x - 1) units.write_starts();
}

}  // namespace dlattn::decode
