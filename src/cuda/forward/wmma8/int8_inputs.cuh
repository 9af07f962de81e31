#pragma once

#include <cstdint>

#include "core/problem/quantized.h"
#include "cuda/forward/wmma8/int8_rows.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma8 {

// q of 16 bits, which becomes 8-bit integers on its way to registers; k and v as quantize_kv()
// wrote them, whose rows are a head_dim tile long.
template <int kTile, bool kGeneralKernel, Precision kPrecision>
struct Int8Inputs {
  static constexpr int kHeadDim = kTile;
  static constexpr bool kGeneral = kGeneralKernel;
  static constexpr int kValueBytes = value_bytes(kPrecision);
  static constexpr bool kUnaligned = false;
  static constexpr bool kCopiesQuery = false;   // it goes to registers at once
  static constexpr bool kWholeColumns = false;  // head_dim is any
  static constexpr bool kFloat32Out = false;    // out is as q
  using Rows = Int8Rows<kHeadDim, kGeneral, kPrecision>;
  using Scores = Int8Scores<kGeneral, Rows::kTilesOfScale>;
  using Sequence = tile::Sequence<std::uint16_t>;

  const AttentionParams& params;
  const LaunchShape& shape;
  const QuantizedView& view;

  __device__ __forceinline__ static std::int64_t row_stride(const TensorView&) { return kHeadDim; }
  __device__ __forceinline__ static std::int64_t columns(std::int64_t) { return kHeadDim; }

  // Where a tile of keys begins. v's numbers lie as k's do: no registers keep where.
  struct KeyTile {
    const std::uint8_t* k;
  };
  __device__ __forceinline__ KeyTile key_tile(const tile::WorkTile& work, const Sequence&,
                                              int n0) const {
    const std::int64_t head = work.batch * view.batch_stride + head_kv(work) * view.head_stride;
    const int start = params.cu_seqlens_k ? tile::key_rows(params, work.batch).start : 0;
    return {view.k + head + std::int64_t{start + n0} * kHeadDim};
  }
  __device__ __forceinline__ static const std::uint8_t* k(const KeyTile& tile) { return tile.k; }
  __device__ __forceinline__ const std::uint8_t* v(const KeyTile& tile) const {
    return view.v + (tile.k - view.k) * kValueBytes;
  }
  template <int kRows>
  __device__ __forceinline__ static void step_back(KeyTile* tile) {
    tile->k -= kRows * kHeadDim;
  }

  __device__ __forceinline__ Scores scores(const tile::WorkTile& work, int last_tile) const {
    const std::int64_t sequence =
        params.cu_seqlens_k
            ? first_block(tile::key_rows(params, work.batch).start, work.batch, Rows::kScaledKeys)
            : work.batch * view.scale_batch_stride;
    return {GivenRowsOf<kGeneral>(params, shape), view,
            kGeneral ? shape.softmax_scale : shape.scale_log2,
            static_cast<unsigned>(head_kv(work) * view.scale_head_stride + sequence +
                                  (Rows::kTilesOfScale == 1 ? last_tile : 0))};
  }

  __device__ __forceinline__ QueryRows queries(const Sequence& seq) const {
    return {seq.q, params.q.row_stride, static_cast<int>(params.head_dim),
            params.q.dtype == DType::kFloat16, shape.copy_bytes >= 8};
  }

  // lse and the sink's share are those of k as it was before its mean was taken from it.
  __device__ __forceinline__ auto results(const tile::WorkTile& work, const Sequence& seq,
                                          const Scores& scores) const {
    const float* const shift = view.k_shift + work.batch * view.shift_batch_stride +
                               head_kv(work) * view.shift_head_stride;
    const bool wants_lse = params.lse.data || params.sinks.data;
    return [rows = queries(seq), shift, wants_lse, &scores](TileSoftmax<kGeneral>& softmax, int row,
                                                            bool exists, bool sees_any,
                                                            const float* sink) {
      // seed: tile-row-sum
      softmax.row_sum = tile::reduce_sum<4>(softmax.row_sum);
      // A row that sees nothing has nothing of a scale that is NaN.
      if (!sees_any) softmax = {};
      float top = softmax.finite_max();
      if (wants_lse) {
        const float product = product_with_shift(rows, row, exists, shift);
        // seed: shift
        if (softmax.row_max != -INFINITY) top += product * scores.scale;
      }
      if constexpr (kGeneral)
        return tile::finalize(tile::RowMax(top, true), tile::kLog2e, softmax.row_sum, sink);
      return tile::finalize(tile::RowMax(-top, false), 1.0f, softmax.row_sum, sink);
    };
  }

 private:
  __device__ __forceinline__ unsigned head_kv(const tile::WorkTile& work) const {
    return shape.heads_per_kv_head.quotient(work.head);
  }

  // q . k_shift of a row, by a lane quad.
  __device__ __forceinline__ static float product_with_shift(const QueryRows& rows, int row,
                                                             bool exists, const float* shift) {
    const std::uint16_t* const q = rows.data + row * rows.stride;
    float sum = 0.0f;
#pragma unroll 8
    for (int i = 0; i < kHeadDim; i += 4) {
      const int column = i + static_cast<int>(threadIdx.x) % 4;
      if (exists && column < rows.head_dim)
        sum = fmaf(QueryRows::to_float(q[column], rows.is_half), shift[column], sum);
    }
    return tile::reduce_sum<4>(sum);
  }
};

}  // namespace dlattn::wmma8
