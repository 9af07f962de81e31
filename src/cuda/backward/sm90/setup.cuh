#pragma once

#include "cuda/backward/sm90/params.h"
#include "cuda/backward/sm90/traits.h"
#include "cuda/plan/backward_workspace.h"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/ptx/tma.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/seqlen.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

// Shared by producer and consumers: which keys a block has and which queries it walks, shared
// memory and the barriers between them.
namespace dlattn::backward_sm90 {

using tile::wgmma::ThreadIndex;

constexpr int kScoresBarrier = 1;  // of both consumers: dS of a step is complete
constexpr int kDqBarrier = 2;      // and the next: of a consumer: its part of dQ is complete
constexpr int kStartBarrier = 4;   // of both: the first one's first dS is complete

struct TensorMaps {
  // One box: 64 columns of a step's rows of q and dout, or of a block's keys.
  ptx::TensorMap q, k, v, dout;

  __device__ __forceinline__ void prefetch() const {
    ptx::prefetch_tensor_map(k);
    ptx::prefetch_tensor_map(v);
    ptx::prefetch_tensor_map(q);
    ptx::prefetch_tensor_map(dout);
  }
};

// lse in base 2 and delta of two neighbouring queries.
struct alignas(16) RowStatsPair {
  float lse[2], delta[2];
};

// The index of a head's first row of a sequence in the workspace.
__device__ __forceinline__ std::int64_t first_row(const Problem& p, int num_heads, int batch,
                                                  int head, int start_q) {
  if (p.cu_seqlens_q) return head * p.padded_rows + first_padded_row(start_q, batch);
  return (static_cast<std::int64_t>(batch) * num_heads + head) * p.padded_rows;
}

// Block `index` of all heads: those of a group of heads (walk_heads()) in turn, the first ones of
// each before the second ones. Under causality most queries see the first keys: so the longest
// begin, and the group ends with the short ones of all its heads.
__device__ __forceinline__ tile::WorkTile work_place(const Problem& p, unsigned index) {
  const unsigned m_blocks = p.num_m_blocks.divisor();
  const unsigned group = p.heads_together.quotient(p.num_m_blocks.quotient(index));
  const unsigned first_head = min(group * p.heads_together.divisor(), p.heads_in_groups);
  const Divider& heads = first_head < p.heads_in_groups ? p.heads_together : p.heads_left;
  const unsigned within = index - first_head * m_blocks;
  const unsigned m_block = heads.quotient(within);
  const unsigned head = first_head + within - m_block * heads.divisor();  // of all batch entries
  const unsigned batch = p.num_heads.quotient(head);
  return {static_cast<int>(m_block), static_cast<int>(head - batch * p.num_heads.divisor()),
          static_cast<int>(batch)};
}

// A tile of queries of a block's walk.
struct QueryTile {
  int pass;  // over the batch entries of the block
  int head;  // of those that share the keys
  int m;
};

// The keys of a thread block, and the tiles of queries that see one of them.
template <int kBlockM, int kBlockN>
struct Work {
  int head_kv, batch;
  int n0;                  // the first key
  int start_q, start_k;    // the sequence's first rows
  int seqlen_q, seqlen_k;  // keys in use
  int rows_k;              // rows of the sequence in k, those not in use too
  std::int64_t first_row;  // in the workspace, of the first head of q that reads head_kv
  tile::Mask mask;
  tile::Range tiles;  // of queries, that see at least one key
  tile::Range whole;  // of queries, that see all of the block's keys

