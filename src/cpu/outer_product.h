#pragma once

#include "cpu/simd.h"

// The matrix products. Queries stand in the SIMD lanes, so every operand that has queries in it is
// kept transposed (Q^T, S^T, O^T, with block_m columns), and K and V are read where they are, an
// element at a time:
//   S^T[key][query]  = sum_d   K[key][d]   * Q^T[d][query]
//   O^T[d][query]    = O^T[d][query] * rescale[query] + sum_key V[key][d] * P^T[key][query]
// The backward pass has a third one, with the columns of a head in the lanes:
//   dV[key][d]       = dV[key][d] + sum_query P^T[key][query] * dO[query][d]
// The sum over a tile's keys begins at 0, so that its terms are not rounded to the size of O^T. A
// score is the sum of sums over kChain elements of head_dim each: one sum over 64 elements or more
// has two to four times the error of a plain computation, which adds up lane by lane, and large
// scores hand theirs on to the probabilities. dP^T = V dO^T is computed in the same way.
// All are sums of outer products of a column of the left operand with a row of the right one. One
// call below keeps kRows x kCols vectors of the result in registers; that many independent sums
// hide the latency of the multiply-adds, and one load serves several of them.
namespace dlattn::cpu::DLATTN_CPU_ISA {

constexpr int kMaxCols = kNumRegisters == 32 ? 4 : 2;
constexpr int kMaxRows = 12;
constexpr std::int64_t kChain = 16;

// Rows of results that fit the registers beside kCols vectors of the right operand and one of the
// left.
template <int kCols>
constexpr int kRowsFor =
    (kNumRegisters == 32 ? 24 : 12) / kCols < kMaxRows ? (kNumRegisters == 32 ? 24 : 12) / kCols
                                                       : kMaxRows;

enum class Product { kScores, kOutput, kGradient };

// Rows that will be needed soon. A product asks for them bit by bit, so that memory works while it
// computes: with few queries that is most of the time.
struct Upcoming {
  const char* rows = nullptr;
  std::int64_t stride = 0;  // bytes
  std::int64_t row_bytes = 0;
  std::int64_t num_rows = 0;

  void prefetch(std::int64_t begin, std::int64_t end) const {
    for (std::int64_t n = begin; n < end; ++n) {
      for (std::int64_t at = 0; at < row_bytes; at += 64)
        __builtin_prefetch(rows + n * stride + at);
    }
  }
};

template <typename T>
struct ProductArgs {
  const T* left;               // K or V; P^T
  std::int64_t left_stride;    // between keys
  const T* right;              // Q^T or P^T; dO
  std::int64_t depth;          // head_dim, or keys in the tile; queries in it
  T* result;                   // S^T or O^T; dV
  const T* rescale = nullptr;  // kOutput only: [block_m]
  std::int64_t block_m;        // columns of right and result
  Upcoming upcoming;
};

template <typename T, Product kProduct, int kRows, int kCols>
void product_block(const ProductArgs<T>& args) {
  constexpr bool kOutput = kProduct == Product::kOutput;
  const std::int64_t ld = args.block_m;
  const std::int64_t row_step = kOutput ? 1 : args.left_stride;
  const std::int64_t depth_step = kOutput ? args.left_stride : 1;
  T* const result = args.result;
  const T* left = args.left;
  const T* right = args.right;
  std::int64_t begin = 0;
  do {
    const std::int64_t to_come = args.depth - begin;
    const std::int64_t chain = kProduct == Product::kScores && to_come > kChain ? kChain : to_come;
    Vec<T> sum[kRows][kCols];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) sum[r][c] = Vec<T>{};
    }
    for (std::int64_t x = 0; x < chain; ++x) {
      Vec<T> row[kCols];
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) row[c] = load(right + c * kWidth<T>);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Vec<T> factor = broadcast(left[r * row_step]);
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c) sum[r][c] += factor * row[c];
      }
      left += depth_step;
      right += ld;
    }
    if (kProduct == Product::kGradient || begin > 0) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c) sum[r][c] += load(result + r * ld + c * kWidth<T>);
      }
    }
    if constexpr (kOutput) {
      Vec<T> rescale[kCols];
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) rescale[c] = load(args.rescale + c * kWidth<T>);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kCols; ++c)
          sum[r][c] += load(result + r * ld + c * kWidth<T>) * rescale[c];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kCols; ++c) store(result + r * ld + c * kWidth<T>, sum[r][c]);
    }
    begin += chain;
  } while (kProduct == Product::kScores && begin < args.depth);
}

// product_block for 1 .. kRowsFor<kCols> rows.
template <typename T, Product kProduct, int kCols, int kRows = kRowsFor<kCols>>
DLATTN_INLINE void product_rows(int rows, const ProductArgs<T>& args) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return product_rows<T, kProduct, kCols, kRows - 1>(rows, args);
  }
  product_block<T, kProduct, kRows, kCols>(args);
}

// All rows of the result for kCols vectors of queries. Rows are spread evenly: a last block of
// one or two rows would have too few sums to hide latency.
template <typename T, Product kProduct, int kCols>
void product_columns(std::int64_t rows, ProductArgs<T> args) {
  const std::int64_t num_blocks = (rows + kRowsFor<kCols> - 1) / kRowsFor<kCols>;
  const std::int64_t row_step = kProduct == Product::kOutput ? 1 : args.left_stride;
  for (std::int64_t block = 0; block < num_blocks; ++block) {
    const int count = static_cast<int>(rows / num_blocks + (block < rows % num_blocks));
    args.upcoming.prefetch(args.upcoming.num_rows * block / num_blocks,
                           args.upcoming.num_rows * (block + 1) / num_blocks);
    product_rows<T, kProduct, kCols>(count, args);
    args.left += count * row_step;
    args.result += count * args.block_m;
  }
}

// The whole product: `rows` keys for kScores and kGradient, `rows` elements of head_dim_v for
// kOutput.
template <typename T, Product kProduct>
void multiply(std::int64_t rows, ProductArgs<T> args) {
  if (args.block_m == kWidth<T>) return product_columns<T, kProduct, 1>(rows, args);
  if (args.block_m == 2 * kWidth<T>) return product_columns<T, kProduct, 2>(rows, args);
  for (std::int64_t lane = 0; lane < args.block_m; lane += kMaxCols * kWidth<T>) {
    product_columns<T, kProduct, kMaxCols>(rows, args);
    args.right += kMaxCols * kWidth<T>;
    args.result += kMaxCols * kWidth<T>;
    if constexpr (kProduct == Product::kOutput) args.rescale += kMaxCols * kWidth<T>;
    args.upcoming.num_rows = 0;
  }
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
