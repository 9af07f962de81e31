#pragma once

#include <cstdint>

#include "dlattn/backward.h"

// The seam between backward.cpp, which splits a problem into tasks, and the kernels, which are
// compiled once per instruction set.
namespace dlattn::cpu {

// The rows of a sequence, or of all where the batch has no variable length.
struct SequenceRows {
  std::int64_t batch = 0;
  std::int64_t first_q = 0, first_k = 0;  // rows where it begins; 0 for fixed length
  std::int64_t len_q = 0, len_k = 0;
};

// Each task of a launch owns keys of a KV head, for dk and dv; queries of a head, for dq and a part
// of dalibi_slopes; a part of the queries of a KV head, for dq and sums for dk and dv; or a tile of
// dbias. Owners of queries write dbias too where it has an element for each score.
struct BackwardTask {
  SequenceRows sequence;
  std::int64_t head = 0;   // for keys, that of k
  std::int64_t begin = 0;  // the first key or query
};
struct HeadTask {
  SequenceRows sequence;
  std::int64_t head = 0;  // of k
  int part = 0, num_parts = 1;
};
struct BiasTask {
  std::int64_t batch = 0, head = 0;  // of dbias
  std::int64_t query_tile = 0, key_tile = 0;
};

// How the elements of dbias, along each dimension, stand for those of the scores: one for each, or
// one for all (a stride of 0).
struct BiasDims {
  bool batches, heads, queries, keys;
};

struct BackwardKernels {
  int block_m = 0;  // queries, and keys, of a tile
  int block_n = 0;
  std::int64_t (*scratch_bytes)(const BackwardParams& params) = nullptr;
  // rowsum(dout * out) - dlse of `count` rows of a head, from row `begin` of the tensors on.
  void (*delta)(const BackwardParams& params, std::int64_t batch, std::int64_t head,
                std::int64_t begin, std::int64_t count, void* scratch, void* delta) = nullptr;
  // `delta`: [batch or 1, num_heads, rows of q], of the type that is computed with. Sums over
  // queries are those of num_parts parts, added up in order.
  void (*keys)(const BackwardParams& params, const BackwardTask& task, int num_parts,
               const void* delta, void* scratch) = nullptr;
  // dq, dk and dv at once: `head` leaves sums for all keys of its head in `sums`; `finish` adds up
  // those of the parts, each in part_bytes behind the one before, and writes block_n keys. With
  // writes_bias dbias has an element for each score, which is written as well.
  std::int64_t (*sums_bytes)(const BackwardParams& params, std::int64_t keys) = nullptr;
  void (*head)(const BackwardParams& params, const HeadTask& task, bool writes_bias,
               const void* delta, void* scratch, void* sums) = nullptr;
  void (*finish)(const BackwardParams& params, const BackwardTask& task, int num_parts,
                 void* scratch, void* sums, std::int64_t part_bytes) = nullptr;
  // Returns the task's part of dalibi_slopes. `writes_bias`: as above.
  double (*queries)(const BackwardParams& params, const BackwardTask& task, bool writes_bias,
                    const void* delta, void* scratch) = nullptr;
  // `sequences`: [batch_size]; null: none has rows.
  void (*bias)(const BackwardParams& params, const BiasTask& task, const BiasDims& dims,
               const SequenceRows* sequences, const void* delta, void* scratch) = nullptr;
};

// Those of an instruction set that device_info() may name.
const BackwardKernels& backward_kernels_for(const char* isa, DType dtype);

const BackwardKernels& portable_backward_kernels(bool is_double);
#if defined(__x86_64__)
const BackwardKernels& avx2_backward_kernels(bool is_double);
const BackwardKernels& avx512_backward_kernels(bool is_double);
#endif

}  // namespace dlattn::cpu
