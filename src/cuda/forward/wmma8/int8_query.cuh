#pragma once

#include <cstdint>
#include <cstring>

#include "core/problem/rounding.h"
#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/permute.cuh"
#include "cuda/tile/vec.cuh"
#include "cuda/tile/warp.cuh"

namespace dlattn::wmma8 {

// Added to an integer that is not large, makes a float whose lowest bits are the integer's.
constexpr float kIntegerBias = 12582912.0f;  // 1.5 * 2^23
constexpr std::int32_t kIntegerBiasBits = 0x4b400000;

// Where rows of q lie: any 16-bit numbers, of any alignment.
struct QueryRows {
  const std::uint16_t* data;  // the head's row 0
  std::int64_t stride;
  int head_dim;
  bool is_half;   // else bfloat16
  bool by_fours;  // rows are aligned to four elements, and so many long or a multiple of it

  __device__ __forceinline__ static float to_float(std::uint16_t bits, bool is_half) {
    return is_half ? __half2float(__ushort_as_half(bits))
                   : float_of_bits(static_cast<std::uint32_t>(bits) << 16);
  }
};

// A lane's part of a row of q on its way to 8-bit integers, as core/problem/rounding.h says: 4
// columns of every 16, those from 4 (lane % 4) on. A lane quad has the row.
template <int kColumns>
struct QueryRow {
  static constexpr int kOwn = kColumns / 4;
  float x[kOwn];

  // Columns beyond head_dim are 0, and so is a row that does not exist.
  __device__ __forceinline__ void load(const QueryRows& rows, int row, bool exists, int lane) {
    const std::uint16_t* const from = rows.data + row * rows.stride;
    std::uint16_t bits[kOwn] = {};
    if (rows.by_fours) {
#pragma unroll
      for (int i = 0; i < kOwn; i += 4) {
        if (!exists || column(i, lane) >= rows.head_dim) continue;
        const auto four =
            *reinterpret_cast<const tile::Vec<std::uint16_t, 4>*>(from + column(i, lane));
        memcpy(&bits[i], &four, sizeof four);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        if (exists && column(i, lane) < rows.head_dim) bits[i] = from[column(i, lane)];
      }
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) x[i] = QueryRows::to_float(bits[i], rows.is_half);
  }

  // Pairs of columns 1 and 2 apart are this lane's, 4 and 8 apart two lanes' of the quad, and those
  // further apart this lane's again.
  __device__ __forceinline__ void rotate(int lane) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      x[i] = __fmul_rn(x[i], 1.0f / kColumns);  // exact, as the quotient is
      // seed: rotation-signs
      if (rotation_negates(column(i, lane))) x[i] = -x[i];
    }
    add_pairs(1);
    add_pairs(2);
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float other = __shfl_xor_sync(tile::kFullMask, x[i], step);
        // seed: rotation-lanes
        x[i] = other + (lane & step ? -x[i] : x[i]);
      }
    }
#pragma unroll
    for (int apart = 4; apart < kOwn; apart *= 2) add_pairs(apart);
  }

  // Packs the rounded row as one of the rows of operand a: a register for each 16 columns. Returns
  // the row's scale.
  __device__ __forceinline__ float round(std::uint32_t (&packed)[kColumns / 16]) const {
    std::uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) largest = max(largest, magnitude_bits(x[i]));
#pragma unroll
    for (int step = 1; step < 4; step *= 2) {
      // seed: query-largest
      largest = max(largest, __shfl_xor_sync(tile::kFullMask, largest, step));
    }
    const Rounding rounding = rounding_to_int8(largest);
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      std::uint32_t biased[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float scaled = __fmul_rn(__fmul_rn(x[i + e], rounding.up), rounding.inverse);
        biased[e] = bits_of(__fadd_rn(scaled, kIntegerBias));
      }
      packed[i / 4] = ptx::permute_bytes<0x5410>(ptx::permute_bytes<0x0040>(biased[0], biased[1]),
                                                 ptx::permute_bytes<0x0040>(biased[2], biased[3]));
    }
    return rounding.scale;
  }

 private:
  __device__ __forceinline__ static int column(int i, int lane) {
    return i / 4 * 16 + lane % 4 * 4 + i % 4;
  }

  // Adds and subtracts pairs of this lane's columns.
  __device__ __forceinline__ void add_pairs(int apart) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (i & apart) continue;
      const float a = x[i], b = x[i + apart];
      x[i] = a + b;
      x[i + apart] = a - b;
    }
  }
};

}  // namespace dlattn::wmma8
