#pragma once

// New keys and values into a cache, and queries rotated: what core/problem/append.h defines.
//
// A thread block does 16 heads' rows of one token, of k, v and q in this order: 16 lanes a row. All
// threads find out where the token goes, which takes the same few loads for all, then each lane
// moves 16 bytes at a time: of rotated columns a pair of chunks, whose numbers stay in the lane. No
// shared memory, no barriers. Rows that are not aligned are moved number by number.

#include <cstdint>

#include "core/problem/append.h"
#include "cuda/append/token_rows/traits.h"
#include "cuda/ptx/grid_dependency.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::append::token_rows {

// The last sequence that begins at or before row n, or the first. Where starts decrease it is any
// sequence. A warp looks at 32 starts at a time.
__device__ __forceinline__ int sequence_of_row(const AppendParams& p, int n, int lane) {
  int first = 0, end = static_cast<int>(p.batch_size);
#pragma unroll 1
  while (end - first > 1) {
    const int step = (end - first + 31) / 32;
    const int candidate = first + (lane + 1) * step;
    const bool before =
        candidate < end && tile::sequence_start(p.cu_seqlens_q, candidate, p.total_new) <= n;
    // At most as many as there are candidates before the end, wherever starts decrease.
    first += __popc(__ballot_sync(tile::kFullMask, before)) * step;
    end = min(end, first + step);
  }
  return first;
}

__device__ __forceinline__ NewRow new_row(const AppendParams& p, unsigned n, int lane) {
  if (!p.cu_seqlens_q) {
    const auto length = static_cast<unsigned>(p.seqlen_new);
    const unsigned sequence = n / length;
    return {sequence, n - sequence * length};
  }
  const int row = static_cast<int>(n), sequence = sequence_of_row(p, row, lane);
  const int start = tile::sequence_start(p.cu_seqlens_q, sequence, p.total_new);
  const int end = tile::sequence_start(p.cu_seqlens_q, sequence + 1, p.total_new);
  if (row < start || row >= end) return {-1, 0};
  return {sequence, row - start};
}

// One row of a head: what is read and written, and how it is rotated.
struct Row {
  const void* from;
  void* to;
  std::int64_t columns;
  DType dtype;  // of `to`
  float scale;  // of 8 bits
  const void *cos, *sin;
  std::int64_t half;  // pairs of columns that are rotated
};

template <typename T, int kWidth>
__device__ __forceinline__ void load_table(const AppendParams& p, const void* table,
                                           std::int64_t column, float (&to)[kWidth]) {
  if (p.rotary_cos.dtype == DType::kFloat32) {
    tile::load(to, static_cast<const float*>(table) + column);
  } else {
    tile::load(to, static_cast<const T*>(table) + column);
  }
}

template <typename T, int kWidth>
__device__ __forceinline__ void store_numbers(const Row& row, bool in_8_bits, std::int64_t column,
                                              const float (&x)[kWidth]) {
  if (!in_8_bits) return tile::store(static_cast<T*>(row.to) + column, x);
  tile::Vec<std::uint8_t, kWidth> bytes;
#pragma unroll
  for (int i = 0; i < kWidth; ++i) bytes.x[i] = to_8_bits(x[i], row.scale, row.dtype);
  *reinterpret_cast<tile::Vec<std::uint8_t, kWidth>*>(static_cast<std::uint8_t*>(row.to) + column) =
      bytes;
}

template <typename T, int kWidth>
__device__ __forceinline__ void write_row(const AppendParams& p, const Row& row, int lane) {
  const T* const from = static_cast<const T*>(row.from);
  const bool in_8_bits = row.dtype == DType::kInt8 || row.dtype == DType::kFloat8E4M3;
  constexpr int kStep = kLanes * kWidth;
  for (std::int64_t j = lane * kWidth; j < row.half; j += kStep) {
    // Two chunks: neighbours that hold whole pairs, or one of first and one of second columns.
    const std::int64_t at = p.rotary_interleaved ? 2 * j : j;
    const std::int64_t next = p.rotary_interleaved ? at + kWidth : at + row.half;
    float x[kWidth], y[kWidth], cos[kWidth], sin[kWidth];
    tile::load(x, from + at);
    tile::load(y, from + next);
    load_table<T>(p, row.cos, j, cos);
    load_table<T>(p, row.sin, j, sin);
    if (p.rotary_interleaved) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        // Number n of both chunks, in which pair i is 2i and 2i + 1.
        const auto number = [&](int n) -> float& { return n < kWidth ? x[n] : y[n - kWidth]; };
        rotate_pair(cos[i], sin[i], &number(2 * i), &number(2 * i + 1));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) rotate_pair(cos[i], sin[i], &x[i], &y[i]);
    }
    store_numbers<T>(row, in_8_bits, at, x);
    store_numbers<T>(row, in_8_bits, next, y);
  }
  for (std::int64_t c = 2 * row.half + lane * kWidth; c < row.columns; c += kStep) {
    if (in_8_bits) {
      float x[kWidth];
      tile::load(x, from + c);
      store_numbers<T>(row, in_8_bits, c, x);
    } else {  // the same bits, of NaN too
      using Chunk = tile::Vec<T, kWidth>;
      *reinterpret_cast<Chunk*>(static_cast<T*>(row.to) + c) =
          *reinterpret_cast<const Chunk*>(from + c);
    }
  }
}

