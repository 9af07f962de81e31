#pragma once

#include <cstring>

#include "cuda/forward/decode/byte_products.cuh"
#include "cuda/forward/decode/byte_queries.cuh"
#include "cuda/forward/decode/producer.cuh"
#include "cuda/ptx/barrier.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/mma/mask.cuh"
#include "cuda/tile/mma/partial_output.cuh"
#include "cuda/tile/mma/products.cuh"
#include "cuda/tile/mma/softmax.cuh"
#include "cuda/tile/score.cuh"

namespace dlattn::decode {

// 16 rows in one group's warp: its share of the output, of the group's keys alone. Apart from the
// consumer, so that nvcc splits it into registers.
template <int kHeadDim, int kSlice>
struct WarpRows {
  using Scores = float[1][kSlice / 8][4];

  tile::mma::SpeculativeSoftmax<1> softmax;
  float acc_o[1][kHeadDim / 8][4] = {};
  std::uint32_t rQ[kHeadDim / 16][1][4];  // unless Q is in shared memory
};

// A warp's way through a segment.
template <typename T, typename KV, int kHeadDim, int kVariant, bool kPaged, bool kGeneral>
struct Consumer {
  using Producer = decode::Producer<KV, kHeadDim, kVariant, kPaged, kGeneral>;
  static constexpr Shape kShape = Producer::kShape;
  static constexpr SmemMap kMap = Producer::kMap;
  static constexpr int kBlockM = block_m(kShape);
  static constexpr int kBlockN = Producer::kBlockN;
  static constexpr int kSlice = Producer::kSlice;
  static constexpr int kStages = kShape.stages;
  static constexpr int kGroups = kShape.key_groups;
  static constexpr int kShares = kGroups / 2;  // of the columns, when a block's parts are added up
  static constexpr bool kBytes = sizeof(KV) == 1;
  static constexpr bool kScarce = kHeadDim > 128;  // registers are
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

  // `is_ahead`: whether the grid ahead may still run. confirm() waits for it; if it then says that
  // the segment is not the warp's, nothing has been done, and false is returned.
  template <typename Confirm>
  __device__ __forceinline__ bool run(bool is_ahead, Confirm confirm) const {
    Rows rows;
    const Producer producer(params, shape, segment,
                            mask.any_row(m0, min(m0 + kBlockM, num_rows) - 1));
    if (is_ahead && asks()) producer.ask_for_first();
    if (!confirm()) return false;
    if constexpr (kShape.queries_in_smem && !kBytes) copy_queries();
    int stage = 0, next_page = kScarce ? 0 : producer.page(0);
#pragma unroll 1
    for (int i = 0; i < kStages; ++i) {
      const int page = kScarce ? producer.page(i) : next_page;
      if constexpr (!kScarce) next_page = producer.page(i + 1);
      producer.start(i, i * Producer::kStageBytes, page);
    }
    if constexpr (kBytes) {
      store_queries();
      __syncthreads();
    } else if constexpr (kShape.queries_in_smem) {
      ptx::cp_async_wait<kStages - 1>();
      __syncthreads();
    } else {
      load_queries(rows);
    }
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i) {
      ptx::cp_async_wait<kStages - 1>();
      group_barrier();
      attend(rows, producer.key(i), producer.stages + stage);
      group_barrier();
      // Where registers are scarce, none keeps it.
      if constexpr (kScarce) next_page = producer.page(i + kStages);
      producer.start(i + kStages, stage, next_page);
      if constexpr (!kScarce) next_page = producer.page(i + kStages + 1);
      stage = stage == (kStages - 1) * Producer::kStageBytes ? 0 : stage + Producer::kStageBytes;
    }
    leave_part(rows);
    add_up();
    return true;
  }

 private:
  // Whether the group's first keys are asked for before the wait: where parts have so few that the
  // grid ahead has read its own by then, and it needs no page to know where they lie.
  __device__ __forceinline__ bool asks() const {
    constexpr int kFewTiles = 4;
    return ptx::kStartsEarly && !kPaged && kHeadDim == 128 && !kBytes && shape.cluster_log2 == 0 &&
           segment.count <= kFewTiles;
  }

  // Where a row of Q lies.
  template <typename Q = T>
  __device__ __forceinline__ const Q* query_row(int row) const {
    return tile::key_parts::query_row<Q>(params, shape, segment.sequence, segment.head_kv, mask,
                                         row);
  }

