#pragma once

#include "cuda/forward/decode/byte_queries.cuh"
#include "cuda/forward/decode/wide_producer.cuh"
#include "cuda/forward/decode/wide_products.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/mma/plain_softmax.cuh"
#include "cuda/tile/mma/softmax.cuh"
#include "cuda/tile/score.cuh"

namespace dlattn::decode {

// A warp's way through a segment.
template <typename T, typename KV, int kVariant>
struct WideConsumer {
  using Producer = WideProducer<KV, kVariant>;
  static constexpr Shape kShape = Producer::kShape;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kSlice = Producer::kSlice;
  static constexpr int kColumnWarps = kShape.column_warps;
  static constexpr int kGroups = kSlice / 8;
  static constexpr bool kBytes = sizeof(KV) == 1;
  using Rows = WideRows;
  using Scores = float[1][kGroups][4];
  using Part = tile::Vec<float, 4>[kGroups][32];  // of scores, as accumulators lie in a warp
  static_assert(kSlice == (kBytes ? 32 : 16) && kColumnWarps == 4);

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
    with_query_type<T, sizeof(KV)>(shape, [&](auto element) {
      using Q = decltype(element);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = first_row + 8 * h + lane_idx / 4;
        const Q* const q = query_row<Q>(params, shape, segment.sequence, segment.head_kv, mask,
                                        min(row, num_rows - 1));
        if constexpr (kBytes) {
          load_byte_row(rows, q, row, h);
        } else {
          load_row(rows, q, row, h);
        }
      }
    });
  }
  // Row h of the lane's two.
  __device__ __forceinline__ void load_row(Rows& rows, const T* q, int row, int h) const {
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
  // The same as fp16, for products with 8-bit keys, where a lane's four columns are neighbours. A
  // warp's columns of a row of bfloat16 have a power of two of their own.
  template <typename Q>
  __device__ __forceinline__ void load_byte_row(Rows& rows, const Q* q, int row, int h) const {
    rows.scales[h] = descales_of(params, std::int64_t{segment.sequence},
                                 std::int64_t{segment.head_kv} * shape.packed_heads.divisor(),
                                 std::int64_t{segment.head_kv})
                         .scores;
    float largest = 0.0f;
#pragma unroll
    for (int i = 0; i < warp_columns::kKeyBlocks; ++i) {
      const int column = warp_columns::column(column_warp, i) + lane_idx % 4 * 4;
      tile::Vec<Q, 4> x;
      memset(&x, 0, sizeof x);
      if (column < params.head_dim && row < num_rows)
        x = *reinterpret_cast<const tile::Vec<Q, 4>*>(q + column);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair)
        memcpy(&rows.rQ[i][2 * pair + h], &x.x[2 * pair], sizeof(std::uint32_t));
#pragma unroll
      for (int c = 0; c < 4; ++c) largest = fmaxf(largest, fabsf(tile::to_float(x.x[c])));
    }
    if constexpr (std::is_same_v<Q, __half>) return;
    const HalfScale scale(tile::reduce_max<4>(largest));
    rows.scales[h] *= scale.of_products;
#pragma unroll
    for (int i = 0; i < warp_columns::kKeyBlocks; ++i) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        std::uint32_t& word = rows.rQ[i][2 * pair + h];
        tile::Vec<Q, 2> x;
        memcpy(&x, &word, sizeof x);
        word = tile::pack<__half>(tile::to_float(x.x[0]) * scale.of_elements,
                                  tile::to_float(x.x[1]) * scale.of_elements);
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
    std::uint32_t rP[1][kSlice / 16][4];
    tile::mma::SpeculativeSoftmax<1>::pack<T, 0, kSlice>(acc_s, rP);
    // O += P V
    if constexpr (kBytes) {
      multiply_wide_pv_bytes<KV>(rows, rP, values, lane_idx, column_warp);
    } else {
      multiply_wide_pv<T>(rows, rP, values, lane_idx, column_warp);
    }
  }

  // Leaves the scores that this warp's columns give in shared memory.
  __device__ __forceinline__ void leave_scores(const Rows& rows, ptx::SmemAddress keys) const {
    float acc_s[kGroups][4];
    if constexpr (kBytes) {
      multiply_wide_qk_bytes<KV>(acc_s, rows, keys, lane_idx, column_warp);
    } else {
      multiply_wide_qk<T>(acc_s, rows, keys, lane_idx, column_warp);
    }
#pragma unroll
    for (int j = 0; j < kGroups; ++j)
      tile::store(part_of_warp(column_warp)[j][lane_idx].x, acc_s[j]);
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
        const int query = mask.query(row), head = segment.head_kv * heads + row - query * heads;
        with_query_type<T, sizeof(KV)>(shape, [&](auto element) {
          const ResultRow<decltype(element)> to(params, segment.sequence, head, query);
          tile::RowResult result = softmax.finalize(scale, to.sink);
          if (kBytes && result.scale != 0.0f)
            result.scale *= value_scale<sizeof(KV)>(params, segment.sequence, segment.head_kv);
          if (to.lse && is_first) *to.lse = result.lse;
          for_each_pair(rows, h, [&](int column, float low, float high) {
            store_pair(to.out, column, tile::scaled(low, result.scale),
                       tile::scaled(high, result.scale), static_cast<int>(params.head_dim_v),
                       shape.store_bytes);
          });
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
      const float (&acc)[2][4] = rows.acc_o[i];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int first = warp_columns::column(column_warp, i);
        if constexpr (kBytes) {
          store_pair(first + lane_idx % 4 * 4 + half * 2, acc[0][2 * h + half],
                     acc[1][2 * h + half]);
        } else {
          store_pair(first + half * 8 + lane_idx % 4 * 2, acc[half][2 * h], acc[half][2 * h + 1]);
        }
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
