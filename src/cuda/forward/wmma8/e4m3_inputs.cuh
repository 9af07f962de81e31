#pragma once

#include <cstdint>

#include "core/problem/descales.h"
#include "cuda/forward/wmma8/e4m3_rows.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::wmma8 {

// q, k and v of e4m3, which lie as the caller has them, with descales.
template <int kTile, bool kGeneralKernel>
struct E4m3Inputs {
  static constexpr int kHeadDim = kTile;
  static constexpr bool kGeneral = kGeneralKernel;
  static constexpr int kValueBytes = 1;
  // Rows may be aligned to less than 16 bytes.
  static constexpr bool kUnaligned = kGeneral && has_softcap(kHeadDim);
  static constexpr bool kCopiesQuery = true;   // to shared memory
  static constexpr bool kWholeColumns = true;  // head dims are multiples of 16
  static constexpr bool kFloat32Out = true;    // beside 16 bits
  using Rows = E4m3Rows<kHeadDim, kGeneral>;
  using Scores = ScoreScale<kGeneral, has_softcap(kHeadDim)>;
  using Sequence = tile::Sequence<std::uint8_t>;

  const AttentionParams& params;
  const LaunchShape& shape;

  // For the copies of k and v.
  __device__ __forceinline__ static std::int64_t row_stride(const TensorView& x) {
    return x.row_stride;
  }
  __device__ __forceinline__ static std::int64_t columns(std::int64_t head_dim) { return head_dim; }

  // Where a tile of keys begins.
  struct KeyTile {
    const std::uint8_t *k, *v;
  };
  __device__ __forceinline__ static KeyTile key_tile(const tile::WorkTile&, const Sequence& seq,
                                                     int n0) {
    return {seq.keys.k.row(n0), seq.keys.v.row(n0)};
  }
  __device__ __forceinline__ static const std::uint8_t* k(const KeyTile& tile) { return tile.k; }
  __device__ __forceinline__ static const std::uint8_t* v(const KeyTile& tile) { return tile.v; }
  template <int kRows>
  __device__ __forceinline__ void step_back(KeyTile* tile) const {
    tile->k -= kRows * params.k.row_stride;
    tile->v -= kRows * params.v.row_stride;
  }

  __device__ __forceinline__ Scores scores(const tile::WorkTile& work, int) const {
    return Scores(shape, descales(work).scores, GivenRowsOf<kGeneral>(params, shape));
  }

  __device__ __forceinline__ auto results(const tile::WorkTile& work, const Sequence&,
                                          const Scores& scores) const {
    const float v_descale = descales(work).v;
    return [&scores, v_descale](tile::OnlineSoftmax& softmax, int, bool, bool sees_any,
                                const float* sink) {
      // seed: row-sum
      softmax.row_sum = tile::reduce_sum<4>(softmax.row_sum);
      // A row that sees nothing has nothing of a scale that is NaN.
      if (!sees_any) softmax = {};
      tile::RowResult result = tile::finalize_bytes(softmax, scores.log2(), sink);
      // 0 where there is nothing to sum, whatever v's descale is.
      if (result.scale != 0.0f) result.scale *= v_descale;
      return result;
    };
  }

 private:
  __device__ __forceinline__ Descales descales(const tile::WorkTile& work) const {
    return descales_of<std::int64_t>(params, work.batch, work.head,
                                     shape.heads_per_kv_head.quotient(work.head));
  }
};

}  // namespace dlattn::wmma8
