// Computes the results of warp collectives from their lanes' operands. Compiled without
// instrumentation: the scheduler runs these over the registers of all lanes, which is an exchange
// and no data race.
#include <cuda_fp16.h>

#include <cstring>

#include "block.h"
#include "convert.h"
#include "e4m3_sum.h"

namespace simt {

void combine_shuffle(void* const (&operands)[kWarpSize], unsigned mask) {
  for (int i = 0; i < kWarpSize; ++i) {
    if (!(mask >> i & 1)) continue;
    Shuffle* lane = static_cast<Shuffle*>(operands[i]);
    if (!(mask >> lane->source & 1))
      die("a shuffle reads lane %d, which its mask %08x leaves out", lane->source, mask);
    lane->result = static_cast<Shuffle*>(operands[lane->source])->value;
  }
}

void combine_vote(void* const (&operands)[kWarpSize], unsigned mask) {
  unsigned ballot = 0;
  for (int i = 0; i < kWarpSize; ++i) {
    if (mask >> i & 1)
      ballot |= static_cast<unsigned>(static_cast<Vote*>(operands[i])->predicate) << i;
  }
  for (int i = 0; i < kWarpSize; ++i) {
    if (mask >> i & 1) static_cast<Vote*>(operands[i])->ballot = ballot;
  }
}

void combine_matrix_access(void* const (&operands)[kWarpSize], unsigned) {
  const MatrixAccess& first = *static_cast<MatrixAccess*>(operands[0]);
  for (int i = 1; i < kWarpSize; ++i) {
    const MatrixAccess& lane = *static_cast<MatrixAccess*>(operands[i]);
    if (lane.pointer != first.pointer || lane.leading_dimension != first.leading_dimension ||
        lane.layout != first.layout) {
      die("the lanes of a warp load or store a matrix with different arguments");
    }
  }
}

void combine_matrix_product(void* const (&operands)[kWarpSize], unsigned) {
  float a[256], b[256], c[256] = {};
  for (int i = 0; i < kWarpSize; ++i) {
    const MatrixProduct& lane = *static_cast<MatrixProduct*>(operands[i]);
    for (int e = 0; e < lane.num_inputs; ++e) {
      a[lane.places_a[e]] = lane.a[e];
      b[lane.places_b[e]] = lane.b[e];
    }
    for (int e = 0; e < 8; ++e) c[lane.places_c[e]] = lane.c[e];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 16; ++column)
        c[row * 16 + column] += a[row * 16 + k] * b[k * 16 + column];
    }
  }
  for (int i = 0; i < kWarpSize; ++i) {
    MatrixProduct& lane = *static_cast<MatrixProduct*>(operands[i]);
    for (int e = 0; e < 8; ++e) lane.d[e] = c[lane.places_c[e]];
  }
}

void combine_gather(void* const (&operands)[kWarpSize], unsigned) {
  std::uint64_t values[kWarpSize];
  for (int i = 0; i < kWarpSize; ++i) values[i] = static_cast<Gather*>(operands[i])->value;
  for (int i = 0; i < kWarpSize; ++i)
    std::memcpy(static_cast<Gather*>(operands[i])->all, values, sizeof values);
}

namespace {

// multiply(d, row of a, column of b) for every element of d, whose bits it gets and returns.
// kPairs: of 16 bits, two a register. Row: made of the bytes of one of a's rows or b's columns.
template <typename Row, bool kPairs = false, typename Multiply>
void combine_byte_product(void* const (&operands)[kWarpSize], Multiply multiply) {
  constexpr int kDepth = 32;
  std::uint8_t a[16][kDepth], b[8][kDepth];
  for (int i = 0; i < kWarpSize; ++i) {
    const ByteProduct& lane = *static_cast<ByteProduct*>(operands[i]);
    for (int e = 0; e < 16; ++e)
      a[i / 4 + e / 4 % 2 * 8][i % 4 * 4 + e % 4 + e / 8 * 16] = lane.a[e];
    for (int e = 0; e < 8; ++e) b[i / 4][i % 4 * 4 + e % 4 + e / 4 * 16] = lane.b[e];
  }
  Row rows[16], columns[8];
  for (int i = 0; i < 16; ++i) rows[i] = Row(a[i]);
  for (int i = 0; i < 8; ++i) columns[i] = Row(b[i]);
  for (int i = 0; i < kWarpSize; ++i) {
    ByteProduct& lane = *static_cast<ByteProduct*>(operands[i]);
    for (int e = 0; e < 4; ++e) {
      const Row &row = rows[i / 4 + e / 2 * 8], &column = columns[i % 4 * 2 + e % 2];
      if constexpr (kPairs) {
        const int shift = e % 2 * 16;
        std::uint32_t& pair = lane.d[e / 2];
        pair = (pair & 0xFFFFu << (16 - shift)) | multiply(pair >> shift & 0xFFFF, row, column)
                                                      << shift;
      } else {
        lane.d[e] = multiply(lane.d[e], row, column);
      }
    }
  }
}

// Tensor cores of 8.9 add up 16 products at a time.
struct E4m3Row {
  E4m3Numbers halves[2];

