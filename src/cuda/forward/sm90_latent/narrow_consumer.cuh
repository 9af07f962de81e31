#pragma once

#include <cmath>

#include "cuda/forward/sm90_latent/join.cuh"
#include "cuda/forward/sm90_latent/narrow_bytes.cuh"
#include "cuda/forward/sm90_latent/narrow_setup.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/ptx/stmatrix.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/wgmma/slack_softmax.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

namespace dlattn::sm90_latent {

// The consumer of a narrow shape: a warpgroup with up to kRows rows of a KV head. Products are
// transposed, S^T = K Q^T and O^T += V^T P^T: a tile's 64 keys, and 64 columns of V at a time, are
// the rows that wgmma has, and rows of Q its columns, no more than there may be.
// Keys KV of 8 bits are multiplied as ByteProducts does, with q and out of either type.
template <typename T, int kRows, typename KV>
struct NarrowConsumer {
  static constexpr bool kBytes = sizeof(KV) == 1;
  static constexpr int kWarpgroups = narrow_consumers(kRows, sizeof(KV));
  using Factor = std::conditional_t<kBytes, __half, T>;  // of products
  static constexpr int kScores = kRows / 2;
  static constexpr int kOwnRows = kRows / 4;  // of Q, of which this lane has scores: of_lane()
  using Memory = Ring<kRows, static_cast<int>(sizeof(KV))>;

  const AttentionParams& params;
  const DecodeShape& shape;
  const Memory ring;
  const int consumer;
  typename Memory::Place at{};  // the tile's first block of columns

  float acc_o[kOutBlocks][kScores];
  float acc_s[kScores];
  tile::OnlineSoftmax softmax[kOwnRows];

  __device__ __forceinline__ NarrowConsumer(const AttentionParams& params, const DecodeShape& shape,
                                            const Memory& ring, int consumer)
      : params(params), shape(shape), ring(ring), consumer(kWarpgroups > 1 ? consumer : 0) {}

  __device__ __forceinline__ void run() {
    for_each_segment(params, shape,
                     [&](const Segment& segment, const KeyMask& mask, int num_rows, bool joined) {
                       if constexpr (kBytes) {
                         load_byte_queries(segment, mask, num_rows);
                       } else {
                         load_queries(segment, mask, num_rows);
                       }
                       attend(segment, mask, num_rows);
                       add_sums();
                       if constexpr (kWarpgroups > 1) {
                         add_up_consumers();
                         if (consumer > 0) return;
                       }
                       store(segment, mask, num_rows, joined);
                     });
  }

 private:
  // Score or accumulator i is of the lane's row of_score(i) and of key or column lane / 4, or, if
  // it is the second one of its group of four, 8 further.
  __device__ __forceinline__ static constexpr int of_score(int i) { return i / 4 * 2 + i % 2; }
  __device__ __forceinline__ static constexpr int score_of(int own, int second) {
    return own / 2 * 4 + second * 2 + own % 2;
  }
  // The row of Q that is the lane's row `own`.
  __device__ __forceinline__ static int of_lane(int own) {
    return own / 2 * 8 + static_cast<int>(threadIdx.x % 4) * 2 + own % 2;
  }
  __device__ __forceinline__ float scale() const { return shape.scale_log2; }
  __device__ __forceinline__ float* own_of_rows(int warp, int use = 0) const {
    return Memory::of_rows(consumer, warp, use);
  }
  // The maximum, or the sum, over the eight lanes that have other keys of the same rows.
  template <typename Combine>
  __device__ __forceinline__ static float over_keys(float x, Combine combine) {
#pragma unroll
    for (int offset = 4; offset < 32; offset *= 2)
      x = combine(x, __shfl_xor_sync(tile::kFullMask, x, offset));
    return x;
  }

  // The column of values, of its block, that the lane's first accumulators are of; the second ones
  // are kSecond further.
  static constexpr int kSecond = kBytes ? 1 : 8;
  __device__ __forceinline__ static int own_column() {
    const tile::wgmma::ThreadIndex thread;
    return thread.warp * 16 + thread.lane / 4 * (kBytes ? 2 : 1);
  }

