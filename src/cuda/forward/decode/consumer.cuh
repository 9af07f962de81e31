#pragma once

#include <cstring>

#include "cuda/forward/decode/parts.cuh"
#include "cuda/forward/decode/producer.cuh"
#include "cuda/forward/wmma/merge.cuh"
#include "cuda/forward/wmma/products.cuh"
#include "cuda/forward/wmma/softmax.cuh"
#include "cuda/forward/wmma/tiles.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/score.cuh"

namespace dlattn::decode {

// 16 rows in one group's warp: its share of the output, of the group's keys alone. Apart from the
// consumer, so that nvcc splits it into registers.
template <int kHeadDim, int kSlice>
struct WarpRows {
  using Scores = float[1][kSlice / 8][4];

  wmma::SpeculativeSoftmax<1> softmax;
  float acc_o[1][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][1][4];  // unless Q is in shared memory
};

// A warp's way through a segment.
template <typename T, int kHeadDim, int kVariant, bool kPaged, bool kGeneral>
struct Consumer {
  using Producer = decode::Producer<T, kHeadDim, kVariant, kPaged>;
  static constexpr Shape kShape = Producer::kShape;
  static constexpr SmemMap kMap = Producer::kMap;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kBlockN = Producer::kBlockN;
  static constexpr int kSlice = Producer::kSlice;
  static constexpr int kStages = kShape.stages;
  static constexpr int kGroups = kShape.key_groups;
  static constexpr int kShares = kGroups / 2;  // of the columns, when a block's parts are added up
  using Rows = WarpRows<kHeadDim, kSlice>;
  using Scores = typename Rows::Scores;

  const AttentionParams& params;
  const DecodeShape& shape;
  const Segment& segment;
  const int lane_idx = static_cast<int>(threadIdx.x) % 32;
  const int group = Producer::group();
  const int row_group = static_cast<int>(threadIdx.x) / 32 % kShape.row_groups;
  const int num_rows;   // of the KV head
  const int m0;         // the block's first
  const int first_row;  // the warp's
  const KeyMask mask;

  __device__ __forceinline__ Consumer(const AttentionParams& params, const DecodeShape& shape,
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
    if constexpr (kShape.queries_in_smem) copy_queries();
    int pages[kStages + 1];
#pragma unroll
    for (int i = 0; i <= kStages; ++i) pages[i] = producer.page(i);
#pragma unroll
    for (int i = 0; i < kStages; ++i) producer.start(i, i * Producer::kStageBytes, pages[i]);
    if constexpr (kShape.queries_in_smem) {
      ptx::cp_async_wait<kStages - 1>();
      __syncthreads();
    } else {
      load_queries(rows);
    }
    int stage = 0, next_page = pages[kStages];
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i) {
      ptx::cp_async_wait<kStages - 1>();
      group_barrier();
      attend(rows, producer.key(i), producer.stages + stage);
      group_barrier();
      // Where registers are scarce, none keeps it.
      if constexpr (kShape.queries_in_smem) next_page = producer.page(i + kStages);
      producer.start(i + kStages, stage, next_page);
      if constexpr (!kShape.queries_in_smem) next_page = producer.page(i + kStages + 1);
      stage = stage == (kStages - 1) * Producer::kStageBytes ? 0 : stage + Producer::kStageBytes;
    }
    leave_part(rows);
    add_up();
  }

 private:
  // Where a row of Q lies.
  __device__ __forceinline__ const T* query_row(int row) const {
    const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
    const int head = segment.head_kv * heads + row - query * heads;
    const T* const q = static_cast<const T*>(params.q.data) + head * params.q.head_stride;
    if (!params.cu_seqlens_q)
      return q + segment.sequence * params.q.batch_stride + query * params.q.row_stride;
    return q + (tile::query_rows(params, segment.sequence).start + query) * params.q.row_stride;
  }

