#pragma once

#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/key_source.cuh"
#include "cuda/tile/swizzle.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma {

// The order of rows in shared memory: row `row` of the tile is row source(row) of its source.
struct RowsInOrder {
  __device__ __forceinline__ static int source(int row) { return row; }
  // source(row + rows) - source(row) for rows below `kStep` of TileCopy, and multiples of it.
  static constexpr int offset(int rows) { return rows; }
};

// For tiles of keys: permutes keys within 32, so that the 8 scores of a row that a lane has in
// accumulators belong to neighbouring keys.
struct RowsByLane {
  __device__ __forceinline__ static int source(int row) {
    return row / 32 * 32 + row % 8 / 2 * 8 + row % 32 / 8 * 2 + row % 2;
  }
  static constexpr int offset(int rows) { return rows / 32 * 32 + rows % 32 / 8 * 2; }
};

// Copies tiles from global to swizzled shared memory, 16 bytes at a time, by all threads of a block
// or, kGrouped, by a group of kThreads among several. A thread copies the same chunk of each
// segment of its rows. Its rows are kStep apart, so that the swizzle moves that chunk by the same
// XOR in all of them, and the other segments are immediate offsets away. Columns past `columns`
// become zeros.
template <typename T, int kColumns, int kThreads, bool kGrouped = false,
          typename Order = RowsInOrder>
struct TileCopy {
  using Rows = tile::SwizzledRows<kColumns>;
  static constexpr int kStep = kThreads / Rows::kChunks;  // rows from pass to pass
  static constexpr int kSegmentColumns = Rows::kSegmentColumns;
  static constexpr int kChunkColumns = 16 / static_cast<int>(sizeof(T));
  static_assert(sizeof(T) == Rows::kElementBytes && kStep % 8 == 0);

  __device__ __forceinline__ static unsigned thread() {
    return kGrouped ? threadIdx.x % kThreads : threadIdx.x;
  }
  __device__ __forceinline__ static int first_row() { return thread() / Rows::kChunks; }
  __device__ __forceinline__ static int first_column() {
    return thread() % Rows::kChunks * kChunkColumns;
  }
  // The offset of this thread's first chunk in a tile, in bytes.
  __device__ __forceinline__ static int smem_offset() {
    return Rows::offset(first_row(), static_cast<int>(thread() % Rows::kChunks));
  }