  // `last_first`: the last keys of a head or of a few, then those before them.
  __device__ __forceinline__ explicit Work(const Problem& p, unsigned index, bool last_first)
      : mask(p, 0, 0) {
    const tile::WorkTile place = work_place(p, index);
    head_kv = place.head;
    batch = place.batch;
    const int n_blocks = static_cast<int>(p.num_m_blocks.divisor());
    n0 = (last_first ? n_blocks - 1 - place.m_block : place.m_block) * kBlockN;
    start_q = start_k = 0;
    seqlen_q = static_cast<int>(p.seqlen_q);
    seqlen_k = rows_k = static_cast<int>(p.seqlen_k);
    if (p.cu_seqlens_q) {
      const tile::SequenceRows queries = tile::query_rows(p, batch),
                               keys = tile::key_rows(p, batch);
      start_q = queries.start;
      seqlen_q = queries.count;
      start_k = keys.start;
      seqlen_k = keys.count;
      rows_k = tile::sequence_rows(p.cu_seqlens_k, batch, p.total_k, p.seqlen_k).count;
    }
    first_row =
        backward_sm90::first_row(p, static_cast<int>(p.num_heads.divisor()) * p.heads_per_kv_head,
                                 batch, head_kv * p.heads_per_kv_head, start_q);
    mask = tile::Mask(p, position_shift(p.causal, seqlen_q, seqlen_k), seqlen_k);
    const int last = last_key(n0);
    tiles = tiles_of_keys(n0, last);
    whole = {0, 0};
    if (last == n0 + kBlockN - 1)
      whole = whole_tiles_of({mask.column(last).begin, mask.column(n0).end}, kBlockM);
  }

  // The last key of a block that begins with `first`.
  __device__ __forceinline__ int last_key(int first) const {
    return min(first + kBlockN, seqlen_k) - 1;
  }
  // The tiles of queries that see one of the keys `first` to `last`.
  __device__ __forceinline__ tile::Range tiles_of_keys(int first, int last) const {
    tile::Range seen = {max(mask.column(first).begin, 0), min(mask.column(last).end, seqlen_q)};
    if (last < first) seen.end = seen.begin;
    return tiles_of(seen, kBlockM);
  }

  // The tiles that the block walks, of all heads and passes, and the one of a number.
  __device__ __forceinline__ unsigned num_tiles(const Problem& p) const {
    if (tiles.begin >= tiles.end) return 0;
    return static_cast<unsigned>((tiles.end - tiles.begin) * p.heads_per_kv_head * p.passes);
  }
  __device__ __forceinline__ QueryTile query_tile(const Problem& p, unsigned use) const {
    const auto count = static_cast<unsigned>(tiles.end - tiles.begin);
    const auto group = static_cast<unsigned>(p.heads_per_kv_head);
    const unsigned head = use / count, pass = head / group;
    return {static_cast<int>(pass), static_cast<int>(head - pass * group),
            tiles.begin + static_cast<int>(use - head * count)};
  }

  // Where the head of a tile begins among the workspace's rows.
  __device__ __forceinline__ std::int64_t head_row(const Problem& p, const QueryTile& tile) const {
    const std::int64_t head = tile.head + tile.pass * p.heads_per_entry;
    return first_row + head * p.padded_rows;
  }

  __device__ __forceinline__ bool has_rows() const { return n0 < rows_k; }
  __device__ __forceinline__ bool is_edge(int m) const { return m < whole.begin || m >= whole.end; }
};

template <int kHeadDim, bool kSoftcap>
struct Shared {
  static constexpr SmemMap kMap = smem_map(kHeadDim, kSoftcap);
  static constexpr int kBlockM = block_m(kHeadDim, kSoftcap);
  static constexpr int kBlockN = block_n(kHeadDim);
  using BlockWork = Work<kBlockM, kBlockN>;
  static constexpr int kKeyBytes = tile_bytes(kBlockN, kHeadDim);
  static constexpr int kQueryBytes = tile_bytes(kBlockM, kHeadDim);
  static constexpr int kScoreBytes = score_bytes(kHeadDim, kSoftcap);

  ptx::SmemAddress base;
  tile::Ring<kNumStages> queries;  // of Q, dO and their rows' numbers
  ptx::SmemAddress keys_full;      // of K and V
  // In deterministic kernels, full while the block may add to a step's dQ, and what says that all
  // warps of the consumers have.
  tile::Ring<kNumStages> may_add;
  ptx::SmemAddress added;
  // Where dS will be, bias and mask, and then dS itself, which copiers read too (score_tiles.cuh),
  // and consumers that do not meet (late_consumer.cuh).
  tile::Ring<kNumStages> score_tiles, score_gradients;
  ptx::SmemAddress keys_empty;  // K and V of a pass have been read
  // Where a warp sends dQ (dq_sender.cuh): the consumers' parts of a step's, in turn, and whether
  // the block is the first to come to a tile.
  tile::Ring<kNumConsumers> dq_parts;
  tile::Ring<1> dq_claims;

