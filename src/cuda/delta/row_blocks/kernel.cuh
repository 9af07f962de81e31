#pragma once

// Prepares a backward pass: lse, most often times log2(e), and delta = rowsum(dout * out) - dlse of
// every row of q (cuda/plan/backward_workspace.h), partial sums of dsinks, and zeros.
//
// A thread block has kDeltaRows rows of one head of one sequence, 8 lanes a row. What it reads of
// them is on its way together, as a small grid has nothing else to do meanwhile. All blocks
// together set to zero what nobody else writes: rows of dq, dk and dv that belong to no sequence,
// and memory of the workspace that kernels add to. Shared memory: a number a warp. Barriers: one,
// where warps' sums are added up.

#include <cmath>

#include "cuda/delta/row_blocks/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::delta::row_blocks {

// Rows of a thread, and from one of them to the next.
constexpr int kRows = kDeltaRows * kLanes / kNumThreads;
constexpr int kRowStep = kNumThreads / kLanes;
static_assert(kRows <= kLanes, "a lane finishes one row");

// Numbers of a tensor that a thread asks for together: of all its rows, by 16 bytes, and of two
// groups of columns that its row's lanes have.
template <typename T>
struct Numbers {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  static constexpr int kGroups = 2;

  tile::Vec<T, kCount> x[kGroups][kRows];

  // `row`: of the thread; `last`: the last one that there is, which others are read as.
  __device__ __forceinline__ void load(const T* from, std::int64_t row_stride, int row, int last,
                                       int column, int columns) {
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int at = column + group * kLanes * kCount;
        x[group][r] = {};
        if (group > 0 && at >= columns) continue;
        x[group][r] = *reinterpret_cast<const tile::Vec<T, kCount>*>(
            from + min(row + r * kRowStep, last) * row_stride + at);
      }
    }
  }
};

// This lane's parts of the sums of out times dout of its rows, by 16 bytes.
template <typename T>
__device__ __forceinline__ void add_dots(float (&sums)[kRows], const T* out,
                                         std::int64_t out_stride, const T* dout,
                                         std::int64_t dout_stride, int row, int last, int columns) {
  constexpr int kCount = Numbers<T>::kCount, kGroups = Numbers<T>::kGroups;
  for (int column = static_cast<int>(threadIdx.x) % kLanes * kCount; column < columns;
       column += kGroups * kLanes * kCount) {
    Numbers<T> x, y;
    x.load(out, out_stride, row, last, column, columns);
    y.load(dout, dout_stride, row, last, column, columns);
#pragma unroll
    for (int group = 0; group < kGroups; ++group) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
#pragma unroll
        for (int i = 0; i < kCount; ++i)
          sums[r] += tile::to_float(x.x[group][r].x[i]) * tile::to_float(y.x[group][r].x[i]);
      }
    }
  }
}

// This lane's part of such a sum of one row, number by number.
template <typename T>
__device__ __forceinline__ float dot(const T* out, const T* dout, int columns) {
  float sum = 0.0f;
  for (int column = static_cast<int>(threadIdx.x) % kLanes; column < columns; column += kLanes)
    sum += tile::to_float(out[column]) * tile::to_float(dout[column]);
  return sum;
}

// The probability of the sink of a row.
__device__ __forceinline__ float sink_probability(float sink, float lse) {
  if (sink == -INFINITY || lse == -INFINITY) return 0.0f;
  return sink >= lse ? 1.0f : ptx::exp2((sink - lse) * tile::kLog2e);
}

// A head of a sequence in the tensors of a backward pass.
struct HeadRows {
  int entry;  // of the batch; 0 with variable length
  int start_q, seqlen_q;

  __device__ __forceinline__ HeadRows(const AttentionParams& p, int batch)
      : entry(batch), start_q(0), seqlen_q(static_cast<int>(p.seqlen_q)) {
    if (!p.cu_seqlens_q) return;
    const tile::SequenceRows queries = tile::query_rows(p, batch);
    entry = 0, start_q = queries.start, seqlen_q = queries.count;
  }
  template <typename View>
  __device__ __forceinline__ std::int64_t offset(const View& x, int head, int row) const {
    return entry * x.batch_stride + head * x.head_stride + (start_q + row) * x.row_stride;
  }
  // Rows of lse lie side by side: its row stride is not set.
  __device__ __forceinline__ std::int64_t lse_offset(const BasicTensorView<float>& lse, int head,
                                                     int row) const {
    return entry * lse.batch_stride + head * lse.head_stride + start_q + row;
  }
};

