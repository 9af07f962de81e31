#pragma once

#include "cuda/forward/sm90_fp8/setup.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

// The scales of quantised 16-bit inputs: of a consumer's rows of q, and of each tile of k and v.
namespace dlattn::sm90_fp8 {

// Those of the tile of keys that is walked next, and of the tile of values that is added next.
struct LoadedScales {
  float keys, values;
};

// The factors of 8-bit inputs, which have descales for all of a head.
template <bool kScaled, bool kGiven>
struct TileScales {
  __device__ __forceinline__ static LoadedScales load(int /*keys*/, int /*values*/) { return {}; }
  __device__ __forceinline__ static void set(const LoadedScales&) {}
  __device__ __forceinline__ static float add(float sum, float product) { return sum + product; }
};

// Those of one work tile.
template <bool kGiven>
struct TileScales<true, kGiven> {
  const float* k = nullptr;  // of the sequence's tiles; null with kGiven if inputs have 8 bits
  std::int64_t k_to_v = 0;   // from there to v's
  float of_queries = 1.0f;   // of scores to base 2, but for k's
  float of_keys = 1.0f;      // of the tile that is walked next
  float of_values = 1.0f;    // of the product with V that is added next

  TileScales() = default;
  __device__ __forceinline__ TileScales(const AttentionParams& params, const LaunchShape& shape,
                                        const BlockScales& scales, const tile::SequenceTile& work,
                                        int first_row, int block_n) {
    const QuantizedQueries& queries = scales.queries;
    const QuantizedView& keys = scales.keys;
    const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
    constexpr int kBlockM = query_block(Precision::kFp8);
    // The last consumers' rows may all be beyond q, and their scale beyond the buffer.
    std::int64_t first_q = min(first_row, work.seqlen_q - 1) / kBlockM, first_k = 0;
    if (params.cu_seqlens_q) {
      first_q += first_block(work.start_q, work.batch, kBlockM);
      first_k = first_block(tile::key_rows(params, work.batch).start, work.batch, block_n);
    }
    k = keys.k_scale + work.batch * keys.scale_batch_stride + head_kv * keys.scale_head_stride +
        first_k;
    k_to_v = keys.v_scale - keys.k_scale;
    const float q = queries.scale[work.batch * queries.scale_batch_stride +
                                  work.head * queries.scale_head_stride + first_q];
    // Products of rotated rows are those of the rows, divided by the columns.
    of_queries = q * (shape.scale_log2 * static_cast<float>(params.head_dim));
  }

  // They are loaded at the begin of a step and set at its end: what becomes of a load in between,
  // products would wait for. There may be no such tile of keys.
  __device__ __forceinline__ LoadedScales load(int keys, int values) const {
    if (kGiven && !k) return {1.0f, 1.0f};
    LoadedScales loaded;
    // seed: scores-scale
    loaded.keys = k[max(keys, 0)];
    // seed: values-scale
    loaded.values = k[k_to_v + values];
    return loaded;
  }
  __device__ __forceinline__ void set(const LoadedScales& loaded) {
    of_keys = loaded.keys;
    of_values = loaded.values;
  }
  __device__ __forceinline__ float of_scores() const { return of_queries * of_keys; }
  __device__ __forceinline__ float add(float sum, float product) const {
    return fmaf(product, of_values, sum);
  }
};

// softmax_scale * q.shift of row `i` of a work tile, `shift` being what k was stored without: by
// the four lanes that share the row.
__device__ __forceinline__ float shift_of_row(const AttentionParams& params,
                                              const LaunchShape& shape, const BlockScales& scales,
                                              const tile::SequenceTile& work, int i) {
  const TensorView& q = scales.inputs_q;
  const QuantizedView& keys = scales.keys;
  const int head_kv = static_cast<int>(shape.heads_per_kv_head.quotient(work.head));
  const float* const shift =
      keys.k_shift + work.batch * keys.shift_batch_stride + head_kv * keys.shift_head_stride;
  const std::int64_t at = (params.cu_seqlens_q ? 0 : work.batch * q.batch_stride) +
                          (work.start_q + static_cast<std::int64_t>(i)) * q.row_stride +
                          work.head * q.head_stride;
  const int columns = i < work.seqlen_q ? static_cast<int>(scales.head_dim) : 0;
  float sum = 0.0f;
#pragma unroll 1
  for (int c = static_cast<int>(threadIdx.x) % 4; c < columns; c += 4) {
    const float x = q.dtype == DType::kFloat16
                        ? tile::to_float(static_cast<const half*>(q.data)[at + c])
                        : tile::to_float(static_cast<const __nv_bfloat16*>(q.data)[at + c]);
    sum = fmaf(x, shift[c], sum);
  }
  return tile::reduce_sum<4>(sum) * shape.softmax_scale;
}

}  // namespace dlattn::sm90_fp8
