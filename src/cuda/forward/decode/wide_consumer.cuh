#pragma once

#include "cuda/forward/decode/wide_producer.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/mma/plain_softmax.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/score.cuh"

namespace dlattn::decode {

// The columns of one of the four warps that share rows: in each segment of 64 columns of a row 16,
// so that where they lie differs from warp to warp by one XOR.
namespace warp_columns {
constexpr int kSegmentBytes = 128;
constexpr int kKeyBlocks = kWideTile / 64;  // blocks of 16 columns of a row of Q and K
constexpr int kValueBlocks = kWideValues / 64;

// The first column of the warp's i-th block.
__device__ __forceinline__ int column(int warp, int i) {
  return i * 64 + warp * 16;
}
// From a lane's address of columns 0 .. 15 to that of the warp's first block.
__device__ __forceinline__ ptx::SmemAddress first(ptx::SmemAddress address, int warp) {
  return address ^ (warp * 32);
}
}  // namespace warp_columns

// 16 rows in one of the warps that share them: Q and the unnormalised output in its columns. All of
// these warps have the same softmax, to the last bit. Apart from the consumer, so that nvcc splits
// it into registers.
struct WideRows {
  float acc_o[warp_columns::kValueBlocks][2][4] = {};
  std::uint32_t rQ[warp_columns::kKeyBlocks][4];
  tile::OnlineSoftmax softmax[2];  // of rows lane / 4 and lane / 4 + 8; row_sum: this lane's part
};

// A warp's way through a segment.
template <typename T, int kVariant>
struct WideConsumer {
  using Producer = WideProducer<T, kVariant>;
  static constexpr Shape kShape = Producer::kShape;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kSlice = Producer::kSlice;
  static constexpr int kColumnWarps = kShape.column_warps;
  static constexpr int kGroups = kSlice / 8;
  using Rows = WideRows;
  using Scores = float[1][kGroups][4];
  using Part = tile::Vec<float, 4>[kGroups][32];  // of scores, as accumulators lie in a warp
  static_assert(kSlice == 16 && kColumnWarps == 4);

  const AttentionParams& params;
  const DecodeShape& shape;
  const Segment& segment;
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const int column_warp = static_cast<int>(threadIdx.x) / 32 % kColumnWarps;
  const int row_group = static_cast<int>(threadIdx.x) / 32 / kColumnWarps;
  const int num_rows;   // of the KV head
  const int m0;         // the block's first
  const int first_row;  // the warp's
  const KeyMask mask;

  __device__ __forceinline__ WideConsumer(const AttentionParams& params, const DecodeShape& shape,
                                          const Segment& segment, const Lengths& lengths)
      : params(params),
        shape(shape),
        segment(segment),
        num_rows(lengths.rows(shape)),
        m0(segment.row_block * kBlockM),
        first_row(m0 + row_group * 16),
        mask(lengths.mask(params, shape)) {}

  __device__ __forceinline__ void run() const {
    Rows rows;
    const Producer producer(params, shape, segment,
                            mask.any_row(m0, min(m0 + kBlockM, num_rows) - 1));
    const bool latent = shape.latent, has_rows = first_row < num_rows;
    const int stage_bytes = latent ? Producer::kMap.tensor : 2 * Producer::kMap.tensor;
    const int stages = Producer::kRingBytes / stage_bytes;
    int pages[kShape.stages];
#pragma unroll
    for (int i = 0; i < kShape.stages; ++i) pages[i] = producer.page(i);
#pragma unroll
    for (int i = 0; i < kShape.stages - 1; ++i) {
      if (i < stages - 1) producer.start(i, i * stage_bytes, pages[i]);
    }
    int next_page = latent ? pages[kShape.stages - 1] : pages[kShape.stages / 2 - 1];
    if (has_rows) load_queries(rows);
    int stage = 0;
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i) {
      if (latent) {
        ptx::cp_async_wait<kShape.stages - 2>();
      } else {
        ptx::cp_async_wait<0>();  // there are two stages
      }
      __syncthreads();  // all have the slice, and are done with the one before
      const int last = stage == 0 ? Producer::kRingBytes - stage_bytes : stage - stage_bytes;
      producer.start(i + stages - 1, last, next_page);
      next_page = producer.page(i + stages);
      if (has_rows) {
        attend(rows, producer.key(i), producer.stages + stage,
               producer.stages + stage + (latent ? 0 : Producer::kMap.tensor));
      }
      stage = stage == Producer::kRingBytes - stage_bytes ? 0 : stage + stage_bytes;
    }
    if (has_rows) store(rows);
    __syncthreads();  // the next segment's copies come to the stages
  }