// The address of a head's row in a new tensor of `T`: row n of all, or row `at`.
template <typename T, typename View>
__device__ __forceinline__ auto* row_of(const AppendParams& p, const View& x, unsigned n,
                                        const NewRow& at, std::int64_t head) {
  const std::int64_t row =
      p.cu_seqlens_q ? n * x.row_stride : at.sequence * x.batch_stride + at.index * x.row_stride;
  return static_cast<T*>(x.data) + row + head * x.head_stride;
}

// Row `index` of a token's; false: there is nothing to write. Reads what lies on the device.
template <typename T>
__device__ __forceinline__ bool row_at(const AppendParams& p, unsigned n, const NewRow& at,
                                       std::int64_t index, Row* row) {
  const bool of_q = index >= 2 * p.num_heads_kv, of_v = !of_q && index >= p.num_heads_kv;
  const std::int64_t head = index - (of_q ? 2 : of_v ? 1 : 0) * p.num_heads_kv;
  const bool rotates = p.rotary_cos.data;
  const std::int64_t position = !p.slots || rotates ? position_of(p, at) : 0;
  const bool at_first = of_q && p.q_fixed_position;
  const std::int64_t rotary =
      rotates
          ? rotary_position(p, at.sequence, at_first ? position_of(p, {at.sequence, 0}) : position)
          : 0;
  if (rotary < 0) return false;
  row->columns = of_v ? p.head_dim_v : p.head_dim;
  row->half = rotates && !of_v ? p.rotary_dim / 2 : 0;
  if (row->half > 0) {
    const std::int64_t element_bytes = p.rotary_cos.dtype == DType::kFloat32 ? 4 : sizeof(T);
    row->cos = static_cast<const char*>(p.rotary_cos.data) +
               rotary * p.rotary_cos.row_stride * element_bytes;
    row->sin = static_cast<const char*>(p.rotary_sin.data) +
               rotary * p.rotary_sin.row_stride * element_bytes;
  }
  if (of_q) {
    row->from = row_of<const T>(p, p.q, n, at, head);
    row->to = row_of<T>(p, p.q_out, n, at, head);
    row->dtype = p.q.dtype;
    return true;
  }
  const CacheRow to =
      p.slots ? cache_row_of_slot(p, slot_of(p, n)) : cache_row_at(p, at.sequence, position);
  if (to.entry < 0) return false;
  const MutableTensorView& cache = of_v ? p.v_cache : p.k_cache;
  const BasicTensorView<const float>& scale = of_v ? p.v_descale : p.k_descale;
  row->from = row_of<const T>(p, of_v ? p.v : p.k, n, at, head);
  row->dtype = cache.dtype;
  const std::int64_t offset =
      to.entry * cache.batch_stride + to.row * cache.row_stride + head * cache.head_stride;
  row->to = static_cast<char*>(cache.data) + offset * (scale.data ? 1 : sizeof(T));
  if (scale.data)
    row->scale = scale.data[at.sequence * scale.batch_stride + head * scale.head_stride];
  return true;
}

template <typename T>
__global__ void __launch_bounds__(kNumThreads)
    kernel(const __grid_constant__ AppendParams params, const __grid_constant__ Shape shape) {
  ptx::wait_for_grids_ahead();
  ptx::let_next_grid_start();
  const unsigned n = blockIdx.x / shape.parts, part = blockIdx.x - n * shape.parts;
  const NewRow at = new_row(params, n, static_cast<int>(threadIdx.x % 32));
  if (at.sequence < 0) return;
  const std::int64_t index =
      std::int64_t{part} * kRowsPerBlock + static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t keys = params.num_heads_kv;
  if (index >= 2 * keys + (params.q.data ? params.num_heads : 0)) return;
  Row row{};
  if (!row_at<T>(params, n, at, index, &row)) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const bool wide = index < keys ? shape.wide_k : index < 2 * keys ? shape.wide_v : shape.wide_q;
  if (wide) return write_row<T, wide_access(sizeof(T))>(params, row, lane);
  write_row<T, 1>(params, row, lane);
}

}  // namespace dlattn::append::token_rows
