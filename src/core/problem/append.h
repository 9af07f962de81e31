#pragma once

#include <cstdint>

#include "core/problem/rounding.h"
#include "core/problem/tensor_sizes.h"
#include "core/util/inline.h"
#include "dlattn/append.h"

// The numbers that append_kv() computes, and where a row goes. The one definition of it, for the
// CPU backend, kernels and their tests.
namespace dlattn {

// Sums and products that are rounded one by one: no compiler may fuse them, so that all who compute
// them have the same bits. Host code is compiled without contraction for that.
DLATTN_SHARED float rounded_product(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}
DLATTN_SHARED float rounded_sum(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}
// float64 is the CPU's alone.
inline double rounded_product(double a, double b) {
  return a * b;
}
inline double rounded_sum(double a, double b) {
  return a + b;
}

// A pair of columns, rotated in place.
template <typename Real>
DLATTN_SHARED void rotate_pair(Real cos, Real sin, Real* x0, Real* x1) {
  const Real a = *x0, b = *x1;
  *x0 = rounded_sum(rounded_product(a, cos), -rounded_product(b, sin));
  *x1 = rounded_sum(rounded_product(b, cos), rounded_product(a, sin));
}

// The byte of a signed integer: to the nearest, of two the even one; NaN is 0.
DLATTN_SHARED std::uint8_t to_int8_byte(float x) {
  if (x != x) return 0;
  const float clamped = lesser(greater(x, -128.0f), 127.0f);
  // Integers of the magnitude of 1.5 * 2^23 are one apart, and their last byte is a signed one.
  return static_cast<std::uint8_t>(bits_of(rounded_sum(clamped, 12582912.0f)));
}

// The byte of e4m3: to the nearest, of two the even one; beyond 448, infinity among them, 448.
DLATTN_SHARED std::uint8_t to_e4m3_byte(float x) {
  const std::uint32_t sign = bits_of(x) >> 24 & 0x80u;
  const std::uint32_t bits = magnitude_bits(x);
  std::uint32_t byte;
  if (bits > kInfinityBits) {
    byte = 0x7fu;
  } else if (bits >= 0x43e00000u) {  // 448
    byte = 0x7eu;
  } else if (bits >= 0x3c800000u) {  // 2^-6: normal. Exponents have a bias of 7 instead of 127
    byte = (bits + 0x7ffffu + (bits >> 20 & 1u) - 0x3c000000u) >> 20;
  } else {  // Subnormals are multiples of 2^-9, the last bit of 2^14 in fp32
    byte = bits_of(rounded_sum(float_of_bits(bits), 0x1p14f)) - 0x46800000u;
  }
  return static_cast<std::uint8_t>(sign | byte);
}

DLATTN_SHARED std::uint8_t to_8_bits(float x, float scale, DType cache) {
  const float quotient = x / scale;
  return cache == DType::kInt8 ? to_int8_byte(quotient) : to_e4m3_byte(quotient);
}

// A new row: which sequence it is of, and which row of that one.
struct NewRow {
  std::int64_t sequence;
  std::int64_t index;
};

// Where it goes.
struct CacheRow {
  std::int64_t entry;  // of the cache's first dimension; < 0: nowhere
  std::int64_t row;
};

DLATTN_SHARED CacheRow nowhere() {
  return {-1, 0};
}
DLATTN_SHARED bool is_within(std::int64_t x, std::int64_t size) {
  return x >= 0 && x < size;
}

// The slot of row `n` of all.
DLATTN_SHARED std::int64_t slot_of(const AppendParams& p, std::int64_t n) {
  return p.slot_bytes == 4 ? static_cast<const std::int32_t*>(p.slots)[n]
                           : static_cast<const std::int64_t*>(p.slots)[n];
}
DLATTN_SHARED CacheRow cache_row_of_slot(const AppendParams& p, std::int64_t slot) {
  if (!is_within(slot, p.num_pages * p.page_size)) return nowhere();
  return {slot / p.page_size, slot % p.page_size};
}

// That of a position in a sequence.
DLATTN_SHARED CacheRow cache_row_at(const AppendParams& p, std::int64_t sequence,
                                    std::int64_t position) {
  if (!is_within(position, p.seqlen_k)) return nowhere();
  if (p.page_table.data) {
    const std::int64_t index = position / p.page_size;
    const std::int64_t page = p.page_table.data[sequence * p.page_table.batch_stride + index];
    if (!is_within(page, p.num_pages)) return nowhere();
    return {page, position - index * p.page_size};
  }
  if (!p.cache_batch_idx) return {sequence, position};
  const std::int64_t entry = p.cache_batch_idx[sequence];
  return {is_within(entry, p.cache_batch_size) ? entry : -1, position};
}

// The position of a new row; < 0: none, as a sequence has of a negative length.
DLATTN_SHARED std::int64_t position_of(const AppendParams& p, const NewRow& row) {
  const std::int64_t first = p.seqused_k[row.sequence];
  return first < 0 ? -1 : first + row.index;
}
// The row of the tables for a position; < 0: none.
DLATTN_SHARED std::int64_t rotary_position(const AppendParams& p, std::int64_t sequence,
                                           std::int64_t position) {
  if (position < 0) return -1;
  const std::int64_t from_first = p.leftpad_k ? position - p.leftpad_k[sequence] : position;
  const std::int64_t row = greater(from_first, std::int64_t{0});
  return row < p.rotary_positions ? row : -1;
}

// Sizes of k and v, of q, and of the caches.
inline core::TensorSizes new_sizes(const AppendParams& p, std::int64_t heads) {
  if (p.cu_seqlens_q) return {1, p.total_new, heads};
  return {p.batch_size, p.seqlen_new, heads};
}
inline core::TensorSizes cache_sizes(const AppendParams& p) {
  if (p.page_table.data || p.slots) return {p.num_pages, p.page_size, p.num_heads_kv};
  return {p.cache_batch_idx ? p.cache_batch_size : p.batch_size, p.seqlen_k, p.num_heads_kv};
}
// New rows, of all sequences.
inline std::int64_t num_new_rows(const AppendParams& p) {
  return p.cu_seqlens_q ? p.total_new : p.batch_size * p.seqlen_new;
}

}  // namespace dlattn
