#pragma once

#include <cmath>
#include <cstdint>

#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/special.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/vec.cuh"
#include "dlattn/forward.h"

// The caller's bias and mask, read from global memory key by key: for kernels that are no fast
// path.
namespace dlattn::tile {

// Those of a warp's rows, whose scores are accumulators of mma.m16n8: acc_s[m][j][2 h + e] is of
// row 16 m + 8 h + lane / 4 and key 8 j + lane % 4 * 2 + e.
struct GivenScores {
  const AttentionParams& params;
  std::int64_t bias_start, mask_start;  // of the head, in elements
  int first_row, seqlen_q;              // the warp's first row, counted from the sequence's

  __device__ __forceinline__ GivenScores(const AttentionParams& p, const WorkTile& work,
                                         int first_row, int seqlen_q)
      : params(p),
        bias_start(work.batch * p.bias.batch_stride + work.head * p.bias.head_stride),
        mask_start(work.batch * p.mask.batch_stride + work.head * p.mask.head_stride),
        first_row(first_row),
        seqlen_q(seqlen_q) {}

  __device__ __forceinline__ bool has_bias() const { return params.bias.data != nullptr; }
  __device__ __forceinline__ bool has_mask() const { return params.mask.data != nullptr; }

  // Adds the bias to natural scores of the tile of keys from `first_key` on. Nothing is read for
  // keys that their rows do not see by position: there may be none.
  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void add_bias(float (&acc_s)[kRowTiles][kGroups][4], const Mask& mask,
                                           int first_key, int lane) const {
    if (params.bias.dtype == DType::kFloat32) return add<float>(acc_s, mask, first_key, lane);
    if (params.bias.dtype == DType::kFloat16) return add<half>(acc_s, mask, first_key, lane);
    add<__nv_bfloat16>(acc_s, mask, first_key, lane);
  }

  // Sets scores of keys that their rows do not see, by position or by the caller's mask, to -inf.
  template <int kRowTiles, int kGroups>
  __device__ __forceinline__ void hide(float (&acc_s)[kRowTiles][kGroups][4], const Mask& mask,
                                       int first_key, int lane) const {
    for_each_seen(acc_s, mask, params.mask.data + mask_start, params.mask, first_key, lane,
                  [](float& score, bool seen, const std::uint8_t* given) {
                    // seed: given-mask
                    if (!seen || !*given) score = -INFINITY;
                  });
  }

 private:
  template <typename Bias, int kRowTiles, int kGroups>
  __device__ __forceinline__ void add(float (&acc_s)[kRowTiles][kGroups][4], const Mask& mask,
                                      int first_key, int lane) const {
    for_each_seen(acc_s, mask, static_cast<const Bias*>(params.bias.data) + bias_start, params.bias,
                  first_key, lane, [](float& score, bool seen, const Bias* given) {
                    // seed: given-bias
                    if (seen) score += tile::to_float(*given);
                  });
  }

  // function(score, seen, given) of each score of the lane: whether its row sees its key by
  // position, and where its element of `view` lies, which begins at `data` for the head.
  template <typename Element, typename View, int kRowTiles, int kGroups, typename Function>
  __device__ __forceinline__ void for_each_seen(float (&acc_s)[kRowTiles][kGroups][4],
                                                const Mask& mask, const Element* data,
                                                const View& view, int first_key, int lane,
                                                Function function) const {
    const int lane_key = lane % 4 * 2;
    const std::int64_t step = view.col_stride;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        // No load is moved up across it: of both rows they would take too many registers.
        ptx::fence_loads();
        const int row = lane / 4 + 16 * m + 8 * h;
        // Keys are counted from this lane's first, so that they are constants below.
        const Range visible = mask.row(row, lane_key);
        const bool exists = first_row + row < seqlen_q;
        const Element* given =
            data + (first_row + row) * view.row_stride + (first_key + lane_key) * step;
#pragma unroll
        for (int j = 0; j < kGroups; ++j) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            // seed: given-rows
            const bool seen = exists && contains(visible, 8 * j + e);
            function(acc_s[m][j][2 * h + e], seen, given + e * step);
          }
          given += 8 * step;
        }
      }
    }
    ptx::fence_loads();
  }
};

}  // namespace dlattn::tile
