#pragma once

// Sizes of warpgroups and of their tiles in shared memory, as plain constexpr host code: the plan
// reads the same numbers as the kernels.
namespace dlattn::tile::wgmma {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;   // of queries, per consumer
constexpr int kBlockRowBytes = 128;  // rows of a tile's blocks of columns: as long as the swizzle
constexpr int kWorkTileBytes = 32;   // of a work tile in shared memory

}  // namespace dlattn::tile::wgmma
