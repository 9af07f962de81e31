#pragma once

// dbias, without a sum in global memory: a block owns a tile of it, of as many queries and keys as
// a step of queries.cuh, and goes over the batch entries, heads, queries and keys that it is the
// sum over. S and dP are computed again; dS is added up in registers, and at the end in shared
// memory over the queries or keys of the tile that dbias has one number for. Shared memory:
// QuerySmem, then the sums, in fp32. Barriers: the block's, three times a tile of scores: when dO
// and V are in, when Q and K are and dO and V have been read, and when Q and K have been.

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

  // A tile of scores that the block goes over. Keys come first, then queries, heads and batch
  // entries; not all of them need exist.
  struct Place {
    int batch, head, m, n;
  };
  __device__ __forceinline__ static tile::Range tiles(bool per_tile, int own, std::int64_t seqlen,
                                                      int rows) {
    if (per_tile) return {own, own + 1};
    return {0, (static_cast<int>(seqlen) + rows - 1) / rows};
  }
  __device__ __forceinline__ tile::Range batches() const {
    return summed(batch, shape.bias.batches, static_cast<int>(params.forward.batch_size));
  }
  __device__ __forceinline__ tile::Range heads() const {
    return summed(head, shape.bias.heads, static_cast<int>(params.forward.num_heads));
  }
  __device__ __forceinline__ tile::Range queries() const {
    return tiles(shape.bias.per_query, query_tile, params.forward.seqlen_q, kBlockM);
  }
  __device__ __forceinline__ tile::Range keys() const {
    return tiles(shape.bias.per_key, key_tile, params.forward.seqlen_k, kBlockN);
  }
  // Whether a query of the tile sees one of its keys.
  __device__ __forceinline__ bool is_seen(const Place& at) const {
    const SequenceOf seq(params.forward, at.batch);
    const int first = at.m * kBlockM, last = min(first + kBlockM, seq.seqlen_q) - 1;
    if (first > last) return false;
    const tile::Range seen = tile::Mask(shape, seq.shift, seq.seqlen_k).any_row(first, last);
    return seen.end > at.n * kBlockN && seen.begin < at.n * kBlockN + kBlockN;
  }

  // Goes on to the next tile that is seen; false if there is none.
  __device__ __forceinline__ bool advance(Place* at) const {
    do {
      if (++at->n < keys().end) continue;
      at->n = keys().begin;
      if (++at->m < queries().end) continue;
      at->m = queries().begin;
      if (++at->head < heads().end) continue;
      at->head = heads().begin;
      if (++at->batch >= batches().end) return false;
    } while (!is_seen(*at));
    return true;
  }

  // Calls use(block, n) with what computes a tile.
  template <typename Use>
  __device__ __forceinline__ void with_tile(const Place& at, Use use) const {
    const SequenceOf seq(params.forward, at.batch);
    use(Queries(params, shape, seq, {at.m, at.head, at.batch}), at.n);
  }
  __device__ __forceinline__ void copy_values(const Place& at) const {
    with_tile(at, [](const Queries& block, int n) { block.copy_dout(), block.copy_v(n); });
  }
  __device__ __forceinline__ void copy_keys(const Place& at) const {
    with_tile(at, [](const Queries& block, int n) { block.copy_q(), block.copy_k(n); });
  }

  // dO and V of the next tile are copied while S is computed and its gradients, Q and K while the
  // gradients are and the next dP.
  __device__ __forceinline__ void run() {
    Place at = {batches().begin, heads().begin, queries().begin, keys().begin - 1};
    bool more = advance(&at);
    if (more) copy_values(at), copy_keys(at);
#pragma unroll 1
    while (more) {
      Place next = at;
      more = advance(&next);
      with_tile(at, [&](const Queries& block, int n) {
        typename Queries::Scores dp, s;
        ptx::cp_async_wait<1>();
        __syncthreads();  // dO and V are in
        block.multiply(dp, Queries::kMap.dout, Queries::kMap.v);
        ptx::cp_async_wait<0>();
        __syncthreads();  // Q and K are in, and all have read dO and V
        if (more) copy_values(next);
        block.multiply(s, Queries::kMap.q, Queries::kMap.k);
        __syncthreads();  // all have read Q and K
        if (more) copy_keys(next);
        block.template gradients<false>(n, s, dp);
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) sum[j][e] += s[0][j][e];
        }
      });
      at = next;
    }
    store();
  }

  // The tile's numbers by way of shared memory, in which all of them are: all warps have read Q and
  // dO by the last barrier before.
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
