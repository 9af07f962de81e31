#pragma once

#include <cstdint>

#include "cuda/backward/scalar/traits.h"
#include "cuda/tile/vec.cuh"
#include "dlattn/types.h"

// Products of 64 x 64 numbers in fp32. Thread (ty, tx) of 16 x 16 has rows 4 ty to 4 ty + 3 and
// columns 4 tx to 4 tx + 3. Operands are staged in shared memory as fp32, whatever dtype their
// tensors are of.
namespace dlattn::backward_scalar {

__device__ __forceinline__ int thread_row() {
  return static_cast<int>(threadIdx.x) / 16 * 4;
}
__device__ __forceinline__ int thread_column() {
  return static_cast<int>(threadIdx.x) % 16 * 4;
}

// Rows of one head of one sequence. Those from `end` on are zeros.
struct Rows {
  const void* data;
  std::int64_t stride;
  DType dtype;
  int end;
  int columns;
};

// Calls function(T{}) with the type of the elements.
template <typename Function>
__device__ __forceinline__ void with_element(DType dtype, Function function) {
  if (dtype == DType::kFloat16) {
    function(half{});
  } else if (dtype == DType::kBFloat16) {
    function(__nv_bfloat16{});
  } else {
    function(float{});
  }
}

// Stages kColumns columns of kTile rows; `at(row, column)` is where.
template <int kColumns, typename At>
__device__ __forceinline__ void stage(float* to, const Rows& rows, int first_row, int first_column,
                                      At at) {
  with_element(rows.dtype, [&](auto element) {
    using T = decltype(element);
    constexpr int kStep = kNumThreads / kColumns;
    const int column = static_cast<int>(threadIdx.x) % kColumns;
    const int first = static_cast<int>(threadIdx.x) / kColumns;
    const int end = first_column + column < rows.columns ? rows.end - first_row : 0;
    const T* from = static_cast<const T*>(rows.data) + first_column + column +
                    (first_row + first) * rows.stride;
    // By a running pointer: addresses by row would all be kept in registers.
#pragma unroll 4
    for (int row = first; row < kTile; row += kStep) {
      to[at(row, column)] = row < end ? tile::to_float(*from) : 0.0f;
      from += kStep * rows.stride;
    }
  });
}

// acc += A^T B for A and B of kCount rows.
template <int kCount>
__device__ __forceinline__ void add_outer_products(float (&acc)[4][4], const float* a,
                                                   const float* b) {
#pragma unroll 4
  for (int k = 0; k < kCount; ++k) {
    float x[4], y[4];
    tile::load(x, a + k * kLd + thread_row());
    tile::load(y, b + k * kLd + thread_column());
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) acc[i][j] = fmaf(x[i], y[j], acc[i][j]);
    }
  }
}

// product = A B^T for kTile rows of A and of B.
__device__ __forceinline__ void multiply_rows(float (&product)[4][4], const Rows& a, int a0,
                                              const Rows& b, int b0, float* staged) {
  const auto transposed = [](int row, int column) { return column * kLd + row; };
  float* const other = staged + kDepth * kLd;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) product[i][j] = 0.0f;
  }
#pragma unroll 1
  for (int column = 0; column < a.columns; column += kDepth) {
    __syncthreads();  // all have read the rows before
    stage<kDepth>(staged, a, a0, column, transposed);
    stage<kDepth>(other, b, b0, column, transposed);
    __syncthreads();
    add_outer_products<kDepth>(product, staged, other);
  }
}

// acc += A^T B: `a` is in shared memory, written before; of B kTile rows. Columns of the result lie
// in chunks of kTile.
template <int kChunks>
__device__ __forceinline__ void add_product(float (&acc)[kChunks][4][4], const float* a,
                                            const Rows& b, int b0, float* staged) {
#pragma unroll
  for (int chunk = 0; chunk < kChunks; ++chunk) {
    if (chunk * kTile < b.columns) {
      __syncthreads();  // `a` is written, and all have read the rows before
      stage<kTile>(staged, b, b0, chunk * kTile,
                   [](int row, int column) { return row * kLd + column; });
      __syncthreads();
      add_outer_products<kTile>(acc[chunk], a, staged);
    }
  }
}

// Writes a thread's numbers of a tile to shared memory, rows by columns, or the other way round.
template <bool kTransposed>
__device__ __forceinline__ void write_operand(float* to, const float (&x)[4][4]) {
#pragma unroll
  for (int a = 0; a < 4; ++a) {
    float row[4];
#pragma unroll
    for (int b = 0; b < 4; ++b) row[b] = kTransposed ? x[b][a] : x[a][b];
    tile::store(to + ((kTransposed ? thread_column() : thread_row()) + a) * kLd +
                    (kTransposed ? thread_row() : thread_column()),
                row);
  }
}

// Stores kTile rows of a gradient, as far as they and their columns exist, times a factor.
template <int kChunks>
__device__ __forceinline__ void store_rows(const float (&acc)[kChunks][4][4], void* data,
                                           std::int64_t stride, DType dtype, int rows, int columns,
                                           float factor) {
  with_element(dtype, [&](auto element) {
    using T = decltype(element);
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        T* const to = static_cast<T*>(data) + (thread_row() + i) * stride;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          const int column = chunk * kTile + thread_column() + j;
          if (thread_row() + i < rows && column < columns)
            to[column] = tile::from_float<T>(acc[chunk][i][j] * factor);
        }
      }
    }
  });
}

}  // namespace dlattn::backward_scalar
