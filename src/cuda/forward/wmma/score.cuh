#pragma once

// Score modification between q.k and the softmax, in the order of forward.h: softcap, ALiBi, bias,
// then the mask.
//
// Scores are in accumulators whose columns hold the keys in the order of RowsByLane (copy.cuh): a
// lane has 8 neighbouring keys of every 32 of a row. These 8 are called a run. A slot is the shared
// memory of one run of bias or mask. It belongs to one thread, which fills it asynchronously, a
// tile ahead. That takes no barriers and no registers.

#include <cmath>
#include <type_traits>

#include "cuda/forward/wmma/traits.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/ptx/math.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/score.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma {

// Fills and reads the slots of runs of kRunKeys elements.
template <typename Element, int kThreads>
struct RunSlots {
  static constexpr int kBytes = kRunKeys * static_cast<int>(sizeof(Element));
  static constexpr int kPiece = kBytes < 16 ? kBytes : 16;  // bytes of one access
  static constexpr int kPieces = kBytes / kPiece;

  // A row of bias or mask, from this lane's first key of a tile on.
  struct Row {
    const Element* from;
    std::int64_t stride;  // from key to key
    int exist;            // how many keys exist from there on
  };

  // Piece `i` of this thread's slot `slot`. The pieces of neighbouring threads are neighbours.
  __device__ __forceinline__ static unsigned char* piece(unsigned char* slots, int slot, int i) {
    return slots + ((slot * kPieces + i) * kThreads + threadIdx.x) * kPiece;
  }

  // Copies a run by cp.async of kCopyBytes, to which it is aligned, or stores zeros if it does not
  // exist. Copies through L1 where several of them share a sector of 32 bytes, which L2 then
  // delivers once.
  template <int kCopyBytes>
  __device__ __forceinline__ static void copy(unsigned char* slots, int slot, const Element* from,
                                              bool exists) {
#pragma unroll
    for (int at = 0; at < kBytes; at += kCopyBytes) {
      ptx::cp_async<kCopyBytes, kCopyBytes == 16 && kPieces == 1>(
          piece(slots, slot, at / kPiece) + at % kPiece,
          reinterpret_cast<const unsigned char*>(from) + at, exists);
    }
  }

  // Copies a run of any alignment by words and funnel shifts. Unless it begins at a multiple of 4,
  // up to 3 bytes before and after it are read too.
  __device__ __forceinline__ static void shift(unsigned char* slots, int slot,
                                               const Element* from) {
    constexpr int kWords = kBytes / 4;
    const int past = static_cast<int>(reinterpret_cast<std::uintptr_t>(from) % 4);  // bytes
    const auto* aligned =
        reinterpret_cast<const std::uint32_t*>(reinterpret_cast<const unsigned char*>(from) - past);
    const int off = past * 8;
    std::uint32_t words[kWords + 1];
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = aligned[w];
    words[kWords] = off != 0 ? aligned[kWords] : 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      tile::Vec<std::uint32_t, kPiece / 4> x;
#pragma unroll
      for (int w = 0; w < kPiece / 4; ++w) {
        const std::uint32_t* pair = words + i * (kPiece / 4) + w;
        x.x[w] = static_cast<std::uint32_t>((std::uint64_t{pair[1]} << 32 | pair[0]) >> off);
      }
      *reinterpret_cast<tile::Vec<std::uint32_t, kPiece / 4>*>(piece(slots, slot, i)) = x;
    }
  }

  // Copies the elements that exist one by one. The loop is unrolled kUnroll times.
  template <int kUnroll>
  __device__ __forceinline__ static void store(unsigned char* slots, int slot, const Row& row) {
#pragma unroll kUnroll
    for (int i = 0; i < kRunKeys; ++i) {
      constexpr int kPerPiece = kRunKeys / kPieces;
      Element* to = reinterpret_cast<Element*>(piece(slots, slot, i / kPerPiece)) + i % kPerPiece;
      if (i < row.exist) *to = row.from[i * row.stride];
    }
  }

  __device__ __forceinline__ static void load(Element (&to)[kRunKeys], unsigned char* slots,
                                              int slot) {
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      using Piece = tile::Vec<Element, kRunKeys / kPieces>;
      const Piece x = *reinterpret_cast<const Piece*>(piece(slots, slot, i));
#pragma unroll
      for (int e = 0; e < kRunKeys / kPieces; ++e) to[i * (kRunKeys / kPieces) + e] = x.x[e];
    }
  }
};