  E4m3Row() = default;
  explicit E4m3Row(const std::uint8_t* bytes) : halves{{bytes, 16}, {bytes + 16, 16}} {}
};

using S8Row = const std::uint8_t*;

}  // namespace

void combine_e4m3_product(void* const (&operands)[kWarpSize], unsigned) {
  combine_byte_product<E4m3Row>(operands,
                                [](std::uint32_t bits, const E4m3Row& a, const E4m3Row& b) {
                                  float d;
                                  std::memcpy(&d, &bits, sizeof d);
                                  for (int half = 0; half < 2; ++half)
                                    d = add_e4m3_products(d, a.halves[half], b.halves[half]);
                                  std::memcpy(&bits, &d, sizeof d);
                                  return bits;
                                });
}

void combine_e4m3_half_product(void* const (&operands)[kWarpSize], unsigned) {
  combine_byte_product<E4m3Row, true>(
      operands, [](std::uint32_t bits, const E4m3Row& a, const E4m3Row& b) {
        __half_raw raw;
        raw.x = static_cast<unsigned short>(bits);
        float d = __half2float(raw);
        for (int half = 0; half < 2; ++half)
          d = add_e4m3_products_to_half(d, a.halves[half], b.halves[half]);
        raw = __float2half_rn(d);
        return static_cast<std::uint32_t>(raw.x);
      });
}

void combine_s8_product(void* const (&operands)[kWarpSize], unsigned) {
  combine_byte_product<S8Row>(operands, [](std::uint32_t d, S8Row a, S8Row b) {
    for (int k = 0; k < 32; ++k) {
      const int product = static_cast<std::int8_t>(a[k]) * static_cast<std::int8_t>(b[k]);
      d += static_cast<std::uint32_t>(product);
    }
    return d;
  });
}

namespace {

template <float (*kConvert)(std::uint16_t)>
void multiply_small(void* const (&operands)[kWarpSize]) {
  const auto element = [](const std::uint32_t* registers, int e) {
    return kConvert(static_cast<std::uint16_t>(registers[e / 2] >> e % 2 * 16));
  };
  float a[16][16], b[16][8], d[16][8];
  for (int i = 0; i < kWarpSize; ++i) {
    const SmallProduct& lane = *static_cast<SmallProduct*>(operands[i]);
    for (int e = 0; e < 8; ++e)
      a[i / 4 + e / 2 % 2 * 8][i % 4 * 2 + e % 2 + e / 4 * 8] = element(lane.a, e);
    for (int e = 0; e < 4; ++e) b[i % 4 * 2 + e % 2 + e / 2 * 8][i / 4] = element(lane.b, e);
    for (int e = 0; e < 4; ++e) d[i / 4 + e / 2 * 8][i % 4 * 2 + e % 2] = lane.d[e];
  }
  for (int row = 0; row < 16; ++row) {
    for (int k = 0; k < 16; ++k) {
      for (int column = 0; column < 8; ++column) d[row][column] += a[row][k] * b[k][column];
    }
  }
  for (int i = 0; i < kWarpSize; ++i) {
    SmallProduct& lane = *static_cast<SmallProduct*>(operands[i]);
    for (int e = 0; e < 4; ++e) lane.d[e] = d[i / 4 + e / 2 * 8][i % 4 * 2 + e % 2];
  }
}

template <bool kTransposed>
void distribute_rows(void* const (&operands)[kWarpSize]) {
  std::uint16_t elements[4][8][8];  // matrix, row, column
  for (int i = 0; i < kWarpSize; ++i)
    std::memcpy(elements[i / 8][i % 8], static_cast<MatrixRow*>(operands[i])->row, 16);
  for (int i = 0; i < kWarpSize; ++i) {
    const int row = i / 4, column = i % 4 * 2;
    for (int m = 0; m < 4; ++m) {
      const auto& of = elements[m];
      const std::uint32_t low = kTransposed ? of[column][row] : of[row][column];
      const std::uint32_t high = kTransposed ? of[column + 1][row] : of[row][column + 1];
      static_cast<MatrixRow*>(operands[i])->registers[m] = high << 16 | low;
    }
  }
}

}  // namespace

void combine_half_product(void* const (&operands)[kWarpSize], unsigned) {
  multiply_small<from_half>(operands);
}

void combine_bfloat16_product(void* const (&operands)[kWarpSize], unsigned) {
  multiply_small<from_bfloat16>(operands);
}

void combine_ldmatrix(void* const (&operands)[kWarpSize], unsigned) {
  distribute_rows<false>(operands);
}

void combine_ldmatrix_trans(void* const (&operands)[kWarpSize], unsigned) {
  distribute_rows<true>(operands);
}

}  // namespace simt
