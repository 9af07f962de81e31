#pragma once

// dbias, without a sum in global memory: a block owns a tile of it, of as many queries and keys as
// a step of queries.cuh, and goes over the batch entries, heads, queries and keys that it is the
// sum over. S and dP are computed again; dS is added up in registers, and at the end in shared
// memory over the queries or keys of the tile that dbias has one number for. Shared memory:
// QuerySmem, then the sums, in fp32. Barriers: the block's, when the four tensors' tiles are in and
// when they have been read.

#include "cuda/backward/wmma/queries.cuh"

namespace dlattn::backward_wmma {

// Items begin .. end - 1 of `size` that number `index` of dbias, of `count`, is the sum over.
__device__ __forceinline__ tile::Range summed(int index, int count, int size) {
  return count == size ? tile::Range{index, index + 1} : tile::Range{0, size};
}

template <typename T, int kHeadDim>
struct BiasBlock {
  using Queries = QueryBlock<T, kHeadDim>;
  static constexpr int kBlockM = Queries::kBlockM, kBlockN = Queries::kBlockN;
  static constexpr int kGroups = Queries::kWarpKeys / 8;
  static constexpr int kLd = kBlockN + 4;  // of the sums in shared memory
  static_assert(kBlockM * kLd * 4 <= query_smem(kHeadDim).total);

  const BackwardParams& params;
  const Shape& shape;
  int query_tile, key_tile, head, batch;  // of dbias
  float sum[kGroups][4] = {};

  __device__ __forceinline__ BiasBlock(const BackwardParams& params, const Shape& shape)
      : params(params), shape(shape) {
    const BiasGrid& grid = shape.bias;
    auto index = static_cast<int>(blockIdx.x);
    key_tile = index % grid.key_tiles, index /= grid.key_tiles;
    query_tile = index % grid.query_tiles, index /= grid.query_tiles;
    head = index % grid.heads, batch = index / grid.heads;
  }

  // Adds dS of a head of a sequence.
  __device__ __forceinline__ void add_head(const SequenceOf& seq, int b, int h) {
    const BiasGrid& grid = shape.bias;
    const tile::Range queries = grid.per_query
                                    ? tile::Range{query_tile, query_tile + 1}
                                    : tile::Range{0, (seq.seqlen_q + kBlockM - 1) / kBlockM};
    const tile::Range keys = grid.per_key ? tile::Range{key_tile, key_tile + 1}
                                          : tile::Range{0, (seq.seqlen_k + kBlockN - 1) / kBlockN};
    const tile::Mask mask(shape, seq.shift, seq.seqlen_k);
    for (int m = queries.begin; m < queries.end; ++m) {
      if (m * kBlockM >= seq.seqlen_q) break;
      const tile::Range seen =
          mask.any_row(m * kBlockM, min(m * kBlockM + kBlockM, seq.seqlen_q) - 1);
      for (int n = keys.begin; n < keys.end; ++n) {
        if (seen.end <= n * kBlockN || seen.begin >= n * kBlockN + kBlockN) continue;
        add_tile(Queries(params, shape, seq, {m, h, b}), n);
      }
    }
  }

  __device__ __forceinline__ void add_tile(const Queries& block, int n) {
    block.copy_queries();
    block.copy_v(n);
    block.copy_k(n);
    ptx::cp_async_wait<0>();
    __syncthreads();
    typename Queries::Scores dp, s;
    block.multiply(dp, Queries::kMap.dout, Queries::kMap.v);
    block.multiply(s, Queries::kMap.q, Queries::kMap.k);
    block.template gradients<false>(n, s, dp);
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] += s[0][j][e];
    }
    __syncthreads();
  }

  __device__ __forceinline__ void run() {
    const AttentionParams& p = params.forward;
    const tile::Range batches = summed(batch, shape.bias.batches, static_cast<int>(p.batch_size));
    const tile::Range heads = summed(head, shape.bias.heads, static_cast<int>(p.num_heads));
    for (int b = batches.begin; b < batches.end; ++b) {
      const SequenceOf seq(p, b);
      for (int h = heads.begin; h < heads.end; ++h) add_head(seq, b, h);
    }
    store();
  }

  // The tile's numbers by way of shared memory, in which all of them are.
  __device__ __forceinline__ void store() const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int row = warp % Queries::kRowWarps * 16 + lane / 4;
    const int column = warp / Queries::kRowWarps * Queries::kWarpKeys + lane % 4 * 2;
    float* const sums = reinterpret_cast<float*>(ptx::dynamic_smem());
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e)
        sums[(row + e / 2 * 8) * kLd + column + 8 * j + e % 2] = sum[j][e];
    }
    __syncthreads();
    const bool per_query = shape.bias.per_query, per_key = shape.bias.per_key;
    const int rows = per_query ? kBlockM : 1, columns = per_key ? kBlockN : 1;
    const int m0 = query_tile * kBlockM, n0 = key_tile * kBlockN;
    for (int i = static_cast<int>(threadIdx.x); i < rows * columns; i += kNumThreads) {
      const int m = i / columns, n = i % columns;
      if (per_query && m0 + m >= params.forward.seqlen_q) continue;
      if (per_key && n0 + n >= params.forward.seqlen_k) continue;
      float total = 0.0f;
      for (int r = per_query ? m : 0; r < (per_query ? m + 1 : kBlockM); ++r) {
        for (int c = per_key ? n : 0; c < (per_key ? n + 1 : kBlockN); ++c)
          total += sums[r * kLd + c];
      }
      store_number(m0 + m, n0 + n, total);
    }
  }

  __device__ __forceinline__ void store_number(int query, int key, float x) const {
    const MutableTensorView& view = params.dbias;
    const std::int64_t at = batch * view.batch_stride + head * view.head_stride +
                            query * view.row_stride + key * view.col_stride;
    if (view.dtype == DType::kFloat32) {
      static_cast<float*>(view.data)[at] = x;
    } else {
      static_cast<T*>(view.data)[at] = tile::from_float<T>(x);
    }
  }
};

template <typename T, int kHeadDim>
__global__ void __launch_bounds__(kNumThreads, 1)
    bias_kernel(const __grid_constant__ BackwardParams params,
                const __grid_constant__ Shape shape) {
  ptx::wait_for_grids_ahead();
  if (blockIdx.x >= shape.num_blocks) return;
  BiasBlock<T, kHeadDim>(params, shape).run();
}

}  // namespace dlattn::backward_wmma
