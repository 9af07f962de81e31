#pragma once

#include <cstdint>

#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma8 {

// Rows of kColumns bytes in shared memory. ldmatrix takes two of them for an element.
template <int kColumns>
using ByteRows = tile::SwizzledRows<kColumns / 2>;

// Copies tiles of kRows rows of bytes from global to swizzled shared memory, by kThreads threads,
// each of which has one chunk of 16 bytes of rows that are kStep apart; which, it works out again
// every time rather than keep it. Rows from `rows` on and
// columns from `columns` on become zeros: 0 times what lies there instead may be NaN.
template <int kRows, int kColumns, int kThreads>
struct ByteCopy {
  using Rows = ByteRows<kColumns>;
  static constexpr int kChunks = kColumns / 16;
  static constexpr int kStep = kThreads / kChunks;
  static_assert(kThreads % kChunks == 0 && kRows % kStep == 0);
  static_assert(kStep % 8 == 0 || kStep == 4, "the order of chunks is the same or half turned");

  // This thread's chunks: the first row that has one, and its column.
  struct Chunks {
    int first_row, column;

    __device__ __forceinline__ explicit Chunks(unsigned thread)
        : first_row(static_cast<int>(thread) / kChunks),
          column(static_cast<int>(thread) % kChunks * 16) {}
    __device__ __forceinline__ int smem_offset() const {
      return Rows::offset(first_row, column / 16);
    }
  };

  // Rows that are aligned to 16 bytes, by cp.async. Addresses of rows that do not exist are
  // computed, but not read. kAll: all of them exist.
  template <bool kAll>
  __device__ __forceinline__ static void start(ptx::SmemAddress smem, const std::uint8_t* gmem,
                                               std::int64_t row_stride, int rows, int columns) {
    const Chunks own(ptx::reread_thread_index());
    const std::uint8_t* from = gmem + own.first_row * row_stride + own.column;
    const bool in_columns = own.column < columns;
    const int exist = in_columns ? rows - own.first_row : 0;
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      // seed: copy-row
      // A thread's rows are 4 apart where they are of 512 bytes: every other one has the other half
      // of a segment's chunks first.
      ptx::cp_async<16>(smem + (own.smem_offset() ^ first % 8 * 16) + first * Rows::kRowBytes, from,
                        kAll ? in_columns : first < exist);
      from += kStep * row_stride;
    }
  }

  // Rows that are aligned to `copy_bytes` of 8, 4, 2 or 1. With 2 and 1, bytes are loaded and
  // stored rather than copied by cp.async. Rolled: this is no fast path, and no register is kept
  // for it.
  __device__ __forceinline__ static void start_unaligned(unsigned char* smem,
                                                         const std::uint8_t* gmem,
                                                         std::int64_t row_stride, int rows,
                                                         int columns, int copy_bytes) {
    const Chunks own(ptx::reread_thread_index());
    unsigned char* to = smem + own.smem_offset();
#pragma unroll 1
    for (int row = own.first_row; row < kRows; row += kStep) {
      const bool exists = own.column < columns && row < rows;
      const std::uint8_t* from = exists ? gmem + row * row_stride + own.column : gmem;
      if (copy_bytes == 8) {
        copy_parts<8>(to, from, exists);
      } else if (copy_bytes == 4) {
        copy_parts<4>(to, from, exists);
      } else {
        copy_bytewise(to, from, exists);
      }
      to += kStep * Rows::kRowBytes;
    }
  }

 private:
  template <int kBytes>
  __device__ __forceinline__ static void copy_parts(unsigned char* to, const std::uint8_t* from,
                                                    bool exists) {
#pragma unroll
    for (int i = 0; i < 16; i += kBytes)
      ptx::cp_async<kBytes>(to + i, exists ? from + i : from, exists);
  }

  __device__ __forceinline__ static void copy_bytewise(unsigned char* to, const std::uint8_t* from,
                                                       bool exists) {
#pragma unroll 1
    for (int i = 0; i < 16; i += 4) {
      std::uint32_t word = 0;
#pragma unroll
      for (int e = 0; e < 4; ++e)
        word |= exists ? static_cast<std::uint32_t>(from[i + e]) << 8 * e : 0u;
      *reinterpret_cast<std::uint32_t*>(to + i) = word;
    }
  }
};

}  // namespace dlattn::wmma8
