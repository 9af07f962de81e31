#pragma once

#include <cstdint>

#include "core/problem/positions.h"

// The largest sizes that kernels on a GPU take.
namespace dlattn::core {

// Longest sequence: key positions, windows added, must fit 32 bits.
constexpr std::int64_t kMaxSeqlen = (std::int64_t{1} << 30) - 1024;
static_assert(kMaxSeqlen < kUnlimited<int>);

constexpr std::int64_t kMaxGrid = 2147483647;  // thread blocks: grids are one-dimensional

}  // namespace dlattn::core
