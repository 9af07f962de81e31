#pragma once

#include <cmath>

#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::tile {

// lse and delta = rowsum(dout * out) - dlse of rows of q, as cuda/plan/backward_workspace.h has
// them.
constexpr int kDeltaThreads = 256;  // of a block, that compute kDeltaRows of them

namespace delta_rows {

constexpr int kLanes = 8;                                   // of a row
constexpr int kRows = kDeltaRows * kLanes / kDeltaThreads;  // of a thread
constexpr int kRowStep = kDeltaThreads / kLanes;
static_assert(kRows <= kLanes, "a lane finishes one row");

// Numbers of a tensor that a thread asks for together: of all its rows, by 16 bytes, and of two
// groups of columns that its row's lanes have.
template <typename T>
struct Numbers {
  static constexpr int kCount = 16 / static_cast<int>(sizeof(T));
  static constexpr int kGroups = 2;

  Vec<T, kCount> x[kGroups][kRows];

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
        x[group][r] = *reinterpret_cast<const Vec<T, kCount>*>(
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
          sums[r] += to_float(x.x[group][r].x[i]) * to_float(y.x[group][r].x[i]);
      }
    }
  }
}

// This lane's part of such a sum of one row, number by number.
template <typename T>
__device__ __forceinline__ float dot(const T* out, const T* dout, int columns) {
  float sum = 0.0f;
  for (int column = static_cast<int>(threadIdx.x) % kLanes; column < columns; column += kLanes)
    sum += to_float(out[column]) * to_float(dout[column]);
  return sum;
}

// The probability of the sink of a row.
__device__ __forceinline__ float sink_probability(float sink, float lse) {
  if (sink == -INFINITY || lse == -INFINITY) return 0.0f;
  return sink >= lse ? 1.0f : ptx::exp2((sink - lse) * kLog2e);
}

// A head of a sequence in the tensors of a backward pass.
struct HeadRows {
  int entry;  // of the batch; 0 with variable length
  int start_q, seqlen_q;

  __device__ __forceinline__ HeadRows(const AttentionParams& p, int batch)
      : entry(batch), start_q(0), seqlen_q(static_cast<int>(p.seqlen_q)) {
    if (!p.cu_seqlens_q) return;
    const SequenceRows queries = query_rows(p, batch);
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

}  // namespace delta_rows

// lse and delta of kDeltaRows rows of a head of a sequence, by the first kDeltaThreads threads of a
// block. `wide`: rows of out and dout are read by 16 bytes. Returns this thread's part of the sum
// of the sink's gradient.
template <typename T>
__device__ __forceinline__ float compute_delta_rows(const BackwardParams& b, bool wide,
                                                    int row_block, int head, int batch) {
  using namespace delta_rows;
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
    if (wide) {
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
    const float sum = reduce_sum<kLanes>(sums[r]);
    if (r == lane) delta = sum;
  }
  if (!finishes) return 0.0f;
  delta = exists ? delta - dlse : 0.0f;
  const std::int64_t at = padded_row_index(p, batch, head, seq.start_q) + row;
  const BackwardWorkspace map = backward_workspace(b, 0);
  workspace_at<float>(b, map.lse)[at] =
      lse == -INFINITY ? INFINITY : lse * (has_natural_lse(p) ? 1.0f : kLog2e);
  workspace_at<float>(b, map.delta)[at] = delta;
  if (!exists || !b.dsinks.data) return 0.0f;
  return -sink_probability(p.sinks.data[head * p.sinks.head_stride], lse) * delta;
}

}  // namespace dlattn::tile
