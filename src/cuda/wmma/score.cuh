#pragma once

// What may stand between q.k and the softmax besides the scale, on scores in accumulators whose
// columns hold the keys in the order of RowsByLane: a lane's keys of a row are neighbours, so that
// it reads its part of a row of bias or mask by one or two wide loads. (Softcap, ALiBi, bias, then
// the mask, as params.h says.)

#include <cmath>

#include "cuda/ptx/math.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/online_softmax.cuh"
#include "cuda/tile/scheduler.cuh"
#include "cuda/tile/vec.cuh"

namespace dlattn::wmma {

// kCount neighbouring elements of a row, as they lie in memory.
template <typename Element, int kCount>
struct Run {
  using Type = Element;
  static constexpr int kBytes = kCount * static_cast<int>(sizeof(Element));
  static constexpr int kWords = kBytes / 4;
  static constexpr int kPerWord = 4 / static_cast<int>(sizeof(Element));
  static constexpr int kWide = kBytes < 16 ? kBytes : 16;  // of a load, at most
  static_assert(kBytes % 8 == 0);

  // By the widest loads; `from` is a multiple of kWide bytes.
  __device__ __forceinline__ static void load_wide(std::uint32_t* words, const Element* from) {
    using Words = tile::Vec<std::uint32_t, kWide / 4>;
#pragma unroll
    for (int i = 0; i < kBytes / kWide; ++i) {
      const Words x = reinterpret_cast<const Words*>(from)[i];
#pragma unroll
      for (int w = 0; w < kWide / 4; ++w) words[i * (kWide / 4) + w] = x.x[w];
    }
  }

  // By loads of 4 bytes, from wherever the run begins. Unless it begins at a multiple of 4 bytes,
  // up to 3 bytes before and after it are read too.
  __device__ __forceinline__ static void load_words(std::uint32_t* words, const Element* from) {
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(from);
    const std::uint32_t* aligned = reinterpret_cast<const std::uint32_t*>(address - address % 4);
    const int shift = static_cast<int>(address % 4) * 8;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = aligned[w];
    const std::uint32_t rest = shift != 0 ? aligned[kWords] : 0;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const std::uint64_t next = w + 1 < kWords ? words[w + 1] : rest;
      words[w] = static_cast<std::uint32_t>((next << 32 | words[w]) >> shift);
    }
  }

  // Moves the run by one element to the front and puts `x` at its end.
  __device__ __forceinline__ static void push(std::uint32_t* words, Element x) {
    constexpr int kBits = 32 / kPerWord;
#pragma unroll
    for (int w = 0; w < kWords; ++w) {
      const std::uint64_t next = w + 1 < kWords ? words[w + 1] : bits(x);
      words[w] = static_cast<std::uint32_t>((next << 32 | words[w]) >> kBits);
    }
  }

  // All the same.
  __device__ __forceinline__ static void load_same(std::uint32_t* words, const Element* from) {
    std::uint32_t word = bits(*from);
#pragma unroll
    for (int shift = 32 / kPerWord; shift < 32; shift *= 2) word |= word << shift;
#pragma unroll
    for (int w = 0; w < kWords; ++w) words[w] = word;
  }

  __device__ __forceinline__ static Element element(const std::uint32_t* words, int i) {
    if constexpr (kPerWord == 4) {
      return static_cast<Element>(words[i / 4] >> i % 4 * 8);
    } else {
      tile::Vec<Element, kPerWord> in_word;
      memcpy(&in_word, &words[i / kPerWord], sizeof in_word);
      return in_word.x[i % kPerWord];
    }
  }

 private:
  __device__ __forceinline__ static std::uint32_t bits(Element x) {
    std::uint32_t word = 0;
    memcpy(&word, &x, sizeof x);
    return word;
  }
};

// cap * tanh(x / cap), given 2 log2(e) x / cap; its error is some 2^-22 of cap.
__device__ __forceinline__ float softcap(float exponent, float cap) {
  return cap - __fdividef(2.0f * cap, 1.0f + ptx::exp2(exponent));
}

// The score terms of a lane's rows: row_tiles x 2 of them, 8 apart from `row` on, and kBlockN / 4
// neighbouring keys of each tile.
template <typename T, int kRowTiles, int kBlockN>
struct LaneTerms {
  static constexpr int kCount = kBlockN / 4;  // keys per row and tile
  using Mask = Run<std::uint8_t, kCount>;
  using Bias = Run<T, kCount>;
  using WideBias = Run<float, kCount>;

  // What load() has fetched: mask bytes, and bias of its dtype.
  struct Fetched {
    std::uint32_t mask[kRowTiles][2][Mask::kBytes / 4];
    std::uint32_t bias[kRowTiles][2][WideBias::kBytes / 4];
  };

  const AttentionParams& params;
  const LaunchShape& shape;
  // Where the lane's first row begins. A row that does not exist is taken for the lane's first, and
  // that, if it does not, for the last.
  const unsigned char* mask_row;
  const unsigned char* bias_row;
  float alibi_slope;
  int rows_left;  // from this lane's first one on

  __device__ __forceinline__ LaneTerms(const AttentionParams& p, const LaunchShape& shape,
                                       const tile::Work& work, int row, int seqlen_q)
      : params(p),
        shape(shape),
        alibi_slope(p.alibi_slopes ? p.alibi_slopes[work.batch * p.alibi_batch_stride +
                                                    work.head * p.alibi_head_stride]
                                   : 0.0f),
        rows_left(seqlen_q - row) {
    const int i = min(row, seqlen_q - 1);
    mask_row = p.mask + work.batch * p.mask_batch_stride + work.head * p.mask_head_stride +
               i * p.mask_row_stride;
    bias_row = static_cast<const unsigned char*>(p.bias) +
               (work.batch * p.bias_batch_stride + work.head * p.bias_head_stride +
                i * p.bias_row_stride) *
                   (p.bias_dtype == DType::kFloat32 ? 4 : 2);
  }

