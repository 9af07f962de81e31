#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/backward/sm90/setup.cuh"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/tile/vec.cuh"

// Bias and mask. The idle warps of the producer's warpgroup bring them, for each tile of queries
// one tile of numbers of q's dtype that consumers add to scores: the bias, and -inf where the mask
// hides a key. It lies where dS of the same tile will, in the same order: each warp of the
// consumers reads its numbers and then writes its dS over them.
//
//   copiers     mask(i + 1)          | bias(i), -inf    mask(i + 2)          | ...
//   consumers   dQ(i - 2) |empty(i)                     | P(i)   dS(i)   dQ(i) |empty(i + 2)
//
// All copies are asynchronous where 8 keys are neighbours in memory, at a multiple of their bytes,
// and exist; a mask's bytes wait behind the other shared memory for the bias that they change. A
// thread changes what it has copied itself.
namespace dlattn::backward_sm90 {

constexpr int kNumCopiers = kWarpgroupThreads - 32;

// A bias or mask of one head of queries. Strides stay in the kernel's parameters: these warps have
// few registers.
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

template <typename T, int kHeadDim>
struct ScoreTileCopier {
  using Bits = std::uint16_t;  // a bias is copied as it is
  static constexpr int kBlockM = block_m(kHeadDim, false), kBlockN = block_n(kHeadDim);
  static constexpr int kChunkKeys = 8, kRowChunks = kBlockN / kChunkKeys;
  static constexpr int kChunks = kBlockM * kRowChunks;
  static constexpr std::uint32_t kHidden =  // -inf twice
      std::is_same_v<T, __nv_bfloat16> ? 0xff80ff80u : 0xfc00fc00u;

  const Problem& problem;
  const Shared<kHeadDim, false>& shared;
  int group_head;  // of those of q that share the keys

  // Calls use(chunk) with the thread's chunks of a tile.
  template <typename Use>
  __device__ __forceinline__ void for_each_chunk(Use use) const {
#pragma unroll 1
    for (int i = static_cast<int>(ptx::reread_thread_index()) - 32; i < kChunks; i += kNumCopiers)
      use(i);
  }

  // Copies tile m of a head's rows. `to(chunk)`: where to.
  template <typename Number, typename View, typename To>
  __device__ __forceinline__ void copy(const View& view, int m, To to) const {
    const auto& work = shared.work();
    // Computed anew for each tile: registers are scarce.
    const auto own = static_cast<int>(ptx::reread(static_cast<unsigned>(group_head)));
    const ScoreRows<Number, View> rows(view, work.batch,
                                       work.head_kv * problem.heads_per_kv_head + own);
    const bool has_chunks = rows.has_chunks();
    for_each_chunk([&](int chunk) {
      const int query = m * kBlockM + chunk / kRowChunks;
      const int key = work.n0 + chunk % kRowChunks * kChunkKeys;
      const int count = query < work.seqlen_q ? min(work.seqlen_k - key, kChunkKeys) : 0;
      const Number* const from = rows.at(query, key);
      if (has_chunks && count == kChunkKeys) {
        ptx::cp_async<kChunkKeys* static_cast<int>(sizeof(Number))>(to(chunk), from, true);
        return;
      }
      // One by one; those that do not exist are 0.
#pragma unroll 1
      for (int e = 0; e < kChunkKeys; ++e)
        reinterpret_cast<Number*>(to(chunk))[e] = e < count ? from[e * view.col_stride] : Number{0};
    });
  }

  __device__ __forceinline__ static unsigned char* mask_chunk(int chunk) {
    return ptx::dynamic_smem() + mask_offset(kHeadDim) + chunk * kChunkKeys;
  }
  __device__ __forceinline__ unsigned char* score_chunk(unsigned use, int chunk) const {
    const int row = chunk / kRowChunks, column = chunk % kRowChunks;
    return ptx::dynamic_smem() + (shared.ds(use) - shared.base) +
           (column / 8 * kBlockM + row) * kBlockRowBytes + (column ^ row) % 8 * 16;
  }

  __device__ __forceinline__ void copy_bias(unsigned use, int m) const {
    if (problem.score_mod.bias.data)
      copy<Bits>(problem.score_mod.bias, m, [&](int chunk) { return score_chunk(use, chunk); });
  }
  __device__ __forceinline__ void copy_mask(int m) const {
    if (problem.score_mod.mask.data)
      copy<std::uint8_t>(problem.score_mod.mask, m, [](int chunk) { return mask_chunk(chunk); });
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
    using Words = tile::Vec<std::uint32_t, 4>;
    for_each_chunk([&](int chunk) {
      const auto bytes = *reinterpret_cast<const tile::Vec<std::uint32_t, 2>*>(mask_chunk(chunk));
      auto* const to = reinterpret_cast<Words*>(score_chunk(use, chunk));
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
    });
  }
};

// By all lanes of the idle warps: brings the tiles that the block walks, in its order.
template <typename T, int kHeadDim>
__device__ __forceinline__ void copy_score_tiles(const Problem& p,
                                                 const Shared<kHeadDim, false>& shared) {
  const auto& work = shared.work();
  if (!p.score_mod.has_tiles()) return;
  unsigned use = 0;
#pragma unroll 1
  for (int h = 0; h < p.heads_per_kv_head; ++h) {
    const ScoreTileCopier<T, kHeadDim> copier = {p, shared, h};
    int m = work.tiles.begin;
    if (m < work.tiles.end) copier.copy_mask(m);
#pragma unroll 1
    while (m < work.tiles.end) {
      shared.score_tiles.wait_empty(use);
      copier.copy_bias(use, m);
      ptx::cp_async_commit();
      ptx::cp_async_wait<0>();
      ++m;
      if (p.score_mod.mask.data) {
        copier.hide(use);
        if (m < work.tiles.end) copier.copy_mask(m);
      }
      shared.score_tiles.end_fill(use++);
    }
  }
}

}  // namespace dlattn::backward_sm90