  // Q straight to the lanes that multiply it: few rows are read once.
  __device__ __forceinline__ void load_queries(Rows& rows) const {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first_row + 8 * h + lane_idx / 4, first = lane_idx % 4 * 2;
      const T* const q = query_row(min(row, num_rows - 1)) + first;
      // Columns that the row has behind the lane's first one.
      const int columns = row < num_rows ? static_cast<int>(params.head_dim) - first : 0;
#pragma unroll
      for (int d = 0; d < kHeadDim; d += 16) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int column = d + half * 8;
          rows.rQ[d / 16][0][2 * half + h] =
              column < columns ? *reinterpret_cast<const std::uint32_t*>(q + column) : 0;
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

  // The same as fp16, for products with 8-bit keys.
  __device__ __forceinline__ void store_queries() const {
    constexpr int kChunks = ByteQueries<kHeadDim>::kChunks;
    constexpr int kStep = num_warps(kShape) * 32 / kChunks;
    static_assert(kBlockM % kStep == 0 && 32 % kChunks == 0);
    const int chunk = static_cast<int>(threadIdx.x) % kChunks;
    const float of_keys = descales_of(params, std::int64_t{segment.sequence},
                                      std::int64_t{segment.head_kv} * shape.packed_heads.divisor(),
                                      std::int64_t{segment.head_kv})
                              .scores;
    unsigned char* const smem = ptx::dynamic_smem();
    with_query_type<T, sizeof(KV)>(shape, [&](auto element) {
      using Q = decltype(element);
      for (int row = static_cast<int>(threadIdx.x) / kChunks; row < kBlockM; row += kStep) {
        tile::Vec<Q, 8> x;
        memset(&x, 0, sizeof x);
        if (m0 + row < num_rows && chunk * 8 < params.head_dim)
          x = *reinterpret_cast<const tile::Vec<Q, 8>*>(query_row<Q>(m0 + row) + chunk * 8);
        ByteQueries<kHeadDim>::store(smem + kMap.q, reinterpret_cast<float*>(smem + kMap.scales),
                                     row, chunk, x, of_keys);
      }
    });
  }
  // The factor of the products of this lane's row h.
  __device__ __forceinline__ float scale_of_row(int h) const {
    const auto* const scales = reinterpret_cast<const float*>(ptx::dynamic_smem() + kMap.scales);
    return scales[row_group * 16 + 8 * h + lane_idx / 4];
  }

  __device__ __forceinline__ ptx::SmemAddress queries() const {
    return ptx::smem_address(ptx::dynamic_smem()) + kMap.q;
  }

  // Updates the rows with the keys from n0 on, whose K and V lie in a stage.
  __device__ __forceinline__ void attend(Rows& rows, int n0, ptx::SmemAddress stage) const {
    // S = Q K^T
    Scores acc_s;
    multiply_qk(acc_s, rows, stage);
    float scale = shape.scale_log2;
    if constexpr (kGeneral) scale = modify(acc_s, n0);
    const int last_row = max(min(first_row + 15, num_rows - 1), first_row);
    if (!tile::contains_all(mask.every_row(first_row, last_row), n0, kSlice))
      tile::mma::apply_mask(acc_s, mask, first_row + lane_idx / 4, n0, lane_idx);
    // P = exp(S - row max)
    std::uint32_t rP[1][kSlice / 16][4];
    rows.softmax.template first_probabilities<T, 0, kSlice>(acc_s, scale, false, rP, rows.acc_o);
    // O += P V
    const ptx::SmemAddress sV =
        stage + kMap.tensor + tile::mma::lane_offset_down<Producer::kColumns>(lane_idx);
    if constexpr (kBytes) {
      multiply_pv_bytes<KV, kHeadDim, kSlice>(rows.acc_o, rP, sV);
    } else {
      tile::mma::multiply_pv<T, kHeadDim, 0, kSlice>(rows.acc_o, rP, sV);
    }
  }

  __device__ __forceinline__ void multiply_qk(Scores& acc_s, const Rows& rows,
                                              ptx::SmemAddress stage) const {
    [[maybe_unused]] const ptx::SmemAddress sQ = queries() +
                                                 row_group * 16 * kHeadDim * kElementBytes +
                                                 tile::mma::lane_offset_down<kHeadDim>(lane_idx);
    const ptx::SmemAddress sK = stage + tile::mma::lane_offset_across<Producer::kColumns>(lane_idx);
    const auto load_q = [&](std::uint32_t (&a)[1][4], int d) {
      if constexpr (kShape.queries_in_smem) {
        tile::mma::load_q<kHeadDim>(a, sQ, d);
      } else {
        memcpy(a, rows.rQ[d / 16], sizeof a);
      }
    };
    if constexpr (kBytes) {
      multiply_qk_bytes<KV, kHeadDim, kSlice>(acc_s, sK, load_q);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float scale = scale_of_row(h);
#pragma unroll
        for (int j = 0; j < kSlice / 8; ++j)
          acc_s[0][j][2 * h] *= scale, acc_s[0][j][2 * h + 1] *= scale;
      }
    } else {
      tile::mma::multiply_qk<T, kHeadDim, 0, kSlice>(acc_s, sK, load_q);
    }
  }