// The score modification of a lane's rows, kRowTiles x 2 of them, 8 apart, in tiles of kBlockN
// keys. kScarce: whether registers are scarce (traits.h).
template <typename T, int kRowTiles, int kBlockN, int kThreads, bool kScarce>
struct LaneScoreMod {
  static constexpr int kRuns = kBlockN / 32;  // per row and tile
  using MaskSlots = RunSlots<std::uint8_t, kThreads>;
  using BiasSlots = RunSlots<T, kThreads>;
  using WideBiasSlots = RunSlots<float, kThreads>;

  const AttentionParams& params;
  const LaunchShape& shape;
  unsigned char* mask_slots;
  unsigned char* bias_slots;
  // Where the lane's first row of mask and bias begins; the sequence's last row if that does not
  // exist. The lane's other rows that do not exist read its first.
  struct alignas(32) Rows {
    const unsigned char* mask;
    const unsigned char* bias;
  } rows;
  float alibi_slope;
  int rows_left;  // how many rows exist from this lane's first on
  int lane_key;   // this lane's first key of a tile

  __device__ __forceinline__ LaneScoreMod(const AttentionParams& p, const LaunchShape& shape,
                                          const tile::WorkTile& work, int row, int seqlen_q,
                                          int lane, unsigned char* slots)
      : params(p),
        shape(shape),
        mask_slots(slots),
        bias_slots(slots + (p.mask.data ? mask_slot_bytes(kRowTiles, kBlockN, kThreads) : 0)),
        alibi_slope(tile::alibi_slope(p, work)),
        rows_left(seqlen_q - row),
        lane_key(lane % 4 * kRunKeys) {
    const int i = min(row, seqlen_q - 1);
    rows.mask = p.mask.data + work.batch * p.mask.batch_stride + work.head * p.mask.head_stride +
                i * p.mask.row_stride;
    rows.bias = static_cast<const unsigned char*>(p.bias.data) +
                (work.batch * p.bias.batch_stride + work.head * p.bias.head_stride +
                 i * p.bias.row_stride) *
                    static_cast<int>(p.bias.dtype == DType::kFloat32 ? sizeof(float) : sizeof(T));
  }

  // Whether scores may be so small that a scaled row max does not tell them from -inf.
  __device__ __forceinline__ bool may_hide_tiny_scores() const {
    return params.bias.data != nullptr;
  }

  // The factor that makes scores base 2 after apply().
  __device__ __forceinline__ float scale_log2() const {
    return shape.natural ? tile::kLog2e : shape.scale_log2;
  }

  // Starts the copies of bias and mask of `rows` for the tile that begins at key n0. They are
  // complete after a commit and a wait. `first`: whether it is the first tile that the warp walks.
  __device__ __forceinline__ void copy(const Rows& rows, int n0, int seqlen_k, bool first) const {
    if (params.mask.data) {
      copy_tile<MaskSlots>(mask_slots, reinterpret_cast<const std::uint8_t*>(rows.mask),
                           params.mask.row_stride, params.mask.col_stride, shape.mask_load_bytes,
                           n0, seqlen_k, first);
    }
    if (params.bias.data && params.bias.dtype == DType::kFloat32) {
      copy_tile<WideBiasSlots>(bias_slots, reinterpret_cast<const float*>(rows.bias),
                               params.bias.row_stride, params.bias.col_stride,
                               shape.bias_load_bytes, n0, seqlen_k, first);
    } else if (params.bias.data) {
      copy_tile<BiasSlots>(bias_slots, reinterpret_cast<const T*>(rows.bias),
                           params.bias.row_stride, params.bias.col_stride, shape.bias_load_bytes,
                           n0, seqlen_k, first);
    }
  }

  // Turns products q.k into natural scores, or leaves them as they are if there is nothing to
  // apply; scale_log2() tells these apart. `position`: that of this lane's first row minus its
  // first key.
  __device__ __forceinline__ void apply(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                        int position) const {
    float scale = shape.softmax_scale;  // left to be applied
    if (shape.softcap != 0.0f) {
      for_each_run([&](int m, int h, int run) {
#pragma unroll
        for (int i = 0; i < kRunKeys; ++i) {
          float& x = score(acc_s, m, h, run, i);
          x = shape.softcap * tile::tanh(x * scale * shape.inverse_softcap);
        }
      });
      scale = 1.0f;
    }
    if (params.alibi_slopes.data) {
      for_each_run([&](int m, int h, int run) {
        const float first = static_cast<float>(position + 16 * m + 8 * h - 32 * run);
#pragma unroll
        for (int i = 0; i < kRunKeys; ++i) {
          float& x = score(acc_s, m, h, run, i);
          x = fmaf(x, scale, -alibi_slope * fabsf(first - i));
        }
      });
      scale = 1.0f;
    }
    if (params.bias.data && params.bias.dtype == DType::kFloat32) {
      add_bias<WideBiasSlots, float>(acc_s, scale);
    } else if (params.bias.data) {
      add_bias<BiasSlots, T>(acc_s, scale);
    }
    if (params.mask.data) {
      for_each_run([&](int m, int h, int run) {
        using Words = tile::Vec<std::uint32_t, kRunKeys / 4>;
        const Words visible =
            *reinterpret_cast<const Words*>(MaskSlots::piece(mask_slots, slot(m, h, run), 0));
#pragma unroll
        for (int i = 0; i < kRunKeys; ++i) {
          if ((visible.x[i / 4] & 0xffu << i % 4 * 8) == 0) score(acc_s, m, h, run, i) = -INFINITY;
        }
      });
    }
  }

