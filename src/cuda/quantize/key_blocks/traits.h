#pragma once

#include "core/quantized.h"

// What plan and kernels both know.
namespace dlattn::quantize::key_blocks {

constexpr int kMinCapability = 89;  // that has conversions to e4m3

// Two thread blocks work on a block of keys: one on k, one on v. What a thread of theirs holds:
constexpr int kThreadColumns = 16;  // neighbours in a row, which one store writes as 16 bytes
constexpr int kThreadRows = 2;

// Rows that share a scale.
constexpr int block_rows(Precision precision, int columns, bool queries) {
  return queries ? query_block(precision) : quantized_block(precision, columns);
}

constexpr int num_threads(int columns, int block_n) {
  return columns / kThreadColumns * block_n / kThreadRows;
}
// 1024 threads, which have 64 KB on their way, with 64 registers each.
constexpr int blocks_per_sm(int columns, int block_n) {
  return 1024 / num_threads(columns, block_n);
}
// A number for each warp.
constexpr int smem_bytes(int columns, int block_n) {
  return num_threads(columns, block_n) / 32 * 4;
}

constexpr int kChunk = 8;  // columns of 16 bits that one load reads

// The mean is a thread block's for each head of a sequence: a thread has a chunk of every
// kPartialSums'th sampled key.
constexpr int num_shift_threads(int columns) {
  return kPartialSums * columns / kChunk;
}
constexpr int shift_smem_bytes(int columns) {
  return kPartialSums * columns * 4;
}

}  // namespace dlattn::quantize::key_blocks