  // The rows of Q to shared memory. Rows and columns that there are not are zeros.
  __device__ __forceinline__ void load_queries(const Segment& segment, const KeyMask& mask,
                                               int num_rows) const {
    constexpr int kAtOnce = kWarpgroupThreads / 8;
    const int thread = tile::wgmma::ThreadIndex().index, chunk = thread % 8;
#pragma unroll 1
    for (int row = thread / 8; row < kRows; row += kAtOnce) {
      const T* const q = query_row<T>(params, shape, segment.sequence, segment.head_kv, mask,
                                      min(row, num_rows - 1));
      const ptx::SmemAddress to = ring.q(0) + row * kBlockRowBytes + (chunk ^ (row % 8)) * 16;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        const int column = block * kBlockColumns + chunk * 8;
        const bool exists = row < num_rows && column < params.head_dim;
        ptx::cp_async<16>(to + block * kRows * kBlockRowBytes, q + (exists ? column : 0), exists);
      }
    }
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    ptx::fence_proxy_async();
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
  }

  // The same beside keys of 8 bits, by the first consumer, and what the rows' products count.
  __device__ __forceinline__ void load_byte_queries(const Segment& segment, const KeyMask& mask,
                                                    int num_rows) {
    const int thread = tile::wgmma::ThreadIndex().index;
    const float of_keys = descales_of(params, std::int64_t{segment.sequence},
                                      std::int64_t{segment.head_kv} * shape.packed_heads.divisor(),
                                      std::int64_t{segment.head_kv})
                              .scores;
#pragma unroll 1
    for (int row = thread / 8; consumer == 0 && row < kRows; row += kWarpgroupThreads / 8) {
      with_query_type<T, sizeof(KV)>(shape, [&](auto element) {
        using Q = decltype(element);
        const Q* const q = query_row<Q>(params, shape, segment.sequence, segment.head_kv, mask,
                                        min(row, num_rows - 1));
        const float factor = ByteProducts<kRows, KV>::store_query(
            q, row, row < num_rows, static_cast<int>(params.head_dim));
        if (thread % 8 == 0) Memory::factors()[row] = factor * of_keys;
      });
    }
    ptx::fence_proxy_async();
    ptx::barrier_sync(kEveryNarrowBarrier, kWarpgroups * kWarpgroupThreads);
  }

  // All tiles of a segment.
  __device__ __forceinline__ void attend(const Segment& segment, const KeyMask& mask,
                                         int num_rows) {
#pragma unroll
    for (int b = 0; b < kOutBlocks; ++b) {
#pragma unroll
      for (float& x : acc_o[b]) x = 0.0f;
    }
#pragma unroll
    for (tile::OnlineSoftmax& row : softmax) row = tile::OnlineSoftmax();
    const tile::Range whole = mask.every_row(0, num_rows - 1);
#pragma unroll 1
    for (int i = 0; i < segment.count; ++i, at.advance(kBlocks)) {
      if (kWarpgroups > 1 && i % kWarpgroups != consumer) continue;
      multiply_keys();
      const int n0 = (segment.tile + i) * kBlockN;
      if (!tile::contains_all(whole, n0, kBlockN)) apply_mask(mask, n0);
      raise_maxima();
      make_probabilities();
      multiply_values();
      release();
    }
  }

  // S^T = K Q^T, as columns arrive.
  __device__ __forceinline__ void multiply_keys() {
    if constexpr (kBytes) {
      ByteProducts<kRows, KV>(ring, consumer).multiply_keys(acc_s, at);
#pragma unroll
      for (int own = 0; own < kOwnRows; ++own) {
        const float factor = Memory::factors()[of_lane(own)];
        acc_s[score_of(own, 0)] *= factor, acc_s[score_of(own, 1)] *= factor;
      }
      return;
    }
    typename Memory::Place from = at;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const std::uint64_t k = ptx::wgmma_descriptor(ring.keys(from), 0);
      const std::uint64_t q = ptx::wgmma_descriptor(ring.q(block), 0);
      ring.wait_full(from);
      ptx::wgmma_fence();
#pragma unroll
      for (int byte = 0; byte < kBlockRowBytes; byte += 16 * static_cast<int>(sizeof(T))) {
        ptx::wgmma_ss<T, false>(acc_s, ptx::wgmma_advance(k, byte), ptx::wgmma_advance(q, byte),
                                block + byte > 0);
      }
      from.advance();
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }

  // Scores of keys that their rows do not see become -inf.
  __device__ __forceinline__ void apply_mask(const KeyMask& mask, int n0) {
    const tile::wgmma::ThreadIndex thread;
    const int first_key = n0 + thread.warp * 16 + thread.lane / 4;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const tile::Range visible = mask.row(of_lane(own), first_key);
#pragma unroll
      for (int second = 0; second < 2; ++second) {
        // seed: hide-keys
        if (!tile::contains(visible, 8 * second)) acc_s[score_of(own, second)] = -INFINITY;
      }
    }
  }

  // Raises row maxima to the tile's where its scores exceed them by too much, and scales what the
  // rows have accumulated. All warps have the same maxima.
  __device__ __forceinline__ void raise_maxima() {
    const tile::wgmma::ThreadIndex thread;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const float most = over_keys(fmaxf(acc_s[score_of(own, 0)], acc_s[score_of(own, 1)]),
                                   [](float x, float y) { return fmaxf(x, y); });
      if (thread.lane < 4) own_of_rows(thread.warp)[of_lane(own)] = most;
    }
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
    float maxima[kOwnRows];
    bool rises = false;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      float most = -INFINITY;
#pragma unroll
      for (int w = 0; w < kNarrowWarps; ++w) most = fmaxf(most, own_of_rows(w)[of_lane(own)]);
      const float old = softmax[own].row_max;
      maxima[own] = (most - old) * scale() > tile::wgmma::kSlack ? most : old;
      rises = rises || maxima[own] != old;
    }
    if (!__any_sync(tile::kFullMask, rises)) return;
    float factors[kOwnRows];
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own)
      factors[own] = softmax[own].raise_max(maxima[own], scale());
#pragma unroll
    for (int b = 0; b < kOutBlocks; ++b) {
#pragma unroll
      for (int i = 0; i < kScores; ++i) acc_o[b][i] *= factors[of_score(i)];
    }
  }

  // Turns scores into probabilities, as tile::wgmma::make_probabilities() does, and leaves them in
  // shared memory row by row.
  __device__ __forceinline__ void make_probabilities() {
    float bases[kOwnRows], negs[kOwnRows];
    bool is_far = false;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      bases[own] = softmax[own].finite_max();
      negs[own] = -bases[own] * scale();
      is_far = is_far || !(fabsf(negs[own]) < tile::kMostScaled);
    }
    if (!is_far) {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        acc_s[i] = ptx::exp2(fmaf(acc_s[i], scale(), negs[of_score(i)]));
    } else {
#pragma unroll
      for (int i = 0; i < kScores; ++i)
        acc_s[i] = ptx::exp2((acc_s[i] - bases[of_score(i)]) * scale());
    }
    const tile::wgmma::ThreadIndex thread;
