#pragma once

#include "core/problem/quantized.h"

// The numbers that plan and kernels share.
namespace dlattn::quantize::key_blocks {

// That has conversions to e4m3, where there are any.
constexpr int min_capability(Precision precision) {
  return precision == Precision::kInt8Fp16 ? 80 : 89;
}

// Numbers of 16 bits that one load reads.
constexpr int kChunk = 8;
// The part of a thread: chunks of rows, each a half of a row's columns from the next.
constexpr int kThreadRows = 2;
constexpr int kThreadChunks = 2;
constexpr int kThreadColumns = kThreadChunks * kChunk;
constexpr int kThreadBytes = kThreadRows * kThreadColumns * 2;
constexpr int kItemBytes = 48;

// Rows that share a scale.
constexpr int block_rows(Precision precision, int columns, bool queries) {
  return queries ? query_block(precision) : quantized_block(precision, columns);
}
// The tensors that are quantised of a block of keys, one after the other: v, then k; q is alone.
constexpr int num_parts(bool queries) {
  return queries ? 1 : 2;
}

constexpr int num_threads(int columns, int block_n) {
  return columns / kThreadColumns * block_n / kThreadRows;
}
// 1024 threads, which have 64 KB on their way, with 64 registers each.
constexpr int blocks_per_sm(int columns, int block_n) {
  return 1024 / num_threads(columns, block_n);
}

// The steps of a thread block, one after the other: tensors of blocks of keys, `items` in all. As
// many as give each place on a GPU of 132 SMs one thread block: then all begin and end together,
// and what each does once is done seldom. Larger problems have several, as lengths that only the
// device knows leave some with nothing to do.
constexpr int kMaxSteps = 16;
constexpr int num_steps(std::int64_t items, int columns, int block_n) {
  const std::int64_t places = 132 * blocks_per_sm(columns, block_n);
  const std::int64_t steps = (items + places - 1) / places;
  return static_cast<int>(steps < 1 ? 1 : steps > kMaxSteps ? kMaxSteps : steps);
}

// Shared memory, in this order: what threads copy ahead; of each column the factor and the shift;
// the items; for each of them a number of each warp.
constexpr int smem_bytes(int columns, int block_n) {
  const int threads = num_threads(columns, block_n);
  return threads * kThreadBytes + 2 * columns * 4 + kMaxSteps * (kItemBytes + threads / 32 * 4);
}

}  // namespace dlattn::quantize::key_blocks
