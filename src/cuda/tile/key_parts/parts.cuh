#pragma once

#include "core/problem/descales.h"
#include "cuda/tile/key_parts/shape.h"
#include "cuda/tile/mma/partial_output.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

// Parts of rows of out, over some of their keys each, and how they are added up: those of a block's
// groups of warps in shared memory, and those of several blocks in the workspace.
namespace dlattn::tile::key_parts {

using tile::mma::PartStats;

// Parts of a row, as they are added up, some at a time.
struct RunningSum {
  tile::OnlineSoftmax row;
  float acc[4] = {};

  // All parts at once.
  template <int kParts>
  __device__ __forceinline__ static RunningSum of(const PartStats (&stats)[kParts],
                                                  const float (&x)[kParts][4]) {
    RunningSum sum;
#pragma unroll
    for (int i = 0; i < kParts; ++i) sum.row.row_max = fmaxf(sum.row.row_max, stats[i].row_max);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const float weight = sum.row.probability(stats[i].row_max, 1.0f);
      sum.row.row_sum = fmaf(weight, stats[i].row_sum, sum.row.row_sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) sum.acc[e] = fmaf(weight, x[i][e], sum.acc[e]);
    }
    return sum;
  }

  // Adds `count` parts, where each of kMost neighbouring lanes, which add up the same ones, has the
  // statistics of one: `stats`. row_sum is this lane's part of the sum. All lanes call it.
  template <int kMost>
  __device__ __forceinline__ void add(const PartStats& stats, const float (&x)[kMost][4],
                                      int count) {
    const bool exists = static_cast<int>(threadIdx.x) % kMost < count;
    const float most = tile::reduce_max<kMost>(exists ? stats.row_max : -INFINITY);
    const float factor = row.raise_max(most, 1.0f);
    const float weight = exists ? row.probability(stats.row_max, 1.0f) : 0.0f;
    if (exists) row.row_sum = fmaf(weight, stats.row_sum, row.row_sum);
#pragma unroll
    for (int e = 0; e < 4; ++e) acc[e] *= factor;
#pragma unroll
    for (int i = 0; i < kMost; ++i) {
      const float of_part = __shfl_sync(tile::kFullMask, weight, i, kMost);
      if (i >= count) continue;
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[e] = fmaf(of_part, x[i][e], acc[e]);
    }
  }
};

// Times this, what is relative to a row max is relative to the row max scaled and rounded, up to
// where that is a factor of 2^4 (SpeculativeSoftmax::scaled_part()).
__device__ __forceinline__ float unrounded(float row_max, float scale) {
  const float rounded = row_max * scale;
  return fabsf(rounded) < 0x1p26f ? ptx::exp2(fmaf(row_max, scale, -rounded)) : 1.0f;
}

// The factor of the 8-bit values of a KV head; 1 for other types.
template <int kKeyBytes>
__device__ __forceinline__ float value_scale(const AttentionParams& p, int sequence, int head_kv) {
  return kKeyBytes == 1 ? descale(p.v_descale, std::int64_t{sequence}, std::int64_t{head_kv})
                        : 1.0f;
}

// The result of a row: out = scale * (sum of weights x parts). `of_values`: what they count. A row
// that sees nothing is 0, whatever that is.
__device__ __forceinline__ tile::RowResult finalize(const PartStats& stats, const float* sink,
                                                    float of_values) {
  tile::RowResult result =
      tile::finalize(tile::RowMax(-stats.row_max, false), 1.0f, stats.row_sum, sink);
  if (result.scale != 0.0f) result.scale *= of_values;
  return result;
}

// Where a row of a row block goes.
template <typename T>
struct ResultRow {
  T* out;
  float* lse;         // null: not wanted
  const float* sink;  // null: none

  // Finds query `query` of head `head` of a sequence.
  __device__ __forceinline__ ResultRow(const AttentionParams& p, int sequence, int head,
                                       int query) {
    out = static_cast<T*>(p.out.data) + head * p.out.head_stride;
    lse = p.lse.data ? p.lse.data + head * p.lse.head_stride : nullptr;
    sink = p.sinks.data ? p.sinks.data + head * p.sinks.head_stride : nullptr;
    if (p.cu_seqlens_q) {
      query += tile::query_rows(p, sequence).start;
    } else {
      out += sequence * p.out.batch_stride;
      if (lse) lse += sequence * p.lse.batch_stride;
    }
    out += query * p.out.row_stride;
    if (lse) lse += query;
  }
};

// Stores two neighbouring columns of a row, as far as the row has them.
template <typename T>
__device__ __forceinline__ void store_pair(T* row, int column, float low, float high, int columns,
                                           int store_bytes) {
  if (store_bytes >= 4 && column + 2 <= columns) {
    *reinterpret_cast<std::uint32_t*>(row + column) = tile::pack<T>(low, high);
    return;
  }
  if (column < columns) row[column] = tile::from_float<T>(low);
  if (column + 1 < columns) row[column + 1] = tile::from_float<T>(high);
}

// Calls function(T()) with the type of q's and out's elements: T itself, or with 8-bit keys, whose
// kernels serve both types, the one that the launch is for.
template <typename T, int kKeyBytes, typename Function>
__device__ __forceinline__ void with_query_type(const DecodeShape& shape, Function function) {
  if constexpr (kKeyBytes == 2) {
    function(T());
  } else if (shape.is_bfloat16) {
    function(__nv_bfloat16());
  } else {
    function(__half());
  }
}

}  // namespace dlattn::tile::key_parts