  // Copies kRows rows from `gmem` on. The first `rows` of them exist; the others become zeros.
  template <int kRows>
  __device__ __forceinline__ static void edge(ptx::SmemAddress smem, const T* gmem,
                                              std::int64_t row_stride, int rows, int columns) {
    static_assert(kRows % kStep == 0 || kStep % kRows == 0);
    if (kStep > kRows && first_row() >= kRows) return;
    const int source = Order::source(first_row());
    const T* from = gmem + source * row_stride + first_column();
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      const bool exists = Order::offset(first) + source < rows;
      copy_row(smem + smem_offset() + first * Rows::kRowBytes, exists ? from : gmem,
               exists ? columns : 0);
      from += (Order::offset(first + kStep) - Order::offset(first)) * row_stride;
    }
  }

  // The same for rows at any addresses: row `row` begins at row_address(row).
  template <int kRows, typename RowAddress>
  __device__ __forceinline__ static void gather(ptx::SmemAddress smem, RowAddress row_address,
                                                int rows, int columns) {
    if (kStep > kRows && first_row() >= kRows) return;
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      const int row = first + first_row();
      const bool exists = row < rows;
      copy_row(smem + smem_offset() + first * Rows::kRowBytes,
               row_address(exists ? row : 0) + first_column(), exists ? columns : 0);
    }
  }

  // The same, of which those exist that row_exists(row) says, in any order; row_address() is of the
  // thread's row `first` rows behind its first. Addresses of what does not exist are not read.
  template <int kRows, typename RowAddress, typename RowExists>
  __device__ __forceinline__ static void scattered(ptx::SmemAddress smem, RowAddress row_address,
                                                   RowExists row_exists, int columns) {
    static_assert(kRows % kStep == 0);
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
      const T* const from = row_address(first) + first_column();
      const bool exists = row_exists(first + first_row());
#pragma unroll
      for (int s = 0; s < Rows::kSegments; ++s) {
        ptx::cp_async<16>(smem + smem_offset() + first * Rows::kRowBytes + s * Rows::kSegmentBytes,
                          from + s * kSegmentColumns,
                          exists && first_column() + s * kSegmentColumns < columns);
      }
    }
  }

  // As edge(), in fewer instructions, which counts where they are fetched for the first time.
  // `from` is this thread's chunk of the first of its rows. Addresses of what does not exist are
  // computed, but not read.
  template <int kRows>
  __device__ __forceinline__ static void ragged(ptx::SmemAddress smem, const T* from,
                                                std::int64_t row_stride, int rows, int columns) {
    static_assert(kRows % kStep == 0 || kStep % kRows == 0);
    if (kStep > kRows && first_row() >= kRows) return;
    const int source = Order::source(first_row());
#pragma unroll
    for (int first = 0; first < kRows; first += kStep) {
#pragma unroll
      for (int s = 0; s < Rows::kSegments; ++s) {
        ptx::cp_async<16>(
            smem + smem_offset() + first * Rows::kRowBytes + s * Rows::kSegmentBytes,
            from + s * kSegmentColumns,
            Order::offset(first) + source < rows && first_column() + s * kSegmentColumns < columns);
      }
      from += (Order::offset(first + kStep) - Order::offset(first)) * row_stride;
    }
  }

  // As edge() for rows that are aligned to `copy_bytes` of 8, 4 or 2. With 2, elements are loaded
  // and stored one by one rather than by cp.async. Rolled: registers are scarce, and this is no
  // fast path.
  template <int kRows>
  __device__ __forceinline__ static void unaligned(unsigned char* smem, const T* gmem,
                                                   std::int64_t row_stride, int rows, int columns,
                                                   int copy_bytes) {
    if (kStep > kRows && first_row() >= kRows) return;
    constexpr int kPasses = kRows > kStep ? kRows / kStep : 1;
#pragma unroll 1
    for (int i = 0; i < kPasses * Rows::kSegments; ++i) {
      const int first = i / Rows::kSegments * kStep, segment = i % Rows::kSegments;
      const int source = Order::source(first_row()) + Order::offset(first);
      const int column = first_column() + segment * kSegmentColumns;
      const int exist = source < rows ? columns - column : 0;
      const T* from = gmem + source * row_stride + column;
      unsigned char* to =
          smem + smem_offset() + first * Rows::kRowBytes + segment * Rows::kSegmentBytes;
      if (copy_bytes == 8) {
        copy_parts<8>(to, from, gmem, exist);
      } else if (copy_bytes == 4) {
        copy_parts<4>(to, from, gmem, exist);
      } else {
        constexpr int kCount = kColumns > 192 ? 4 : kChunkColumns;  // elements at a time
#pragma unroll 1
        for (int part = 0; part < kChunkColumns; part += kCount) {
          tile::Vec<T, kCount> x;
#pragma unroll
          for (int e = 0; e < kCount; ++e)
            x.x[e] = part + e < exist ? from[part + e] : tile::from_float<T>(0.0f);
          *reinterpret_cast<tile::Vec<T, kCount>*>(to + part * sizeof(T)) = x;
        }
      }
    }
  }

  // Copies kRows rows, all of which exist. `from` is this thread's chunk of its last row of the
  // tile; it is moved to that of the tile before.
  template <int kRows>
  __device__ __forceinline__ static void full_tile(ptx::SmemAddress smem, const T*& from,
                                                   std::int64_t row_stride, int columns) {
    constexpr int kLast = Order::offset(kRows - kStep);
#pragma unroll
    for (int first = kRows - kStep; first >= 0; first -= kStep) {
      copy_row(smem + smem_offset() + first * Rows::kRowBytes, from, columns);
      const int next = first > 0 ? Order::offset(first - kStep) : kLast - kRows;
      from -= (Order::offset(first) - next) * row_stride;
    }
  }

  // The `from` of full_tile() for a tile of kRows rows from row `row` on, which need not exist.
  template <int kRows>
  __device__ __forceinline__ static const T* last_row(const tile::RowSource<T>& source, int row) {
    return source.row(row + Order::offset(kRows - kStep) + Order::source(first_row())) +
           first_column();
  }

 private:
  // Copies a chunk, of which the first `exist` elements exist, kBytes at a time. `gmem` is any
  // valid address.
  template <int kBytes>
  __device__ __forceinline__ static void copy_parts(unsigned char* to, const T* from, const T* gmem,
                                                    int exist) {
    constexpr int kCount = kBytes / static_cast<int>(sizeof(T));
#pragma unroll
    for (int e = 0; e < kChunkColumns; e += kCount)
      ptx::cp_async<kBytes>(to + e * sizeof(T), e < exist ? from + e : gmem, e < exist);
  }

  __device__ __forceinline__ static void copy_row(ptx::SmemAddress smem, const T* from,
                                                  int columns) {
#pragma unroll
    for (int s = 0; s < Rows::kSegments; ++s) {
      ptx::cp_async<16>(smem + s * Rows::kSegmentBytes, from + s * kSegmentColumns,
                        first_column() + s * kSegmentColumns < columns);
    }
  }
};

}  // namespace dlattn::wmma
