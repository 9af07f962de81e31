#pragma once

#include "cpu/columns.h"
#include "cpu/outer_product.h"
#include "cpu/score_tile.h"

// The products of a task with so few rows that they would leave most lanes empty, as in decoding.
// Keys stand in the lanes of scores, S[row][key], and elements of a head in those of the output.
// Each number is the same sum in the same order as in outer_product.h, so it has the same bits.
namespace dlattn::cpu::DLATTN_CPU_ISA {

// Rows up to which the transposition of K costs less than empty lanes.
template <typename T>
constexpr int kFewRows = kWidth<T> < 4 ? 1 : kWidth<T> / 4;

template <typename T>
struct FewRowsArgs {
  const T* left;             // K or V
  std::int64_t left_stride;  // between keys
  std::int64_t num_keys;
  const T* right;  // Q^T [head_dim][ld_right], or P [row][ld_right]
  std::int64_t ld_right;
  std::int64_t columns;  // head_dim or head_dim_v
  T* result;             // S [row][ld_result], or the tile's sums P V
  std::int64_t ld_result;
  T* row_sum = nullptr;  // of P, for O only
  Upcoming upcoming;
};

// S = Q K^T for whole vectors of keys. Rows that will be needed soon are asked for meanwhile.
template <typename T, int kRows>
void few_rows_scores(FewRowsArgs<T> args) {
  const std::int64_t rows = args.upcoming.num_rows, count = args.num_keys;
  for (std::int64_t n = 0; n < count; n += kWidth<T>) {
    args.upcoming.prefetch(rows * n / count, rows * (n + kWidth<T>) / count);
    Vec<T> total[kRows] = {};
    for (std::int64_t begin = 0; begin < args.columns; begin += kChain) {
      Vec<T> sum[kRows] = {};
      for (std::int64_t d = begin; d < min_int(begin + kChain, args.columns); d += kColumns<T>) {
        Vec<T> column[kColumns<T>];
        load_columns(args.left + n * args.left_stride + d, args.left_stride, column);
#pragma GCC unroll 4
        for (int c = 0; c < kColumns<T>; ++c) {
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r)
            sum[r] += column[c] * broadcast(args.right[(d + c) * args.ld_right + r]);
        }
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) total[r] = begin > 0 ? total[r] + sum[r] : sum[r];
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) store(args.result + r * args.ld_result + n, total[r]);
  }
}

// kCols vectors of P V, over all keys of a tile.
template <typename T, int kRows, int kCols>
DLATTN_INLINE void few_rows_output_block(const FewRowsArgs<T>& args, bool is_first) {
  Vec<T> sum[kRows][kCols] = {};
  Vec<T> row_sum[kRows] = {};
  const T* left = args.left;
  for (std::int64_t n = 0; n < args.num_keys; ++n, left += args.left_stride) {
    if (is_first && n < args.upcoming.num_rows) args.upcoming.prefetch(n, n + 1);
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
      const Vec<T> p = broadcast(args.right[r * args.ld_right + n]);
      row_sum[r] += p;
#pragma GCC unroll 8
      for (int c = 0; c < kCols; ++c) sum[r][c] += load_unaligned(left + c * kWidth<T>) * p;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
    if (is_first) args.row_sum[r] = row_sum[r][0];
#pragma GCC unroll 8
    for (int c = 0; c < kCols; ++c)
      store_unaligned(args.result + r * args.ld_result + c * kWidth<T>, sum[r][c]);
  }
}

// P V, which has at least one vector of columns, and the sums of P's rows. kCols vectors at a time
// as long as there are so many, then fewer.
template <typename T, int kRows, int kCols = (kNumRegisters == 32 ? 16 : 8) / kRows>
void few_rows_output(FewRowsArgs<T> args, std::int64_t d = 0) {
  const FewRowsArgs<T> first = args;
  while (d < args.columns) {
    if constexpr (kCols > 1) {
      if (d + kCols * kWidth<T> > args.columns)
        return few_rows_output<T, kRows, kCols / 2>(first, d);
    }
    // The last vector may begin among columns that are there already, with the same sums.
    d = min_int(d, args.columns - kCols * kWidth<T>);
    args.left = first.left + d;
    args.result = first.result + d;
    few_rows_output_block<T, kRows, kCols>(args, d == 0);
    d += kCols * kWidth<T>;
  }
}

template <int kCount>
struct Rows {
  static constexpr int kNumRows = kCount;
};
// Calls function(Rows<rows>{}) for 1 .. kFewRows rows.
template <typename T, int kRows = kFewRows<T>, typename Function>
DLATTN_INLINE void with_rows(std::int64_t rows, Function function) {
  if constexpr (kRows > 1) {
    if (rows < kRows) return with_rows<T, kRows - 1>(rows, function);
  }
  function(Rows<kRows>{});
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