  // Softcap, ALiBi and the caller's mask. Returns what makes the scores base 2.
  __device__ __forceinline__ float modify(Scores& acc_s, int n0) const {
    const auto each = [&](int h, auto change) {
#pragma unroll
      for (int j = 0; j < kSlice / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 2; ++e)
          change(acc_s[0][j][2 * h + e], n0 + 8 * j + lane_idx % 4 * 2 + e);
      }
    };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      each(h, [&](float& x, int) { x *= shape.softmax_scale; });
      if (shape.softcap != 0.0f)
        each(h, [&](float& x, int) { x = shape.softcap * tile::tanh(x * shape.inverse_softcap); });
      const int row = min(first_row + 8 * h + lane_idx / 4, num_rows - 1);
      const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
      const int head = segment.head_kv * heads + row - query * heads;
      if (params.alibi_slopes.data) {
        const float slope = tile::alibi_slope(params, tile::WorkTile{0, head, segment.sequence});
        const int position = mask.position(query);
        each(h, [&](float& x, int key) {
          x = __fadd_rn(x, -alibi_penalty(slope, static_cast<float>(position - key)));
        });
      }
      if (params.mask.data) {
        const std::uint8_t* const visible =
            params.mask.data + segment.sequence * params.mask.batch_stride +
            head * params.mask.head_stride + query * params.mask.row_stride;
        each(h, [&](float& x, int key) {
          if (key >= mask.seqlen_k || !visible[key * params.mask.col_stride]) x = -INFINITY;
        });
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
    store_half<0>(rows);
    if (!has_few_rows()) store_half<1>(rows);
    __syncthreads();
  }

