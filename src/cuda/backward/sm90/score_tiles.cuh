#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/backward/sm90/dq_semaphore.cuh"
#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/ptx/reduce_vector.cuh"
#include "cuda/tile/vec.cuh"

// Bias and mask. The idle warps of the producer's warpgroup bring them, for each tile of queries
// one tile of numbers of q's dtype that consumers add to scores: the bias, and -inf where the mask
// hides a key. It lies where dS of the same tile will, in the same order: each warp of the
// consumers reads its numbers and then writes its dS over them.
//
//   copiers     mask(i)    |empty(i)  bias(i), -inf |full(i)    mask(i + 1) ...
//   consumers   dQ(i - 2) |empty(i)                 |full(i)    P(i)   dS(i)   dQ(i) |empty(i + 2)
//
// With dbias wanted they also store dS of a tile, as it lies there rounded, before they bring the
// tile that takes its place. A bias that the batch shares has one block for all its entries, which
// walks them in passes: each thread adds to what it has stored itself.
//
// All copies are asynchronous where 8 keys are neighbours in memory, at a multiple of their bytes,
// and exist; a mask's bytes wait behind the other shared memory for the bias that they change, with
// wide heads where P will be. A thread changes what it has copied itself.
namespace dlattn::backward_sm90 {

constexpr int kNumCopiers = kWarpgroupThreads - 32;

// A bias, its gradient or a mask of one head of queries. Strides stay in the kernel's parameters:
// these warps have few registers.
template <typename Number, typename View>
struct ScoreRows {
  const View& view;
  const Number* data;  // of query 0 and key 0; null: there is none

  __device__ __forceinline__ ScoreRows(const View& view, int batch, int head)
      : view(view), data(static_cast<const Number*>(view.data)) {
    if (data) data += batch * view.batch_stride + head * view.head_stride;
  }
  // Whether 8 keys of a row, from a multiple of 8 on, are one access.
  __device__ __forceinline__ bool has_chunks() const {
    const auto bits = reinterpret_cast<std::uintptr_t>(data) / sizeof(Number) |
                      static_cast<std::uintptr_t>(view.row_stride);
    return view.col_stride == 1 && bits % 8 == 0;
  }
  __device__ __forceinline__ const Number* at(int query, int key) const {
    return data + query * view.row_stride + key * view.col_stride;
  }
};

template <typename T, int kHeadDim, bool kSoftcap>
struct ScoreTileCopier {
  using Bits = std::uint16_t;  // a bias is copied as it is
  using Words = tile::Vec<std::uint32_t, 4>;
  static constexpr int kBlockM = block_m(kHeadDim, kSoftcap), kBlockN = block_n(kHeadDim);
  static constexpr int kChunkKeys = 8, kRowChunks = kBlockN / kChunkKeys;
  static constexpr int kRowsTogether = kNumCopiers / kRowChunks;
  static_assert(kNumCopiers % kRowChunks == 0, "a thread has the same keys of each row");
  static constexpr std::uint32_t kHidden =  // -inf twice
      std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u : 0xfc00fc00u;

  const Problem& problem;
  const Shared<kHeadDim, kSoftcap>& shared;
  // The thread's chunks of a tile: those of rows row() and every kRowsTogether-th after it.
  // Unsigned, so that its shares are bits.
  __device__ __forceinline__ static unsigned thread() { return ptx::reread_thread_index() - 32; }
  __device__ __forceinline__ static int row() { return static_cast<int>(thread() / kRowChunks); }
  __device__ __forceinline__ static unsigned column() { return thread() % kRowChunks; }

  // Where the tile of a use stands. Computed anew from its number: registers are scarce.
  struct Place {
    int batch, head;  // of q
    int query;        // the tile's first one
    int key;          // the thread's
  };
  __device__ __forceinline__ Place place(unsigned use) const {
    const auto& work = shared.work();
    const QueryTile tile = work.query_tile(problem, use);
    return {work.batch + tile.pass, work.head_kv * problem.heads_per_kv_head + tile.head,
            tile.m * kBlockM, work.n0 + static_cast<int>(column()) * kChunkKeys};
  }
  __device__ __forceinline__ int keys_from(int key) const {
    return min(shared.work().seqlen_k - key, kChunkKeys);
  }