// The rows of a tile. Returns this thread's part of the sink's sum.
template <typename T>
__device__ __forceinline__ float compute_rows(const BackwardParams& b, const Shape& shape,
                                              int row_block, int head, int batch) {
  const AttentionParams& p = b.forward;
  const HeadRows seq(p, batch);
  const int m0 = row_block * kDeltaRows;
  if (m0 >= seq.seqlen_q) return 0.0f;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int first_row = m0 + static_cast<int>(threadIdx.x) / kLanes;
  // The row that this lane finishes, if it has one. Read before the sums are known.
  const int row = first_row + lane * kRowStep;
  const bool finishes = lane < kRows, exists = finishes && row < seq.seqlen_q;
  float lse = -INFINITY, dlse = 0.0f;
  if (exists) {
    lse = p.lse.data[seq.lse_offset(p.lse, head, row)];
    if (b.dlse.data) dlse = b.dlse.data[seq.offset(b.dlse, head, row)];
  }
  float sums[kRows] = {};
  if (b.dout.data) {
    const auto columns = static_cast<int>(p.head_dim_v);
    const T* const out = static_cast<const T*>(p.out.data) + seq.offset(p.out, head, 0);
    const T* const dout = static_cast<const T*>(b.dout.data) + seq.offset(b.dout, head, 0);
    const int last = seq.seqlen_q - 1;
    if (shape.wide) {
      add_dots(sums, out, p.out.row_stride, dout, b.dout.row_stride, first_row, last, columns);
    } else {
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const int at = min(first_row + r * kRowStep, last);
        const float sum = dot(out + at * p.out.row_stride, dout + at * b.dout.row_stride, columns);
#pragma unroll
        for (int i = 0; i < kRows; ++i) sums[i] = i == r ? sum : sums[i];
      }
    }
  }
  float delta = 0.0f;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float sum = tile::reduce_sum<kLanes>(sums[r]);
    if (r == lane) delta = sum;
  }
  if (!finishes) return 0.0f;
  delta = exists ? delta - dlse : 0.0f;
  const std::int64_t at = padded_row_index(p, batch, head, seq.start_q) + row;
  const BackwardWorkspace map = backward_workspace(b, 0);
  workspace_at<float>(b, map.lse)[at] =
      lse == -INFINITY ? INFINITY : lse * (has_natural_lse(p) ? 1.0f : tile::kLog2e);
  workspace_at<float>(b, map.delta)[at] = delta;
  if (!exists || !b.dsinks.data) return 0.0f;
  return -sink_probability(p.sinks.data[head * p.sinks.head_stride], lse) * delta;
}

// The last sequence that begins at or before a row, or the first.
__device__ __forceinline__ int sequence_of_row(const std::int32_t* cu_seqlens, int batch_size,
                                               int row, std::int64_t total) {
  int first = 0, end = batch_size;
  while (end - first > 1) {
    const int middle = first + (end - first) / 2;
    (tile::sequence_start(cu_seqlens, middle, total) <= row ? first : end) = middle;
  }
  return first;
}

template <typename T, typename View>
__device__ __forceinline__ void clear_row(const View& x, int row, std::int64_t heads,
                                          std::int64_t columns) {
  if (!x.data) return;
  for (std::int64_t head = 0; head < heads; ++head) {
    T* const to = static_cast<T*>(x.data) + row * x.row_stride + head * x.head_stride;
    for (std::int64_t column = threadIdx.x % 32; column < columns; column += 32)
      to[column] = tile::from_float<T>(0.0f);
  }
}

// Rows of dq, dk and dv that no sequence has, a warp each.
template <typename T>
__device__ __forceinline__ void clear_rows_between(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const auto batch_size = static_cast<int>(p.batch_size);
  const std::int64_t step = std::int64_t{gridDim.x} * (kNumThreads / 32);
  const std::int64_t all = p.total_q + p.total_k;
  for (std::int64_t i = std::int64_t{blockIdx.x} * (kNumThreads / 32) + threadIdx.x / 32; i < all;
       i += step) {
    const bool is_query = i < p.total_q;
    const int row = static_cast<int>(is_query ? i : i - p.total_q);
    bool exists = false;
    if (batch_size > 0) {
      const int sequence = is_query ? sequence_of_row(p.cu_seqlens_q, batch_size, row, p.total_q)
                                    : sequence_of_row(p.cu_seqlens_k, batch_size, row, p.total_k);
      const tile::SequenceRows rows =
          is_query ? tile::query_rows(p, sequence) : tile::key_rows(p, sequence);
      exists = row >= rows.start && row < rows.start + rows.count;
    }
    if (exists) continue;
    if (is_query) {
      clear_row<T>(b.dq, row, p.num_heads, p.head_dim);
    } else {
      clear_row<T>(b.dk, row, p.num_heads_kv, p.head_dim);
      clear_row<T>(b.dv, row, p.num_heads_kv, p.head_dim_v);
    }
  }
}

__device__ __forceinline__ void clear_workspace(const BackwardParams& b, const Shape& shape) {
  constexpr int kBytes = 16;
  const std::int64_t step = std::int64_t{gridDim.x} * kNumThreads * kBytes;
  const std::int64_t own = (std::int64_t{blockIdx.x} * kNumThreads + threadIdx.x) * kBytes;
  const float zeros[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (std::int64_t at = shape.clear_begin + own; at < shape.clear_end; at += step)
    tile::store(workspace_at<float>(b, at), zeros);
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads, 2)
    delta_kernel(const __grid_constant__ BackwardParams params,
                 const __grid_constant__ Shape shape) {
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  clear_workspace(params, shape);
  if (params.forward.cu_seqlens_q) clear_rows_between<T>(params);
  if (blockIdx.x >= shape.num_tiles) return;
  const AttentionParams& p = params.forward;
  const unsigned of_all = blockIdx.x / shape.num_row_blocks;  // heads
  const auto row_block = static_cast<int>(blockIdx.x - of_all * shape.num_row_blocks);
  const auto num_heads = static_cast<unsigned>(p.num_heads);
  const unsigned batch = of_all / num_heads;
  const float sum =
      compute_rows<T>(params, shape, row_block, static_cast<int>(of_all - batch * num_heads),
                      static_cast<int>(batch));
  if (!params.dsinks.data) return;
  auto* const warp_sums = reinterpret_cast<float*>(ptx::dynamic_smem());
  const float warp_sum = tile::reduce_sum<32>(sum);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = warp_sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float total = 0.0f;
  for (int warp = 0; warp < kNumThreads / 32; ++warp) total += warp_sums[warp];
  workspace_at<float>(params, backward_workspace(params, 0).sink_parts)[blockIdx.x] = total;
}

}  // namespace dlattn::delta::row_blocks
