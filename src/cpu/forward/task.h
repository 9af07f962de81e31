#pragma once

#include <cstdint>

#include "dlattn/attention.h"

// The seam between forward.cpp, which splits a problem into tasks, and the kernels, which are
// compiled once per instruction set.
namespace dlattn::cpu {

// Queries that read the same keys are computed together: row r of (batch, KV head) is query r /
// group of head head_kv * group + r % group, group = num_heads / num_heads_kv.
struct Task {
  std::int64_t batch = 0;
  std::int64_t head_kv = 0;
  std::int64_t row_begin = 0;
  std::int64_t num_rows = 0;  // 1 .. block_m
  std::int64_t first_q = 0;   // rows of q and k where the sequence begins; 0 for fixed length
  std::int64_t first_k = 0;
  std::int64_t entry_k = 0;  // the batch entry of k and v that has its keys, or its row of the page
                             // table
  std::int64_t len_q = 0;
  std::int64_t len_k = 0;
  std::int64_t leftpad_k = 0;  // its keys before this one are not seen
  int split = 0;               // which of num_splits parts of the keys
  int num_splits = 1;
};

struct Tiles {
  int block_m = 0;
  int block_n = 0;
};

struct KernelSet {
  // The tiles for `rows` rows per KV head.
  Tiles (*tiles)(DType dtype, std::int64_t rows);
  // Bytes of scratch memory that one thread needs, and of the state of one part of a task whose
  // keys are split. Both multiples of 64, as their addresses must be.
  std::int64_t (*scratch_bytes)(const AttentionParams& params, const Tiles& tiles);
  std::int64_t (*state_bytes)(const AttentionParams& params, const Tiles& tiles);
  // Computes a task: with num_splits == 1 (and null states) to the end, else one part of it into
  // its place in states [num_splits], which merge() then turns into the output.
  void (*run)(const AttentionParams& params, const Tiles& tiles, const Task& task, void* scratch,
              void* states);
  void (*merge)(const AttentionParams& params, const Tiles& tiles, const Task& task, void* scratch,
                void* states);
};

// Those of an instruction set that device_info() may name.
const KernelSet& kernels_for(const char* isa);

const KernelSet& portable_kernels();
#if defined(__x86_64__)
const KernelSet& avx2_kernels();
const KernelSet& avx512_kernels();
#endif

}  // namespace dlattn::cpu