  // Q straight to the lanes that multiply it: few rows are read once.
  __device__ __forceinline__ void load_queries(Rows& rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h + lane_idx / 4;
      const T* const q = query_row(min(row, num_rows - 1));
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = d + half * 8 + lane_idx % 4 * 2;
          rows.rQ[d / 16][0][2 * half + h] =
              column < params.head_dim && row < num_rows
                  ? *reinterpret_cast<const std::uint32_t*>(q + column)
                  : 0;
        }
      }
    }
  }

  // The same to shared memory, as part of the first slice's copies.
  __device__ __forceinline__ void copy_queries() const {
    constexpr int kChunks = kHeadDim / 8, kStep = num_warps(kShape) * 32 / kChunks;
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    for (int row = static_cast<int>(threadIdx.x) / kChunks; row < kBlockM; row += kStep) {
      const bool exists = m0 + row < num_rows && chunk * 8 < params.head_dim;
      ptx::cp_async<16>(queries() + tile::SwizzledRows<kHeadDim>::offset(row, chunk),
                        query_row(min(m0 + row, num_rows - 1)) + (exists ? chunk * 8 : 0), exists);
    }
  }
  __device__ __forceinline__ ptx::SmemAddress queries() const {
    return ptx::smem_address(ptx::dynamic_smem()) + kMap.q;
  }

  // Updates the rows with the keys from n0 on, whose K and V lie in a stage.
  __device__ __forceinline__ void attend(Rows& rows, int n0, ptx::SmemAddress stage) const {
    // S = Q K^T
    Scores acc_s;
    [[maybe_unused]] const ptx::SmemAddress sQ = queries() +
                                                 row_group * 16 * kHeadDim * kElementBytes +
                                                 wmma::lane_place_down<kHeadDim>(lane_idx);
    wmma::multiply_qk<T, kHeadDim, 0, kSlice>(acc_s,
                                              stage + wmma::lane_place_across<kHeadDim>(lane_idx),
                                              [&](std::uint32_t (&a)[1][4], int d) {
                                                if constexpr (kShape.queries_in_smem) {
                                                  wmma::load_q<kHeadDim>(a, sQ, d);
                                                } else {
                                                  memcpy(a, rows.rQ[d / 16], sizeof a);
                                                }
                                              });
    float scale = shape.scale_log2;
    if constexpr (kGeneral) scale = modify(acc_s, n0);
    const int last_row = max(min(first_row + 15, num_rows - 1), first_row);
    if (!tile::contains_all(mask.every_row(first_row, last_row), n0, kSlice))
      wmma::apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    // P = exp(S - row max)
    std::uint32_t rP[1][kSlice / 16][4];
    rows.softmax.template first_probabilities<T, 0, kSlice>(acc_s, scale, false, rP, rows.acc_o);
    // O += P V
    wmma::multiply_pv<T, kHeadDim, 0, kSlice>(
        rows.acc_o, rP, stage + kMap.tensor + wmma::lane_place_down<kHeadDim>(lane_idx));
  }

  // Softcap, ALiBi and the caller's mask. Returns what makes the scores base 2.
  __device__ __forceinline__ float modify(Scores& acc_s, int n0) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = min(first_row + 8 * h + lane_idx / 4, num_rows - 1);
      const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
      const int head = segment.head_kv * heads + row - query * heads;
      const float slope = tile::alibi_slope(params, tile::WorkTile{0, head, segment.sequence});
      const std::uint8_t* visible = params.mask.data;
      if (visible) {
        visible += segment.sequence * params.mask.batch_stride + head * params.mask.head_stride +
                   query * params.mask.row_stride;
      }