  // Sets the scores of keys that their rows do not see by position to -inf. `row`: this lane's
  // first.
  __device__ __forceinline__ void apply_mask(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                             const tile::Mask& mask, int row, int n0) const {
    for_each_run([&](int m, int h, int run) {
      const tile::Range visible = mask.row(row + 16 * m + 8 * h, n0 + lane_key);
#pragma unroll
      for (int i = 0; i < kRunKeys; ++i) {
        if (!tile::contains(visible, 32 * run + i)) score(acc_s, m, h, run, i) = -INFINITY;
      }
    });
  }

 private:
  __device__ __forceinline__ static int slot(int m, int h, int run) {
    return (m * 2 + h) * kRuns + run;
  }

  // The score of row 16 m + 8 h with the i-th key of a run.
  __device__ __forceinline__ static float& score(float (&acc_s)[kRowTiles][kBlockN / 8][4], int m,
                                                 int h, int run, int i) {
    return acc_s[m][run * 4 + i / 2][2 * h + i % 2];
  }

  template <typename Visit>
  __device__ __forceinline__ static void for_each_run(Visit visit) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
#pragma unroll
        for (int run = 0; run < kRuns; ++run) visit(m, h, run);
      }
    }
  }

  template <typename Slots, typename Element>
  __device__ __forceinline__ void add_bias(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                           float scale) const {
    for_each_run([&](int m, int h, int run) {
      Element bias[kRunKeys];
      Slots::load(bias, bias_slots, slot(m, h, run));
#pragma unroll
      for (int i = 0; i < kRunKeys; ++i) {
        float& x = score(acc_s, m, h, run, i);
        x = fmaf(x, scale, tile::to_float(bias[i]));
      }
    });
  }

  template <typename Slots, typename Element>
  __device__ __forceinline__ void copy_tile(unsigned char* slots, const Element* first_row,
                                            std::int64_t row_stride, std::int64_t col_stride,
                                            int load_bytes, int n0, int seqlen_k,
                                            bool first) const {
    const int key = n0 + lane_key;
    const bool full_tile = n0 + kBlockN <= seqlen_k;
    // Whether the bytes beside a run that its words hold belong to its row, and may be read.
    const bool inside = n0 > 0 && n0 + kBlockN + 4 <= seqlen_k;
    const auto row = [&](int m, int h) {
      const int i = 16 * m + 8 * h;
      return first_row + (i < rows_left ? i * row_stride : 0);
    };
    const bool full_runs = full_tile || seqlen_k % kRunKeys == 0;
    const auto copy_runs = [&](auto bytes) {
      for_each_run([&](int m, int h, int run) {
        const bool exists = key + 32 * run < seqlen_k;
        Slots::template copy<decltype(bytes)::value>(
            slots, slot(m, h, run), row(m, h) + (exists ? key + 32 * run : 0), exists);
      });
    };
    if (load_bytes >= Slots::kPiece && full_runs) {
      copy_runs(std::integral_constant<int, Slots::kPiece>{});
    } else if (load_bytes >= 4 && full_runs) {
      copy_runs(std::integral_constant<int, 4>{});
    } else if (!kScarce && sizeof(Element) < 4 && inside && load_bytes > 0) {
      for_each_run([&](int m, int h, int run) {
        Slots::shift(slots, slot(m, h, run), row(m, h) + key + 32 * run);
      });
    } else if (load_bytes != 0 || first) {
      // Rolled: this is no fast path. A row with one element for all keys (load_bytes 0) is copied
      // for the first tile alone.
#pragma unroll 1
      for (int i = 0; i < kRowTiles * 2 * kRuns; ++i) {
        const int run_key = key + i % kRuns * 32;
        const int exist = load_bytes == 0 ? kRunKeys : seqlen_k - run_key;
        const Element* from =
            row(i / kRuns / 2, i / kRuns % 2) + min(run_key, seqlen_k) * col_stride;
        Slots::template store<kScarce ? 2 : kRunKeys>(slots, i, {from, col_stride, exist});
      }
    }
  }
};

}  // namespace dlattn::wmma