#pragma unroll
    for (int j = 0; j < kScores / 4; j += 2) {
      std::uint32_t words[4];  // matrices of 8 keys by 8 rows
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float* const x = acc_s + (j + m / 2) * 4 + m % 2 * 2;
        words[m] = tile::pack<Factor>(x[0], x[1]);
      }
      const int row = 8 * (j + thread.lane / 16) + thread.lane % 8;
      const int chunk = thread.warp * 2 + thread.lane / 8 % 2;
      ptx::stmatrix_x4_trans(
          ring.probabilities(consumer) + row * kBlockRowBytes + (chunk ^ (row % 8)) * 16, words);
    }
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own)
      softmax[own].row_sum += acc_s[score_of(own, 0)] + acc_s[score_of(own, 1)];
    if constexpr (!kBytes) ptx::fence_proxy_async();
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
  }

  // O^T += V^T P^T.
  __device__ __forceinline__ void multiply_values() {
    if constexpr (kBytes) {
      ByteProducts<kRows, KV>(ring, consumer).multiply_values(acc_o, at);
      return;
    }
    typename Memory::Place from = at;
    const std::uint64_t p = ptx::wgmma_descriptor(ring.probabilities(consumer), 0);
    ptx::wgmma_fence();
#pragma unroll
    for (int b = 0; b < kOutBlocks; ++b) {
      const std::uint64_t v = ptx::wgmma_descriptor(ring.keys(from), 0);
#pragma unroll
      for (int n = 0; n < kBlockN; n += 16) {
        ptx::wgmma_ss<T, false, true>(acc_o[b], ptx::wgmma_advance(v, n * kBlockRowBytes),
                                      ptx::wgmma_advance(p, n * static_cast<int>(sizeof(T))), true);
      }
      from.advance();
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
  }

  // The tile's blocks of columns, a lane each.
  __device__ __forceinline__ void release() const {
    const int lane = static_cast<int>(threadIdx.x % 32);
    if (lane >= kBlocks) return;
    typename Memory::Place to = at;
    to.advance(lane);
    ptx::mbarrier_arrive(ring.empty(to.slot));
  }

  // Makes row_sum that of all lanes and warps.
  __device__ __forceinline__ void add_sums() {
    const tile::wgmma::ThreadIndex thread;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const float sum = over_keys(softmax[own].row_sum, [](float x, float y) { return x + y; });
      if (thread.lane < 4) own_of_rows(thread.warp, 1)[of_lane(own)] = sum;
    }
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      softmax[own].row_sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kNarrowWarps; ++w)
        softmax[own].row_sum += own_of_rows(w, 1)[of_lane(own)];
    }
  }

  // Adds the second consumer's tiles to the first's, half of the columns at a time, by way of Q's
  // memory.
  __device__ __forceinline__ void add_up_consumers() {
    constexpr int kThreads = kWarpgroups * kWarpgroupThreads, kHalf = kOutBlocks / 2;
    float factors[kOwnRows], weights[kOwnRows];
    if (consumer == 1) give_stats();
#pragma unroll
    for (int first = 0; first < kOutBlocks; first += kHalf) {
      ptx::barrier_sync(kEveryNarrowBarrier, kThreads);  // nobody reads that memory
      if (consumer == 1) give_columns<kHalf>(first);
      ptx::barrier_sync(kEveryNarrowBarrier, kThreads);
      if (consumer == 1) continue;
      if (first == 0) take_stats(factors, weights);
      take_columns<kHalf>(first, factors, weights);
    }
    // The next rows of Q come to the same memory.
    if (consumer == 0) ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
  }
  __device__ __forceinline__ void give_stats() const {
    if (tile::wgmma::ThreadIndex().index >= 4) return;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      Memory::of_rows(1, 0)[of_lane(own)] = softmax[own].row_max;
      Memory::of_rows(1, 1)[of_lane(own)] = softmax[own].row_sum;
    }
  }
  // Factors of the rows, and weights of the second consumer's.
  __device__ __forceinline__ void take_stats(float (&factors)[kOwnRows],
                                             float (&weights)[kOwnRows]) {
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      tile::OnlineSoftmax& row = softmax[own];
      const float other_max = Memory::of_rows(1, 0)[of_lane(own)];
      factors[own] = row.raise_max(other_max, scale());
      weights[own] = row.probability(other_max, scale());
      row.row_sum = fmaf(weights[own], Memory::of_rows(1, 1)[of_lane(own)], row.row_sum);
    }
  }
  // The thread's accumulators of some blocks of columns, four at a time.
  template <int kCount>
  __device__ __forceinline__ void give_columns(int first) const {
#pragma unroll
    for (int i = 0; i < kCount * kScores; i += 4) {
      const float* const x = acc_o[first + i / kScores] + i % kScores;
      const float chunk[4] = {x[0], x[1], x[2], x[3]};
      tile::store(given(i / 4), chunk);
    }
  }
  template <int kCount>
  __device__ __forceinline__ void take_columns(int first, const float (&factors)[kOwnRows],
                                               const float (&weights)[kOwnRows]) {
    static_assert(kCount * kScores * 4 * kWarpgroupThreads <= Memory::kMap.slots);
#pragma unroll
    for (int i = 0; i < kCount * kScores; i += 4) {
      float* const x = acc_o[first + i / kScores] + i % kScores;
      float chunk[4];
      tile::load(chunk, given(i / 4));
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int own = of_score(i % kScores + e);
        x[e] = fmaf(weights[own], chunk[e], factors[own] * x[e]);
      }
    }
  }
  __device__ __forceinline__ static float* given(int chunk) {
    return reinterpret_cast<float*>(ptx::dynamic_smem()) +
           (chunk * kWarpgroupThreads + tile::wgmma::ThreadIndex().index) * 4;
  }

  // Stores the rows' results, or where they are of some keys alone, leaves them in the workspace,
  // relative to row maxima in base 2.
  __device__ __forceinline__ void store(const Segment& segment, const KeyMask& mask, int num_rows,
                                        bool joined) {
    if (joined) join();
    if (segment.is_complete() || joined) {
      store_results(segment, mask, num_rows, joined);
    } else {
      store_part(segment, num_rows);
    }
  }

  __device__ __forceinline__ ResultRow<T> result_row(const Segment& segment, const KeyMask& mask,
                                                     int row) const {
    const int heads = static_cast<int>(shape.packed_heads.divisor()), query = mask.query(row);
    return ResultRow<T>(params, segment.sequence, segment.head_kv * heads + row - query * heads,
                        query);
  }

  // By way of Q's memory, whose rows lie so far apart there that lanes do not meet in a bank. The
  // lane's second rows do not count where parts are joined.
  __device__ __forceinline__ void store_results(const Segment& segment, const KeyMask& mask,
                                                int num_rows, bool joined) const {
    constexpr int kPitch = kWideValues * static_cast<int>(sizeof(T)) + 16;
    static_assert(kRows * kPitch <= Memory::kMap.slots);
    const tile::wgmma::ThreadIndex thread;
    const int kept = joined ? Join::rank() : 0;
    const auto is_stored = [&](int row) { return row < num_rows && !(joined && row % 2 != kept); };
    float* const maxima = own_of_rows(0);
    float* const sums = own_of_rows(1);
    float* const scales = own_of_rows(2);
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      if (thread.index >= 4 || (joined && own % 2 > 0)) continue;
      const int row = of_lane(own ^ kept);
      maxima[row] = softmax[own].row_max, sums[row] = softmax[own].row_sum;
    }
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
    if (is_stored(thread.index)) {
      const ResultRow<T> to = result_row(segment, mask, thread.index);
      tile::OnlineSoftmax row;
      row.row_max = maxima[thread.index], row.row_sum = sums[thread.index];
      tile::RowResult result = row.finalize(scale(), to.sink);
      if (kBytes && result.scale != 0.0f)
        result.scale *= value_scale<sizeof(KV)>(params, segment.sequence, segment.head_kv);
      if (to.lse) *to.lse = result.lse;
      scales[thread.index] = result.scale;
    }
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
    unsigned char* const rows = ptx::dynamic_smem();
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const int row = of_lane(own ^ kept);
      if (row >= num_rows || (joined && own % 2 > 0)) continue;
      const float factor = scales[row];
      T* const to = reinterpret_cast<T*>(rows + row * kPitch) + own_column();
