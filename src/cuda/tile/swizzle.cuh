#pragma once

#include <cstdint>

#include "cuda/ptx/smem.cuh"

namespace dlattn::tile {

// Rows of kColumns 16-bit elements in shared memory without padding, on which ldmatrix meets no
// bank conflict: within each segment of 128 bytes of a row (64 where rows are not multiples of
// 128), the chunks of 16 bytes stand in an order that the row's number gives by XOR, so that 8 rows
// of one column of chunks lie in 8 different groups of banks. The tile's first byte is a multiple
// of 128.
//
// As a rule a row's segments follow each other. With kBoxRows rows the tile is made of boxes of one
// segment's columns, one after the other, in the order that TMA's swizzle gives; it
// begins at a multiple of 8 segments' bytes.
template <int kColumns, int kBoxRows = 0>
struct SwizzledRows {
  static_assert(kColumns % 32 == 0, "a row is made of whole segments");
  static_assert(kBoxRows % 8 == 0, "the order of chunks repeats every 8 rows");
  static constexpr int kElementBytes = 2;
  static constexpr int kSegmentBytes = kColumns % 64 == 0 ? 128 : 64;
  static constexpr int kSegments = kColumns * kElementBytes / kSegmentBytes;
  static constexpr int kSegmentColumns = kSegmentBytes / kElementBytes;
  // From a row to the next, and from a segment of a row to the next.
  static constexpr int kRowBytes = kBoxRows > 0 ? kSegmentBytes : kColumns * kElementBytes;
  static constexpr int kSegmentStep = kBoxRows > 0 ? kBoxRows * kSegmentBytes : kSegmentBytes;
  static constexpr int kChunks = kSegmentBytes / 16;  // of a segment

  // The number that the chunks of a row are XORed with; the same for rows that are a multiple of 8
  // apart.
  __device__ __forceinline__ static int key(int row) {
    return kChunks == 8 ? row % 8 : row / 2 % 4;
  }

  // Bytes from the tile's start to a chunk of a row.
  __device__ __forceinline__ static int offset(int row, int chunk) {
    return row * kRowBytes + chunk / kChunks * kSegmentStep + ((chunk % kChunks) ^ key(row)) * 16;
  }

  // From the address of chunk 0 or 1 of row r to that of the same chunk of the 16-column block
  // that begins at `column`, in row r + rows, `rows` being a multiple of 8. With constant
  // arguments: an XOR that the blocks of all segments and rows share, the rest an immediate offset.
  __device__ __forceinline__ static ptx::SmemAddress block(ptx::SmemAddress address, int rows,
                                                           int column) {
    constexpr int kBlocks = kSegmentBytes / 32;  // of a segment
    const int block = column / 16;
    return (address ^ (block % kBlocks * 32)) + block / kBlocks * kSegmentStep + rows * kRowBytes;
  }
};

}  // namespace dlattn::tile