  // Where the thread's chunk of row 0 of a tile is, and that of another row.
  __device__ __forceinline__ unsigned char* mask_row(unsigned use) const {
    int offset = mask_offset(kHeadDim, kSoftcap);
    if constexpr (is_wide(kHeadDim)) offset = static_cast<int>(shared.p(use) - shared.base);
    return ptx::dynamic_smem() + offset + column() * kChunkKeys;
  }
  __device__ __forceinline__ static unsigned char* mask_chunk(unsigned char* mask, int row) {
    return mask + row * (kRowChunks * kChunkKeys);
  }
  __device__ __forceinline__ unsigned char* score_rows(unsigned use) const {
    return ptx::dynamic_smem() + (shared.ds(use) - shared.base) +
           column() / 8 * (kBlockM * kBlockRowBytes);
  }
  __device__ __forceinline__ static unsigned char* score_chunk(unsigned char* scores, int row) {
    return scores + row * kBlockRowBytes + (thread() ^ static_cast<unsigned>(row)) % 8 * 16;
  }

  // Copies the tile of a use. `to(row)`: where the thread's chunk of a row goes.
  template <typename Number, typename View, typename To>
  __device__ __forceinline__ void copy(const View& view, unsigned use, To to) const {
    const Place at = place(use);
    const ScoreRows<Number, View> rows(view, at.batch, at.head);
    const int queries = min(shared.work().seqlen_q - at.query, kBlockM);
    int i = row();
    if (rows.has_chunks() && keys_from(at.key) == kChunkKeys) {
      const Number* from = rows.at(at.query + i, at.key);
#pragma unroll 1
      for (; i < queries; i += kRowsTogether) {
        ptx::cp_async<kChunkKeys* static_cast<int>(sizeof(Number))>(to(i), from, true);
        from += kRowsTogether * view.row_stride;
      }
    }
#pragma unroll 1
    for (; i < kBlockM; i += kRowsTogether)
      copy_numbers<Number>(view, ptx::reread(use), i, reinterpret_cast<Number*>(to(i)));
  }

  // A row's, one by one; those that do not exist are 0.
  template <typename Number, typename View>
  __device__ __forceinline__ void copy_numbers(const View& view, unsigned use, int row,
                                               Number* to) const {
    const Place at = place(use);
    const ScoreRows<Number, View> rows(view, at.batch, at.head);
    const int query = at.query + row;
    const int keys = query < shared.work().seqlen_q ? keys_from(at.key) : 0;
#pragma unroll 1
    for (int e = 0; e < kChunkKeys; ++e) to[e] = e < keys ? *rows.at(query, at.key + e) : Number{0};
  }

  __device__ __forceinline__ void copy_bias(unsigned use) const {
    const TensorView& bias = problem.score_mod.bias;
    if (!bias.data) return;
    unsigned char* const scores = score_rows(use);
    copy<Bits>(bias, use, [=](int row) { return score_chunk(scores, row); });
  }
  __device__ __forceinline__ void copy_mask(unsigned use) const {
    const auto& mask = problem.score_mod.mask;
    if (!mask.data) return;
    unsigned char* const bytes = mask_row(use);
    copy<std::uint8_t>(mask, use, [=](int row) { return mask_chunk(bytes, row); });
  }

  // Two of a mask's bytes as halves of a word: ones where they are 0.
  __device__ __forceinline__ static void hidden_keys(std::uint32_t bytes,
                                                     std::uint32_t (&words)[2]) {
    const std::uint32_t low = 0x7f7f7f7fu;
    const std::uint32_t zeros = ~(((bytes & low) + low) | bytes | low);  // their highest bits
    const std::uint32_t ones = (zeros >> 7) * 0xffu;
    words[0] = ptx::permute_bytes<0x1100>(ones, 0);
    words[1] = ptx::permute_bytes<0x3322>(ones, 0);
  }