 private:
  // Q straight to the lanes that multiply it: few rows are read once.
  __device__ __forceinline__ void load_queries(Rows& rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h + lane_idx / 4;
      const T* const q = query_row<T>(params, shape, segment.sequence, segment.head_kv, mask,
                                      min(row, num_rows - 1));
#pragma unroll
      for (int i = 0; i < warp_columns::kKeyBlocks; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = warp_columns::column(column_warp, i) + half * 8 + lane_idx % 4 * 2;
          rows.rQ[i][2 * half + h] = column < params.head_dim && row < num_rows
                                         ? *reinterpret_cast<const std::uint32_t*>(q + column)
                                         : 0;
        }
      }
    }
  }

  // Updates the rows with the keys from n0 on.
  __device__ __forceinline__ void attend(Rows& rows, int n0, ptx::SmemAddress keys,
                                         ptx::SmemAddress values) const {
    // S = Q K^T, of which each warp has what its columns give.
    leave_scores(rows, keys);
    row_barrier();
    float scale = shape.scale_log2;
    if (is_modified()) {
      scale = tile::kLog2e;
      modify(n0);
      row_barrier();
    }
    Scores acc_s;
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc_s[0][j][e] = 0.0f;
      for_each_part([&](Part& part) {
        float x[4];
        tile::load(x, part[j][lane_idx].x);
#pragma unroll
        for (int e = 0; e < 4; ++e) acc_s[0][j][e] += x[e];
      });
    }
    const int last_row = min(first_row + 15, num_rows - 1);
    if (!tile::contains_all(mask.every_row(first_row, last_row), n0, kSlice))
      tile::mma::apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    // P = exp(S - row max)
    float factors[2];
#pragma unroll
    for (int h = 0; h < 2; ++h)
      factors[h] = tile::mma::make_probabilities(rows.softmax[h], acc_s[0], h, scale);
    if (__any_sync(tile::kFullMask, factors[0] != 1.0f || factors[1] != 1.0f))
      scale_output(rows, factors);
    std::uint32_t rP[1][1][4];
    tile::mma::SpeculativeSoftmax<1>::pack<T, 0, kSlice>(acc_s, rP);
    // O += P V
    const ptx::SmemAddress sV =
        warp_columns::first(values + tile::mma::lane_offset_down<kWideTile>(lane_idx), column_warp);
