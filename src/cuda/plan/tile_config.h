#pragma once

// Tile shapes, as plain constexpr host code: the plan reads the same numbers as the kernels.
namespace dlattn {

struct TileConfig {
  int block_m;     // query rows per thread block
  int block_n;     // keys per tile
  int num_warps;   // per thread block
  int num_stages;  // K/V tiles in shared memory
  int smem_bytes;  // dynamic shared memory per thread block
};

}  // namespace dlattn