#pragma unroll
      for (int i = 0; i < 2 * kOutBlocks; ++i) {
        const float x = tile::scaled(acc_o[i / 2][score_of(own, i % 2)], factor);
        to[i / 2 * kBlockColumns + i % 2 * kSecond] = element_of(x);
      }
    }
    ptx::barrier_sync(kNarrowBarrier + consumer, kWarpgroupThreads);
    using Chunk = tile::Vec<std::uint32_t, 4>;
    constexpr int kColumns = sizeof(Chunk) / sizeof(T), kChunks = kWideValues / kColumns;
#pragma unroll 1
    for (int i = thread.index; i < num_rows * kChunks; i += kWarpgroupThreads) {
      const int row = i / kChunks, column = i % kChunks * kColumns;
      if (column >= params.head_dim_v || !is_stored(row)) continue;
      *reinterpret_cast<Chunk*>(result_row(segment, mask, row).out + column) =
          *reinterpret_cast<const Chunk*>(rows + row * kPitch + column * sizeof(T));
    }
    ptx::barrier_sync(kNarrowBarrier + consumer,
                      kWarpgroupThreads);  // the next rows of Q come to the same memory
  }

  // An element of out. With keys of 8 bits the launch has its type, and T is one of as many bytes.
  __device__ __forceinline__ T element_of(float x) const {
    if constexpr (kBytes) {
      if (shape.is_bfloat16) return __ushort_as_half(__bfloat16_as_ushort(__float2bfloat16_rn(x)));
    }
    return tile::from_float<T>(x);
  }

  __device__ __forceinline__ void store_part(const Segment& segment, int num_rows) const {
    const tile::wgmma::ThreadIndex thread;
#pragma unroll
    for (int own = 0; own < kOwnRows; ++own) {
      const int row = of_lane(own);
      if (row >= num_rows) continue;
      const std::int64_t part = std::int64_t{segment.part} * kBlockM + row;
      const float row_max = softmax[own].row_max * scale();
      const float factor = unrounded(softmax[own].row_max, scale());
      if (thread.index < 4)
        static_cast<PartStats*>(shape.stats)[part] = {row_max, softmax[own].row_sum * factor};
      float* const out = shape.outs + part * kWideValues + own_column();
#pragma unroll
      for (int i = 0; i < 2 * kOutBlocks; ++i) {
        out[i / 2 * kBlockColumns + i % 2 * kSecond] = acc_o[i / 2][score_of(own, i % 2)] * factor;
      }
    }
  }

  // Joins the part with that of the cluster's other block, which has the rest of the keys. Of two
  // neighbouring rows of a lane, the one that the block keeps is the first then.
  __device__ __forceinline__ void join() {
    constexpr int kPairs = kOwnRows / 2, kOfPair = kOutBlocks / 2;
    const Join join{tile::wgmma::ThreadIndex().index, Memory::kMap.slots, ring.join_ready(),
                    ring.joined()};
    join.begin(kPairs * kOfPair + kPairs / 2);
    join.wait_ready();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
#pragma unroll
      for (int i = 0; i < kOfPair; ++i) {
        float x[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const float* const pair = acc_o[2 * i + e / 2] + 4 * j + e % 2 * 2;
          x[e] = Join::given(pair[0], pair[1]);
        }
        join.give(j * kOfPair + i, x);
      }
    }
