#pragma once

#include <cstdint>

#include "core/util/inline.h"

// Where thread blocks leave the parts of rows of out, and the blocks that add them up, as plain
// host code.
namespace dlattn::tile::key_parts {

// Heads of more columns than a warp's registers hold are in one tile of so many columns, of which V
// and out have at most kWideValues.
constexpr int kWideTile = 576;
constexpr int kWideValues = 512;
constexpr bool is_wide(int head_dim_tile) {
  return head_dim_tile > 256;
}

// A block that adds up the parts of some columns of a row of out. Threads and registers (80, by so
// many blocks an SM) are few, so that most SMs of compute capability 9.0 have room for it beside
// blocks of the kernel before: it is launched early.
constexpr int kCombineThreads = 128;
constexpr int kCombineBlocks = 6;
constexpr int out_columns(int head_dim_tile) {  // of a row of a part
  return is_wide(head_dim_tile) ? kWideValues : head_dim_tile;
}
constexpr int combine_columns(int head_dim_tile) {
  return head_dim_tile <= 128 ? 64 : 128;
}
constexpr int combine_blocks(int head_dim_tile) {  // of a row
  return out_columns(head_dim_tile) / combine_columns(head_dim_tile);
}
// Rows that a block adds up side by side, where there are fewer blocks than pieces of rows; 1:
// none.
constexpr int rows_side_by_side(int head_dim_tile) {
  return head_dim_tile == 128 ? kCombineThreads * 4 / head_dim_tile : 1;
}
// Rows of out that a combine kernel adds up, or where a row is several blocks', parts of it. `p`:
// an AttentionParams.
template <typename Params>
DLATTN_SHARED std::int64_t rows_to_combine(const Params& p, int head_dim_tile) {
  return p.batch_size * p.num_heads * p.seqlen_q * combine_blocks(head_dim_tile);
}
constexpr int combine_smem_bytes() {
  return kCombineThreads * (4 * 4 + 8);  // of each thread four sums, of each group PartStats
}

// The contents of the workspace: where sequences begin among the units, and parts of row blocks.
struct WorkspaceMap {
  std::int64_t starts;  // [batch_size + 2] std::uint32_t, the last one part_tiles
  std::int64_t stats;   // [parts][block_m] PartStats
  std::int64_t outs;    // [parts][block_m][out_columns] float
  std::int64_t total;
};

constexpr WorkspaceMap workspace_map(std::int64_t batch_size, std::int64_t parts, int block_m,
                                     int head_dim_tile) {
  const auto aligned = [](std::int64_t bytes) { return (bytes + 255) / 256 * 256; };
  WorkspaceMap map{};
  map.starts = 0;
  map.stats = aligned((batch_size + 2) * 4);
  map.outs = map.stats + aligned(parts * block_m * 8);
  map.total = map.outs + parts * block_m * out_columns(head_dim_tile) * 4;
  return map;
}

}  // namespace dlattn::tile::key_parts
