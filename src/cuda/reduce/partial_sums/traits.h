#pragma once

#include <cstdint>

#include "core/util/inline.h"
#include "cuda/plan/backward_workspace.h"
#include "dlattn/plan.h"

// The numbers that plans, launcher and kernel share.
namespace dlattn::reduce::partial_sums {

constexpr int kNumThreads = 128;
constexpr int kSmemBytes = kNumThreads / 32 * 4;

// How many numbers a result has. Where it is the sum over sequences or heads there is one.
struct Numbers {
  std::int64_t batches, heads;

  DLATTN_SHARED std::int64_t count() const { return batches * heads; }
};

// Sequences or heads whose parts a number is the sum of.
struct Extent {
  std::int64_t begin, end;
};
DLATTN_SHARED Extent extent(std::int64_t index, std::int64_t count, std::int64_t size) {
  if (count == size) return {index, index + 1};
  return {0, size};
}

// The arguments of the kernel beside the parameters. Made by the launcher.
struct Shape {
  Numbers slopes, sinks;
  std::int64_t parts_per_head;  // Plan::parts_per_head
};

inline Shape make_shape(const BackwardParams& b, std::int64_t parts_per_head) {
  const AttentionParams& p = b.forward;
  const auto numbers = [](std::int64_t stride, std::int64_t size) {
    return stride == 0 && size != 1 ? 1 : size;
  };
  Shape shape{};
  if (b.dalibi_slopes.data) {
    shape.slopes = {numbers(b.dalibi_slopes.batch_stride, p.batch_size),
                    numbers(b.dalibi_slopes.head_stride, p.num_heads)};
  }
  if (b.dsinks.data) shape.sinks = {1, numbers(b.dsinks.head_stride, p.num_heads)};
  shape.parts_per_head = parts_per_head;
  return shape;
}

}  // namespace dlattn::reduce::partial_sums
