#pragma once

// Attention of few queries over many keys: the keys are divided among all thread blocks of the
// device.
//
// A thread block takes as many units as any other (schedule.cuh), segment by segment: kBlockM rows
// of a KV head, those of all its query heads, with consecutive tiles of keys. In a tile each group
// of warps has a slice of keys of its own, which it copies into its own ring of stages by cp.async
// (Producer), and each of its warps 16 rows (Consumer). Groups share nothing until the segment's
// end; then their parts of the output, left in the stages, are added up in the order of the groups.
// A sum over all tiles of the row block is the result. Any other goes to the workspace in fp32, and
// the combine kernel adds up the row block's parts in the order of their keys.
// Shared memory: SmemMap. Barriers: a group's, twice a slice, around the reads of its stage; the
// block's before its parts are added up, and before the next segment.

#include "cuda/forward/decode/consumer.cuh"

namespace dlattn::decode {

// T: what is multiplied, and but for 8-bit keys q and out. KV: elements of K and V. kGeneral:
// scores are modified, and keys lie in pages or not, which such a kernel asks for.
template <typename T, typename KV, int kHeadDim, int kVariant, bool kPaged, bool kGeneral>
__global__ void __launch_bounds__(num_warps(shape_of(kHeadDim, kVariant, sizeof(KV))) * 32,
                                  kVariant == kRows16 ? 2 : 1)
    kernel(const __grid_constant__ AttentionParams params,
           const __grid_constant__ DecodeShape shape) {
  static_assert(kPaged || !kGeneral);
  constexpr Shape kShape = shape_of(kHeadDim, kVariant, sizeof(KV));
  // Lengths and entries may be what the grid ahead computes. Without any, and where registers
  // allow, what is known before is worked out before, and by few lengths as a guess.
  constexpr bool kAhead = kHeadDim <= 128;
  if (!shape.uniform) ask_for_lists(params, shape);
  using Units = DecodeSchedule<block_m(kShape), block_n(kShape)>;
  static_assert(!kAhead || Units::kKeepsLane);  // a guess is read once
  const bool guesses = kAhead && ListsOfLane::serves(params, shape);
  ListsOfLane lists;
  if (guesses) {
    lists = ListsOfLane::read(params);
  } else if (!kAhead || !shape.uniform || params.cache_batch_idx) {
    begin_access();
  }
  Units units(params, shape, false);
  bool guessed = guesses, done = false;
  // Waits, and tells whether the lengths are those that the work was found by; else a warp begins
  // again. Warps of a block may have guessed differently: until then they share nothing.
  const auto confirm = [&] {
    begin_access();
    if (!guessed) return true;
    guessed = false;
    const ListsOfLane now = ListsOfLane::read(params);
    const bool right = now.is(lists);
    lists = now;
    return right;
  };
#pragma unroll 1
  do {
    units.begin(guesses ? lists.lengths(params) : units.of_lane());
#pragma unroll 1
    for (;;) {
      const Segment segment = units.next();
      if (segment.is_none()) {
        done = confirm();
        break;
      }
      const Consumer<T, KV, kHeadDim, kVariant, kPaged, kGeneral> consumer(
          params, shape, segment,
          guesses ? lists.of_sequence(params, segment.sequence)
                  : Lengths(params, segment.sequence));
      if (!consumer.run(shape.uniform || guessed, confirm)) break;
    }
  } while (!done);
  begin_access();  // of blocks that have nothing to do
  // By the block that has least to do.
  if (!shape.whole && !shape.uniform && blockIdx.x == gridDim.x - 1) units.write_starts();
}

}  // namespace dlattn::decode
