#pragma once

// The numbers that plan and kernel share.
namespace dlattn::merge::row_per_warp {

constexpr int kNumWarps = 4;  // per thread block, a row of out each at a time
constexpr int kNumThreads = kNumWarps * 32;

}  // namespace dlattn::merge::row_per_warp