#pragma unroll
    for (int i = 0; i < warp_columns::kValueBlocks; ++i) {
      std::uint32_t rV[4];
      ptx::ldmatrix_x4_trans(rV, sV + i * warp_columns::kSegmentBytes);
      ptx::mma_m16n8k16<T>(rows.acc_o[i][0], rP[0][0], rV[0], rV[1]);
      ptx::mma_m16n8k16<T>(rows.acc_o[i][1], rP[0][0], rV[2], rV[3]);
    }
  }

  // Leaves the scores that this warp's columns give in shared memory. Products that follow each
  // other have two sets of accumulators, so that they wait for each other half as long.
  __device__ __forceinline__ void leave_scores(const Rows& rows, ptx::SmemAddress keys) const {
    const ptx::SmemAddress sK =
        warp_columns::first(keys + tile::mma::lane_offset_across<kWideTile>(lane_idx), column_warp);
    float acc[2][kGroups][4] = {};
#pragma unroll
    for (int i = 0; i < warp_columns::kKeyBlocks; ++i) {
      std::uint32_t rK[4];
      ptx::ldmatrix_x4(rK, sK + i * warp_columns::kSegmentBytes);
      ptx::mma_m16n8k16<T>(acc[i % 2][0], rows.rQ[i], rK[0], rK[1]);
      ptx::mma_m16n8k16<T>(acc[i % 2][1], rows.rQ[i], rK[2], rK[3]);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) acc[0][j][e] += acc[1][j][e];
      tile::store(part_of_warp(column_warp)[j][lane_idx].x, acc[0][j]);
    }
  }

  __device__ __forceinline__ bool is_modified() const {
    return shape.softcap != 0.0f || params.alibi_slopes.data || params.mask.data;
  }

  // Softcap, ALiBi and the caller's mask, in shared memory: each warp of a row group does some
  // elements, of which the first part becomes the score and the others 0. The scores are natural
  // then.
  __device__ __forceinline__ void modify(int n0) const {
    constexpr int kOfWarp = kGroups * 4 / kColumnWarps;
    const int heads = static_cast<int>(shape.packed_heads.divisor());
#pragma unroll 1
    for (int i = column_warp * kOfWarp; i < (column_warp + 1) * kOfWarp; ++i) {
      const int j = i / 4, e = i % 4;
      const int row = min(first_row + 8 * (e / 2) + lane_idx / 4, num_rows - 1);
      const int query = mask.query(row), key = n0 + 8 * j + lane_idx % 4 * 2 + e % 2;
      const int head = segment.head_kv * heads + row - query * heads;
      float x = 0.0f;
      for_each_part([&](Part& part) {
        x += part[j][lane_idx].x[e];
        part[j][lane_idx].x[e] = 0.0f;
      });
      x *= shape.softmax_scale;
      if (shape.softcap != 0.0f) x = shape.softcap * tile::tanh(x * shape.inverse_softcap);
      if (params.alibi_slopes.data) {
        const float slope = tile::alibi_slope(params, tile::WorkTile{0, head, segment.sequence});
        const int distance = mask.position(query) - key;
        x = __fadd_rn(x, -alibi_penalty(slope, static_cast<float>(distance)));
      }
      if (params.mask.data) {
        const std::uint8_t* const visible =
            params.mask.data + segment.sequence * params.mask.batch_stride +
            head * params.mask.head_stride + query * params.mask.row_stride;
        if (key >= mask.seqlen_k || !visible[key * params.mask.col_stride]) x = -INFINITY;
      }
      part_of_warp(0)[j][lane_idx].x[e] = x;
    }
  }

  __device__ __forceinline__ void scale_output(Rows& rows, const float (&factors)[2]) const {
#pragma unroll
    for (int i = 0; i < warp_columns::kValueBlocks; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) rows.acc_o[i][e / 4][e % 4] *= factors[e / 2 % 2];
    }
  }

  // Stores the rows' results, or where they are of some keys alone, leaves them in the workspace,
  // relative to row maxima in base 2.
  __device__ __forceinline__ void store(Rows& rows) const {
    const float scale = is_modified() ? tile::kLog2e : shape.scale_log2;
    const int heads = static_cast<int>(shape.packed_heads.divisor());
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      tile::OnlineSoftmax& softmax = rows.softmax[h];
      softmax.row_sum = tile::reduce_sum<4>(softmax.row_sum);
      const int row_of_block = row_group * 16 + 8 * h + lane_idx / 4, row = m0 + row_of_block;
      if (row >= num_rows) continue;
      const bool is_first = column_warp == 0 && lane_idx % 4 == 0;
      if (segment.is_complete()) {
        const int query = mask.query(row);
        const ResultRow<T> to(params, segment.sequence,
                              segment.head_kv * heads + row - query * heads, query);
        const tile::RowResult result = softmax.finalize(scale, to.sink);
        if (to.lse && is_first) *to.lse = result.lse;
        for_each_pair(rows, h, [&](int column, float low, float high) {
          store_pair(to.out, column, tile::scaled(low, result.scale),
                     tile::scaled(high, result.scale), static_cast<int>(params.head_dim_v),
                     shape.store_bytes);
        });
      } else {
        const std::int64_t at = std::int64_t{segment.part} * kBlockM + row_of_block;
        const float row_max = softmax.row_max * scale, factor = unrounded(softmax.row_max, scale);
        if (is_first)
          static_cast<PartStats*>(shape.stats)[at] = {row_max, softmax.row_sum * factor};
        for_each_pair(rows, h, [&](int column, float low, float high) {
          const float pair[2] = {low * factor, high * factor};
          tile::store(shape.outs + at * kWideValues + column, pair);
        });
      }
    }
  }
  // Calls store_pair(column, low, high) for each two neighbouring columns of row h that this lane
  // has.
  template <typename Function>
  __device__ __forceinline__ void for_each_pair(const Rows& rows, int h,
                                                Function store_pair) const {
#pragma unroll
    for (int i = 0; i < warp_columns::kValueBlocks; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        store_pair(warp_columns::column(column_warp, i) + half * 8 + lane_idx % 4 * 2,
                   rows.acc_o[i][half][2 * h], rows.acc_o[i][half][2 * h + 1]);
      }
    }
  }

  // That of the warps that share rows.
  __device__ __forceinline__ void row_barrier() const {
    ptx::barrier_sync(1 + row_group, kColumnWarps * 32);
  }
  __device__ __forceinline__ Part& part_of_warp(int warp) const {
    return reinterpret_cast<Part*>(ptx::dynamic_smem() +
                                   Producer::kMap.parts)[row_group * kColumnWarps + warp];
  }
  // In one order, so that sums are the same in all warps.
  template <typename Function>
  __device__ __forceinline__ void for_each_part(Function function) const {
#pragma unroll
    for (int warp = 0; warp < kColumnWarps; ++warp) function(part_of_warp(warp));
  }
};

}  // namespace dlattn::decode