#pragma unroll
    for (int j = 0; j < kPairs; j += 2) {
      float stats[4];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const tile::OnlineSoftmax* const pair = softmax + 2 * (j + e);
        stats[2 * e] = Join::given(pair[0].row_max, pair[1].row_max);
        stats[2 * e + 1] = Join::given(pair[0].row_sum, pair[1].row_sum);
      }
      join.give(kPairs * kOfPair + j / 2, stats);
    }
    join.wait_brought();
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      float stats[4], x[4];
      join.get(kPairs * kOfPair + j / 2, stats);
      tile::OnlineSoftmax& row = softmax[2 * j];
      row.row_max = Join::kept(row.row_max, softmax[2 * j + 1].row_max);
      row.row_sum = Join::kept(row.row_sum, softmax[2 * j + 1].row_sum);
      const float other_max = stats[j % 2 * 2], other_sum = stats[j % 2 * 2 + 1];
      const float factor = row.raise_max(other_max, scale());
      const float weight = row.probability(other_max, scale());
      row.row_sum = fmaf(weight, other_sum, row.row_sum);
#pragma unroll
      for (int i = 0; i < kOfPair; ++i) {
        join.get(j * kOfPair + i, x);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          float* const pair = acc_o[2 * i + e / 2] + 4 * j + e % 2 * 2;
          pair[0] = fmaf(weight, x[e], factor * Join::kept(pair[0], pair[1]));
        }
      }
    }
  }
  using Join = Exchange<kWarpgroupThreads>;
};

}  // namespace dlattn::sm90_latent
