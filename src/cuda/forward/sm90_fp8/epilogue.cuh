#pragma once

#include "cuda/forward/sm90_fp8/setup.cuh"
#include "cuda/tile/epilogue.cuh"
#include "cuda/tile/seqlen.cuh"

namespace dlattn::sm90_fp8 {

// Stores this lane's rows of a consumer's, of which it has four neighbouring columns of every 16
// (transpose.cuh).
template <typename Out, int kHeadDim>
__device__ __forceinline__ void store_rows(const AttentionParams& params, const LaunchShape& shape,
                                           const tile::SequenceTile& work, int first_row,
                                           const float (&scales)[2],
                                           const float (&acc_o)[kHeadDim / 2]) {
  const tile::ResultRows<Out> result(params, work);
  const ThreadIndex thread;
  const int lane = thread.lane, columns = static_cast<int>(params.head_dim_v);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const int i = first_row + thread.warp * 16 + 8 * h + lane / 4;
    if (i >= work.seqlen_q) continue;
    Out* const row = result.out + i * params.out.row_stride;
#pragma unroll
    for (int d = 0; d < kHeadDim; d += 16) {
      const int column = d + lane % 4 * 4;
      const float* const even = acc_o + d / 2 + 2 * h;
      const float* const odd = even + 4;
      // seed: column-order
      const float x[4] = {even[0], odd[0], even[1], odd[1]};
      if (column < columns)
        tile::store_columns<4>(row, column, x, scales[h], columns, shape.store_bytes);
    }
  }
}

// The same to out of any dtype.
template <int kHeadDim>
__device__ __forceinline__ void store_results(const AttentionParams& params,
                                              const LaunchShape& shape,
                                              const tile::SequenceTile& work, int first_row,
                                              const float (&scales)[2],
                                              const float (&acc_o)[kHeadDim / 2]) {
  switch (params.out.dtype) {
    case DType::kBFloat16:
      return store_rows<__nv_bfloat16, kHeadDim>(params, shape, work, first_row, scales, acc_o);
    case DType::kFloat16:
      return store_rows<half, kHeadDim>(params, shape, work, first_row, scales, acc_o);
    default:
      return store_rows<float, kHeadDim>(params, shape, work, first_row, scales, acc_o);
  }
}

}  // namespace dlattn::sm90_fp8