  __device__ __forceinline__ explicit Shared(ptx::SmemAddress base)
      : base(base),
        queries(base + kMap.mbarriers),
        keys_full(base + kMap.mbarriers + queries.kBytes),
        may_add(base + kMap.may_add),
        added(base + kMap.may_add + may_add.kBytes),
        score_tiles(base + kMap.score_tiles),
        score_gradients(base + kMap.score_tiles + score_tiles.kBytes),
        keys_empty(base + kMap.score_tiles + 2 * score_tiles.kBytes),
        dq_parts(base + kMap.dq_barriers),
        dq_claims(base + kMap.dq_barriers + dq_parts.kBytes) {}

  __device__ __forceinline__ ptx::SmemAddress k() const { return base + kMap.k; }
  __device__ __forceinline__ ptx::SmemAddress v() const { return base + kMap.v; }
  __device__ __forceinline__ ptx::SmemAddress q(unsigned use) const {
    return base + kMap.q + queries.stage(use) * kQueryBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress dout(unsigned use) const {
    return base + kMap.dout + queries.stage(use) * kQueryBytes;
  }
  // Wide heads have P there, before dS.
  __device__ __forceinline__ ptx::SmemAddress p(unsigned use) const {
    return base + kMap.ds + queries.stage(use) * kScoreBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress ds(unsigned use) const {
    return p(use) + (kScoreBytes - tile_bytes(kBlockM, kBlockN));
  }
  __device__ __forceinline__ RowStatsPair* row_stats(unsigned use) const {
    return reinterpret_cast<RowStatsPair*>(ptx::dynamic_smem() + kMap.row_stats) +
           queries.stage(use) * (kBlockM / 2);
  }

  __device__ __forceinline__ unsigned& is_first() const {
    static_assert(decltype(dq_parts)::kBytes + decltype(dq_claims)::kBytes + 4 == kDqBarrierBytes,
                  "");
    return *reinterpret_cast<unsigned*>(ptx::dynamic_smem() + kMap.dq_barriers + dq_parts.kBytes +
                                        dq_claims.kBytes);
  }

  // The block's work lies in shared memory: registers are scarce.
  __device__ __forceinline__ BlockWork& work() const {
    static_assert(sizeof(BlockWork) <= kWorkBytes, "");
    return *reinterpret_cast<BlockWork*>(ptx::dynamic_smem() + kMap.work);
  }

  // By one thread, before anything else: a stage is filled by TMA and the producer's lanes, and
  // released warp by warp.
  __device__ __forceinline__ void init() const {
    queries.init(kNumConsumers * 4, 1 + 32);
    ptx::mbarrier_init(keys_full, 1);
    ptx::fence_mbarrier_init();
  }
  // `copiers`: threads that bring bias and mask.
  __device__ __forceinline__ void init_score_tiles(int copiers) const {
    score_tiles.init(kNumConsumers * 4, copiers);
    score_gradients.init(1, kNumConsumers * 4);
    ptx::mbarrier_init(keys_empty, kNumConsumers * 4);
  }
  __device__ __forceinline__ void init_dq() const {
    dq_parts.init(1, 4);
    dq_claims.init(1);
  }
  __device__ __forceinline__ void init_late() const {
    score_gradients.init(kNumConsumers * 4, kNumConsumers * 4);
  }
  __device__ __forceinline__ void init_semaphore() const {
    may_add.init(1);
#pragma unroll
    for (int i = 0; i < kNumStages; ++i)
      ptx::mbarrier_init(added + i * ptx::kMbarrierBytes, kNumConsumers * 4);
  }

  // A warp of the consumers has added its part of a step's dQ.
  __device__ __forceinline__ void end_adding(unsigned use) const {
    __syncwarp();
    if (ThreadIndex().lane == 0)
      ptx::mbarrier_arrive(added + may_add.stage(use) * ptx::kMbarrierBytes);
  }
  __device__ __forceinline__ void wait_added(unsigned use) const {
    ptx::mbarrier_sleep(added + may_add.stage(use) * ptx::kMbarrierBytes,
                        static_cast<int>(use / kNumStages % 2));
  }
};

}  // namespace dlattn::backward_sm90