  // Half of store_part(): the first or last 8 rows.
  template <int kHalf>
  __device__ __forceinline__ void store_half(const Rows& rows) const {
    constexpr int kPairs = tile::mma::kPartPairs<kHeadDim>;
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float (&left)[4] = rows.acc_o[0][2 * i], (&right)[4] = rows.acc_o[0][2 * i + 1];
      const float x[4] = {left[2 * kHalf], left[2 * kHalf + 1], right[2 * kHalf],
                          right[2 * kHalf + 1]};
      tile::store(part(group)[kHalf * kPairs + i][lane_idx].x, x);
    }
  }

  // Whether the block has 8 rows or fewer, as one query has: those behind them cost nothing at its
  // end then, but where loops are unrolled.
  __device__ __forceinline__ bool has_few_rows() const {
    return kShape.row_groups == 1 && !kScarce && num_rows - m0 <= 8;
  }

  // Adds up the groups' parts, in their order: of 8 rows of the row group and a share of the
  // columns. Stores the sum, or where it is a part itself, leaves it in the workspace, or to the
  // cluster.
  __device__ __forceinline__ void add_up() const {
    constexpr int kMostPairs = tile::mma::kPartPairs<kHeadDim> / kShares;
    const bool few = has_few_rows();
    const int h = few ? 0 : group % 2, pairs = few ? kMostPairs / 2 : kMostPairs;
    const int first_pair = (few ? group : group / 2) * pairs;
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
    const auto of_group = [&](int g, int i) -> tile::Vec<float, 4>& {
      return part(g)[h * tile::mma::kPartPairs<kHeadDim> + first_pair + i][lane_idx];
    };
    const auto sum_of = [&](int i) {
      tile::Vec<float, 4> sum{};
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        float x[4];
        tile::load(x, of_group(g, i).x);
#pragma unroll
        for (int e = 0; e < 4; ++e) sum.x[e] = fmaf(weights[g], x[e], sum.x[e]);
      }
      return sum;
    };
    const bool in_cluster = ptx::kClusters && shape.cluster_log2 > 0;
    const bool is_part = !in_cluster && !segment.is_complete();
    const std::int64_t at = std::int64_t{segment.part} * kBlockM + row_of_block;
    const int first_column = first_pair * 16 + lane_idx % 4 * kOfPair;
    const auto leave = [&](int i, const tile::Vec<float, 4>& sum) {
      float* const to = shape.outs + at * kHeadDim + first_column + 16 * i;
      // The accumulators of a row that saw nothing are 0.
#pragma unroll
      for (int e = 0; e < 2; ++e) tile::store(to + kNextPair * e, pair_of(sum, e).x);
    };
    // Loops are hardly unrolled where a lane has few columns: instructions that run once take
    // longer to fetch than to run. Sums are made in one place then, and results wait in shared
    // memory. With keys of bytes, all of them would take one register more than there are on 8.9.
    constexpr int kUnroll = !kScarce ? 1 : kBytes ? 8 : kMostPairs, kAtOnce = kMostPairs / 2;
    if constexpr (!kScarce) {
#pragma unroll 1
      for (int first = 0; first < pairs; first += kAtOnce) {
#pragma unroll
        for (int i = first; i < first + kAtOnce; ++i) {
          const tile::Vec<float, 4> sum = sum_of(i);
          // Where the first group's part was, of which nobody else reads this lane's.
          if (!is_part) {
            tile::store(of_group(0, i).x, sum.x);
          } else if (row < num_rows) {
            leave(i, sum);
          }
        }
      }
    } else if (in_cluster) {
#pragma unroll kUnroll
      for (int i = 0; i < pairs; ++i) tile::store(of_group(0, i).x, sum_of(i).x);
    }
    if constexpr (ptx::kClusters) {  // else it would be compiled for nothing
      if (in_cluster) {
        __syncthreads();  // all have read the groups' statistics
        if (first_pair == 0 && lane_idx % 4 == 0) stats(row_of_block)[0] = all;
        return add_up_cluster();
      }
    }
    if (row < num_rows && is_part) {
      if (first_pair == 0 && lane_idx % 4 == 0) static_cast<PartStats*>(shape.stats)[at] = all;
      if constexpr (kScarce) {
#pragma unroll kUnroll
        for (int i = 0; i < pairs; ++i) leave(i, sum_of(i));
      }
    } else if (row < num_rows) {
      with_result(row, all, first_pair == 0, [&](const auto& to, const tile::RowResult& result) {
#pragma unroll kUnroll
        for (int i = 0; i < pairs; ++i)
          store(to, result, first_column + 16 * i, kScarce ? sum_of(i) : of_group(0, i));
      });
    }
    __syncthreads();  // the next segment's copies come to where the parts are
  }

  // Adds up the parts of the cluster's blocks, in their order, from where they left them in shared
  // memory.
  __device__ __forceinline__ void add_up_cluster() const {
    ptx::cluster_sync();
    if (shape.cluster_log2 == 1) {
      add_up_blocks<2>();
    } else {
      add_up_blocks<kMostBlocks>();
    }
    ptx::cluster_leave();  // the next segment's copies come to where others read
  }
  static constexpr int kMostBlocks = 8;  // of a cluster
  static constexpr int kWarpsLog2 = kShape.row_groups == 1 ? kGroups / 2 : kGroups / 2 + 1;
  static_assert(1 << kWarpsLog2 == num_warps(kShape));

  // The same for clusters of up to kBlocks. A line is 8 rows of the 16 columns that a warp has at a
  // time. Each warp of the cluster has lines of the same rows, one or some, so that weights, and
  // where the rows go, are found once. Rows that do not exist have no lines.
  template <int kBlocks>
  __device__ __forceinline__ void add_up_blocks() const {
    constexpr int kPairs = tile::mma::kPartPairs<kHeadDim>;
    const int log2 = kBlocks == 2 ? 1 : shape.cluster_log2, size = 1 << log2;
    const int lines = min((num_rows - m0 + 7) / 8, kShape.row_groups * 2) * kPairs;
    // The warps of the cluster are a power of two: no division.
    const int warps = 1 << (kWarpsLog2 + log2), each = (lines + warps - 1) >> (kWarpsLog2 + log2);
    const int warp =
        static_cast<int>(threadIdx.x) / 32 * size + static_cast<int>(rank_in_cluster(shape));
    const int first = warp * each;
    const int row_of_block = first / kPairs * 8 + lane_idx / 4, row = m0 + row_of_block;
    if (first >= lines || row >= num_rows) return;
    const ptx::SmemAddress sStats = ptx::smem_address(stats(row_of_block));
    float weights[kBlocks], sums[kBlocks], x[kBlocks][4];
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      float of_block[2];
      ptx::load_of_block(of_block, sStats, static_cast<unsigned>(min(i, size - 1)));
      weights[i] = of_block[0], sums[i] = of_block[1];
    }
    load_line(x, first, size);
    tile::OnlineSoftmax whole;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) whole.row_max = fmaxf(whole.row_max, weights[i]);
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      if (i >= size) continue;
      weights[i] = whole.probability(weights[i], 1.0f);
      whole.row_sum = fmaf(weights[i], sums[i], whole.row_sum);
    }
    const PartStats all = {whole.row_max, whole.row_sum};
    with_result(row, all, first % kPairs == 0, [&](const auto& to, const auto& result) {
#pragma unroll 1
      for (int line = first;;) {
        tile::Vec<float, 4> sum{};
#pragma unroll
        for (int i = 0; i < kBlocks; ++i) {
          if (i >= size) continue;
#pragma unroll
          for (int e = 0; e < 4; ++e) sum.x[e] = fmaf(weights[i], x[i][e], sum.x[e]);
        }
        store(to, result, line % kPairs * 16 + lane_idx % 4 * kOfPair, sum);
        if (++line == first + each) break;
        load_line(x, line, size);
      }
    });
  }

  // A line of all of the cluster's blocks.
  template <int kBlocks>
  __device__ __forceinline__ void load_line(float (&x)[kBlocks][4], int line, int size) const {
    const ptx::SmemAddress sPart =
        ptx::smem_address(ptx::dynamic_smem()) + (line * 32 + lane_idx) * 16;
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
      // Without zeros, registers of blocks that there are not would be kept all the time.
      x[i][0] = x[i][1] = x[i][2] = x[i][3] = 0.0f;
      if (i < size) ptx::load_of_block(x[i], sPart, static_cast<unsigned>(i));
    }
  }

  // Calls store_with(to, result) for where a row goes and what its sums are multiplied with; its
  // lse is stored if `stores_lse`.
  template <typename Function>
  __device__ __forceinline__ void with_result(int row, const PartStats& all, bool stores_lse,
                                              Function store_with) const {
    const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
    const float of_values = value_scale<sizeof(KV)>(params, segment.sequence, segment.head_kv);
    with_query_type<T, sizeof(KV)>(shape, [&](auto element) {
      const ResultRow<decltype(element)> to(params, segment.sequence,
                                            segment.head_kv * heads + row - query * heads, query);
      store_with(to, finalize(all, to.sink, of_values));
      // The logarithm is worked out where it is wanted alone.
      if (to.lse && stores_lse && lane_idx % 4 == 0)
        *to.lse = finalize(all, to.sink, of_values).lse;
    });
  }
  // A lane's sums of 16 columns of a row, from its first one on.
  template <typename Q>
  __device__ __forceinline__ void store(const ResultRow<Q>& to, const tile::RowResult& result,
                                        int column, const tile::Vec<float, 4>& sum) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const tile::Vec<float, 2> pair = pair_of(sum, e);
      store_pair(to.out, column + kNextPair * e, tile::scaled(pair.x[0], result.scale),
                 tile::scaled(pair.x[1], result.scale), static_cast<int>(params.head_dim_v),
                 shape.store_bytes);
    }
  }
  // A lane has two pairs of 16 columns; with 8-bit keys the even columns of four neighbours are one
  // product's, and the odd ones the next one's.
  static constexpr int kOfPair = kBytes ? 4 : 2, kNextPair = kBytes ? 2 : 8;
  __device__ __forceinline__ static tile::Vec<float, 2> pair_of(const tile::Vec<float, 4>& sum,
                                                                int e) {
    return kBytes ? tile::Vec<float, 2>{{sum.x[e], sum.x[e + 2]}}
                  : tile::Vec<float, 2>{{sum.x[2 * e], sum.x[2 * e + 1]}};
  }

  __device__ __forceinline__ PartStats* stats(int row_of_block) const {
    return reinterpret_cast<PartStats*>(ptx::dynamic_smem() + kMap.stats) + row_of_block * kGroups;
  }
  // The row group's part of a group.
  __device__ __forceinline__ tile::mma::PartPair* part(int of_group) const {
    return reinterpret_cast<tile::mma::PartPair*>(ptx::dynamic_smem() + of_group * kMap.group) +
           row_group * 2 * tile::mma::kPartPairs<kHeadDim>;
  }
  static_assert(kBlockM * kHeadDim * static_cast<int>(sizeof(float)) <= kMap.group);
};

}  // namespace dlattn::decode