  // Once a tile's mask is in: -inf over its bias, or over zeros.
  __device__ __forceinline__ void hide(unsigned use) const {
    unsigned char *const scores = score_rows(use), *const mask = mask_row(use);
#pragma unroll 1
    for (int i = row(); i < kBlockM; i += kRowsTogether) {
      const auto bytes = *reinterpret_cast<const tile::Vec<std::uint32_t, 2>*>(mask_chunk(mask, i));
      auto* const to = reinterpret_cast<Words*>(score_chunk(scores, i));
      Words words = {};
      if (problem.score_mod.bias.data) words = *to;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        std::uint32_t hidden[2];
        hidden_keys(bytes.x[h], hidden);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          std::uint32_t& word = words.x[2 * h + e];
          word = (word & ~hidden[e]) | (kHidden & hidden[e]);
        }
      }
      *to = words;
    }
  }

  // The thread's first number of dbias in the tile of a use. Its rows are whole chunks.
  __device__ __forceinline__ Bits* dbias_at(const Place& at) const {
    const ScoreRows<Bits, MutableTensorView> rows(problem.score_mod.dbias, at.batch, at.head);
    return const_cast<Bits*>(rows.at(at.query + row(), at.key));
  }

  // Stores dS of a use, which consumers have written, as dbias, or adds it to what the thread has
  // stored in an earlier pass.
  __device__ __forceinline__ void store_dbias(unsigned use) const {
    shared.score_gradients.wait_full(use);
    const Place at = place(use);
    if (at.key >= shared.work().seqlen_k) return;
    const int queries = min(shared.work().seqlen_q - at.query, kBlockM);
    const bool adds = at.batch != shared.work().batch;
    const std::int64_t step = kRowsTogether * problem.score_mod.dbias.row_stride;
    unsigned char* const scores = score_rows(use);
    Bits* to = dbias_at(at);
#pragma unroll 1
    for (int i = row(); i < queries; i += kRowsTogether) {
      const Words words = *reinterpret_cast<const Words*>(score_chunk(scores, i));
      if (adds) {
        ptx::reduce_add_alone(reinterpret_cast<T*>(to), words.x);
      } else {
        *reinterpret_cast<Words*>(to) = words;
      }
      to += step;
    }
  }

  // Zeros in dbias where no query of a tile sees the block's keys.
  __device__ __forceinline__ void clear_dbias() const {
    const auto& work = shared.work();
    const int key = work.n0 + static_cast<int>(column()) * kChunkKeys;
    if (key >= work.seqlen_k) return;
#pragma unroll 1
    for (int h = 0; h < problem.heads_per_kv_head; ++h) {
      Bits* to = dbias_at({work.batch, work.head_kv * problem.heads_per_kv_head + h, 0, key});
#pragma unroll 1
      for (int query = row(); query < work.seqlen_q; query += kRowsTogether) {
        if (!tile::contains(work.tiles, query / kBlockM)) *reinterpret_cast<Words*>(to) = Words{};
        to += kRowsTogether * problem.score_mod.dbias.row_stride;
      }
    }
  }
};

// By all lanes of the idle warps: brings the tiles that the block walks, in its order, and takes
// dbias away. Where dQ is summed in a fixed order, warp 1 waits for a tile's turn once the tile is
// in, and warp 2 passes it on once the next tile is: consumers need that one behind their
// additions.
template <typename T, int kHeadDim, bool kSoftcap>
__device__ __forceinline__ void copy_score_tiles(const Problem& p,
                                                 const Shared<kHeadDim, kSoftcap>& shared) {
  const ScoreTileCopier<T, kHeadDim, kSoftcap> copier = {p, shared};
  const DqSemaphore<Shared<kHeadDim, kSoftcap>> semaphore = {p, shared};
  if (p.score_mod.dbias.data) copier.clear_dbias();
  if (shared.work().num_tiles(p) == 0) return;
#pragma unroll 1
  for (unsigned use = 0;; ++use) {
    const bool brings = use < shared.work().num_tiles(p);
    if (brings && !is_wide(kHeadDim)) copier.copy_mask(use);
    if (p.score_mod.dbias.data && use >= kNumStages) copier.store_dbias(use - kNumStages);
    if (brings) {
      shared.score_tiles.wait_empty(use);
      if (is_wide(kHeadDim)) copier.copy_mask(use);
      copier.copy_bias(use);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      if (p.score_mod.mask.data) copier.hide(use);
      shared.score_tiles.end_fill(use);
    }
    if (p.tickets) {
      if (threadIdx.x == 32 && brings) semaphore.wait(use);
      if (threadIdx.x == 64 && use > 0 && use <= shared.work().num_tiles(p))
        semaphore.pass(use - 1);
    }
    const unsigned behind = p.score_mod.dbias.data ? kNumStages : p.tickets ? 1 : 0;
    if (use + 1 >= shared.work().num_tiles(p) + behind) return;
  }
}

}  // namespace dlattn::backward_sm90