  // What scores must be multiplied with after apply() to be in base 2.
  __device__ __forceinline__ float scale_log2() const {
    return shape.natural ? tile::kLog2e : shape.scale_log2;
  }

  // Starts the loads of a tile that begins at key n0, of which seqlen_k - n0 exist. This lane's
  // first key is `key`.
  __device__ __forceinline__ void load(Fetched& to, int n0, int key, int seqlen_k) const {
    if (params.mask) {
      fetch<Mask>(to.mask, mask_row, params.mask_row_stride, params.mask_col_stride,
                  shape.mask_load_bytes, n0, key, seqlen_k);
    }
    if (params.bias && params.bias_dtype == DType::kFloat32) {
      fetch<WideBias>(to.bias, bias_row, params.bias_row_stride, params.bias_col_stride,
                      shape.bias_load_bytes, n0, key, seqlen_k);
    } else if (params.bias) {
      fetch<Bias>(to.bias, bias_row, params.bias_row_stride, params.bias_col_stride,
                  shape.bias_load_bytes, n0, key, seqlen_k);
    }
  }

  // From products q.k to scores: as they were, scaled to base 2 by scale_log2(), if there is
  // nothing to apply, else natural ones. `position` is that of this lane's first row minus its
  // first key.
  __device__ __forceinline__ void apply(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                        const Fetched& fetched, int position) const {
    float scale = shape.softmax_scale;  // left to be applied
    if (shape.softcap != 0.0f) {
      const float cap = shape.softcap;
      const float factor = 2.0f * __fdividef(shape.scale_log2, cap);
      for_each(acc_s, [&](float x, int, int, int) { return softcap(x * factor, cap); });
      scale = 1.0f;
    }
    if (params.alibi_slopes) {
      for_each(acc_s, [&](float x, int m, int h, int i) {
        const float distance = fabsf(static_cast<float>(position + 16 * m + 8 * h) - i);
        return fmaf(x, scale, -alibi_slope * distance);
      });
      scale = 1.0f;
    }
    if (params.bias && params.bias_dtype == DType::kFloat32) {
      for_each(acc_s, [&](float x, int m, int h, int i) {
        return fmaf(x, scale, WideBias::element(fetched.bias[m][h], i));
      });
    } else if (params.bias) {
      for_each(acc_s, [&](float x, int m, int h, int i) {
        return fmaf(x, scale, tile::to_float(Bias::element(fetched.bias[m][h], i)));
      });
    }
    if (params.mask) {
      for_each(acc_s, [&](float x, int m, int h, int i) {
        return Mask::element(fetched.mask[m][h], i) == 0 ? -INFINITY : x;
      });
    }
  }

  // Scores of keys that their rows do not see by position become -inf.
  __device__ __forceinline__ void apply_mask(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                             const tile::Mask& mask, int row, int key) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const tile::Range visible = mask.row(row + 16 * m + 8 * h, key);
#pragma unroll
        for (int i = 0; i < kCount; ++i) {
          if (!tile::contains(visible, i)) acc_s[m][i / 2][2 * h + i % 2] = -INFINITY;
        }
      }
    }
  }

 private:
  template <typename AnyRun, int kWords>
  __device__ __forceinline__ void fetch(std::uint32_t (&words)[kRowTiles][2][kWords],
                                        const unsigned char* first_row, std::int64_t row_stride,
                                        std::int64_t col_stride, int load_bytes, int n0, int key,
                                        int seqlen_k) const {
    using Element = typename AnyRun::Type;
    const auto for_each_row = [&](auto load) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = 16 * m + 8 * h;
          load(words[m][h], reinterpret_cast<const Element*>(first_row) +
                                (row < rows_left ? row * row_stride : 0));
        }
      }
    };
    // Inside a row, what a run's words hold beyond the run may be read.
    const bool inside = n0 > 0 && n0 + kBlockN + 4 <= seqlen_k;
    const bool whole = n0 + kBlockN <= seqlen_k;
    if (whole && load_bytes >= AnyRun::kWide) {
      for_each_row([&](auto& to, const Element* row) { AnyRun::load_wide(to, row + key); });
    } else if (load_bytes >= 4 ? whole : inside && load_bytes > 0) {
      for_each_row([&](auto& to, const Element* row) { AnyRun::load_words(to, row + key); });
    } else if (load_bytes == 0) {
      for_each_row([&](auto& to, const Element* row) { AnyRun::load_same(to, row); });
    } else {
      // Rolled: registers are scarce, and this is no fast path.
#pragma unroll 1
      for (int i = key; i < key + kCount; ++i) {
        for_each_row([&](auto& to, const Element* row) {
          AnyRun::push(to, i < seqlen_k ? row[i * col_stride] : Element{});
        });
      }
    }
  }

  // `term(score, m, h, i)`: of row 16 m + 8 h and this lane's key i.
  template <typename Term>
  __device__ __forceinline__ static void for_each(float (&acc_s)[kRowTiles][kBlockN / 8][4],
                                                  Term term) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& x = acc_s[m][i / 2][2 * h + i % 2];
          x = term(x, m, h, i);
        }
      }
    }
  }
};

}  // namespace dlattn::wmma