#pragma unroll
      for (int j = 0; j < kSlice / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = acc_s[0][j][2 * h + e];
          const int key = n0 + 8 * j + lane_idx % 4 * 2 + e;
          x *= shape.softmax_scale;
          if (shape.softcap != 0.0f) x = shape.softcap * tile::tanh(x * shape.inverse_softcap);
          if (params.alibi_slopes.data) {
            const auto distance = static_cast<float>(mask.position(query) - key);
            x = __fadd_rn(x, -alibi_penalty(slope, distance));
          }
          if (visible && (key >= mask.seqlen_k || !visible[key * params.mask.col_stride]))
            x = -INFINITY;
        }
      }
    }
    return tile::kLog2e;
  }

  // The scale of the scores as the softmax sees them.
  __device__ __forceinline__ float scale_log2() const {
    return kGeneral ? tile::kLog2e : shape.scale_log2;
  }

  __device__ __forceinline__ void group_barrier() const {
    if constexpr (kShape.row_groups == 1) {
      __syncwarp();
    } else {
      ptx::barrier_sync(1 + group, Producer::kThreads);
    }
  }

  // Leaves the group's part of the output in its stages, which are empty now, and its rows'
  // statistics behind those of all groups.
  __device__ __forceinline__ void leave_part(Rows& rows) const {
    ptx::cp_async_wait<0>();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const tile::OnlineSoftmax row = rows.softmax.scaled_row(0, h, scale_log2());
      if (lane_idx % 4 == 0)
        stats(row_group * 16 + 8 * h + lane_idx / 4)[group] = {row.row_max, row.row_sum};
    }
    rows.softmax.scale_rows(scale_log2(), rows.acc_o);
    wmma::store_part<kHeadDim>(part(group), rows.acc_o[0], lane_idx);
    __syncthreads();
  }

  // Adds up the groups' parts, in their order: of 8 rows of the row group and a share of the
  // columns. Stores the sum, or where it is a part itself, leaves it in the workspace.
  __device__ __forceinline__ void add_up() const {
    constexpr int kPairs = wmma::kPartPairs<kHeadDim> / kShares;
    const int h = group % 2, share = group / 2;
    const int row_of_block = row_group * 16 + 8 * h + lane_idx / 4, row = m0 + row_of_block;
    const PartStats* const parts_of_row = stats(row_of_block);
    float weights[kGroups];
    tile::OnlineSoftmax whole;
#pragma unroll
    for (int g = 0; g < kGroups; ++g) whole.row_max = fmaxf(whole.row_max, parts_of_row[g].row_max);
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      weights[g] = whole.probability(parts_of_row[g].row_max, 1.0f);
      whole.row_sum = fmaf(weights[g], parts_of_row[g].row_sum, whole.row_sum);
    }
    const PartStats all = {whole.row_max, whole.row_sum};
    const auto sum_of = [&](int i) {
      tile::Vec<float, 4> sum{};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float x[4];
        tile::load(x, part(g)[h * wmma::kPartPairs<kHeadDim> + share * kPairs + i][lane_idx].x);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.x[e] = fmaf(weights[g], x[e], sum.x[e]);
      }
      return sum;
    };
    const int first_column = share * kPairs * 16 + lane_idx % 4 * 2;
    if (row < num_rows && segment.complete) {
      const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
      const ResultRow<T> to(params, segment.sequence, segment.head_kv * heads + row - query * heads,
                            query);
      const tile::RowResult result = finalize(all, to.sink);
      if (to.lse && share == 0 && lane_idx % 4 == 0) *to.lse = result.lse;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const tile::Vec<float, 4> sum = sum_of(i);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          store_pair(to.out, first_column + 16 * i + 8 * e,
                     tile::scaled(sum.x[2 * e], result.scale),
                     tile::scaled(sum.x[2 * e + 1], result.scale),
                     static_cast<int>(params.head_dim_v), shape.store_bytes);
        }
      }
    } else if (row < num_rows) {
      const std::int64_t at = std::int64_t{segment.part} * kBlockM + row_of_block;
      if (share == 0 && lane_idx % 4 == 0) static_cast<PartStats*>(shape.stats)[at] = all;
      float* const to = shape.outs + at * kHeadDim;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const tile::Vec<float, 4> sum = sum_of(i);
        // Of a row that saw nothing the accumulators are 0.
        tile::store(to + first_column + 16 * i, {sum.x[0], sum.x[1]});
        tile::store(to + first_column + 16 * i + 8, {sum.x[2], sum.x[3]});
      }
    }
    __syncthreads();  // the next segment's copies come to where the parts are
  }

  __device__ __forceinline__ PartStats* stats(int row_of_block) const {
    return reinterpret_cast<PartStats*>(ptx::dynamic_smem() + kMap.stats) + row_of_block * kGroups;
  }
  // The row group's part of a group.
  __device__ __forceinline__ wmma::PartPair* part(int of_group) const {
    return reinterpret_cast<wmma::PartPair*>(ptx::dynamic_smem() + of_group * kMap.group) +
           row_group * 2 * wmma::kPartPairs<kHeadDim>;
  }
  static_assert(kBlockM * kHeadDim * static_cast<int>(sizeof(float)) <= kMap.group);
};

}  // namespace dlattn::decode
