#pragma once

#include <cstdint>

#include "core/problem/rounding.h"
#include "core/util/inline.h"
#include "dlattn/forward.h"
#include "dlattn/quantize.h"

// The contents of quantize_kv()'s buffer, and where they lie. The one definition of it, for the CPU
// backend, kernels and their tests.
namespace dlattn {

// Keys of which the mean is taken that k is stored without: few, as every thread block that
// quantises keys of a head reads them.
constexpr int kSampledKeys = 64;
// Their sum: first so many partial ones, of every so many'th key each, in order; then the upper
// half of these is added to the lower one, until one is left. Numbers that are not finite count as
// 0.
constexpr int kPartialSums = 16;

// The mean of `count` numbers. A mean counts as 0 if a difference with it could overflow, if its
// sum overflowed, if there are no numbers, or if it is so small that fp32 would lose bits of it
// divided by the number of columns. So (x - mean) / columns, rounded after each step, is what one
// FMA makes of x / columns and the quotient of the mean.
DLATTN_SHARED float mean_of_sum(float sum, int count) {
  constexpr float kLeast = 0x1p-100f, kMost = 0x1p100f;
  const float mean = sum * (1.0f / static_cast<float>(count));
  return magnitude(mean) >= kLeast && magnitude(mean) < kMost ? mean : 0.0f;
}

// The i-th of `count` sampled keys of a sequence.
constexpr std::int64_t sampled_key(std::int64_t i, std::int64_t count, std::int64_t seqlen_k) {
  return i * seqlen_k / count;
}

// Columns of a stored row of k or v: both are rounded up alike, to what a rotation takes and a
// kernel's instance holds. Columns beyond head_dim are those of zeros.
constexpr int quantized_columns(std::int64_t head_dim, std::int64_t head_dim_v) {
  const std::int64_t larger = head_dim > head_dim_v ? head_dim : head_dim_v;
  return larger <= 64 ? 64 : larger <= 128 ? 128 : 256;
}
constexpr int kMaxQuantizedHeadDim = 256;
// Whether there are rows of so many columns.
constexpr bool is_quantized_width(int columns) {
  return quantized_columns(columns, columns) == columns;
}

// Whether q and k become 8-bit integers, else e4m3.
constexpr bool multiplies_integers(Precision precision) {
  return precision == Precision::kInt8Fp8 || precision == Precision::kInt8Fp16;
}

// Keys that share a scale, counted from a sequence's first: those of a kernel's tile.
constexpr int quantized_block(Precision precision, int columns) {
  return multiplies_integers(precision) ? 64 : columns <= 64 ? 96 : 128;
}
// Bytes of a stored number of v: fp16 or e4m3.
constexpr int value_bytes(Precision precision) {
  return precision == Precision::kInt8Fp16 ? 2 : 1;
}
// Where in a stored row of v a column stands. Those of kInt8Fp16 are in the order in which
// mma.m16n8k16 makes a lane's sums those of 4 neighbours: of each 16, first columns 0 and 1 of
// every 4, then 2 and 3.
constexpr int value_place(Precision precision, int column) {
  return precision != Precision::kInt8Fp16
             ? column
             : column / 16 * 16 + column / 2 % 2 * 8 + column % 16 / 4 * 2 + column % 2;
}
// The largest number that values are scaled to: fp16's is the one that leaves small ones the most
// bits. Those of kInt8Fp8 are multiplied by probabilities of up to 64, and sums over a block fit
// fp16: 64 * 15 * 64 = 61440. So probabilities down to 2^-12 of the largest are normal numbers of
// e4m3 still, and values down to 2^-9.9.
constexpr float largest_value(Precision precision) {
  return precision == Precision::kInt8Fp8    ? 15.0f
         : precision == Precision::kInt8Fp16 ? 32768.0f
                                             : kLargestE4m3;
}
// Rows of q that share one.
constexpr int query_block(Precision precision) {
  return multiplies_integers(precision) ? 1 : 64;
}

// The parts of a buffer, which begin at these bytes. Rows of a head lie one behind the other; with
// variable length, those of all sequences, as they do in k. Aligned to kWorkspaceAlignment, all.
struct QuantizedLayout {
  int columns;           // of k and v
  int block_n;           // keys that share a scale
  std::int64_t rows;     // of a head
  std::int64_t blocks;   // scales of a head; of a varlen sequence, from first_block() on
  std::int64_t heads;    // num_heads_kv
  std::int64_t k;        // [batch][heads][rows][columns], a byte each; varlen: batch is 1
  std::int64_t v;        // the same, value_bytes() each, a row's columns as value_place() says
  std::int64_t k_scale;  // [batch][heads][blocks], float; the same
  std::int64_t v_scale;  // the same
  std::int64_t k_shift;  // [batch_size][heads][columns], float
  std::int64_t bytes;
};

// The first block of a varlen sequence whose first row is `start`: rounded, so that it takes no sum
// over the sequences before.
constexpr std::int64_t first_block(std::int64_t start, std::int64_t sequence, int block_n) {
  return start / block_n + sequence;
}

// Blocks of a head: of `rows` of each batch entry, or of all sequences of a varlen batch.
constexpr std::int64_t num_blocks(bool varlen, std::int64_t rows, std::int64_t batch_size,
                                  int block) {
  return varlen ? rows / block + batch_size : (rows + block - 1) / block;
}

constexpr std::int64_t aligned(std::int64_t bytes) {
  return (bytes + kWorkspaceAlignment - 1) / kWorkspaceAlignment * kWorkspaceAlignment;
}

inline QuantizedLayout quantized_layout(const QuantizeParams& p) {
  QuantizedLayout layout{};
  layout.columns = quantized_columns(p.head_dim, p.head_dim_v);
  layout.block_n = quantized_block(p.precision, layout.columns);
  layout.heads = p.num_heads_kv;
  const bool varlen = p.cu_seqlens_k;
  const std::int64_t batch = varlen ? 1 : p.batch_size;
  layout.rows = varlen ? p.total_k : p.seqlen_k;
  layout.blocks = num_blocks(varlen, layout.rows, p.batch_size, layout.block_n);
  const auto take = [&layout](std::int64_t bytes) {
    const std::int64_t begin = layout.bytes;
    layout.bytes += aligned(bytes);
    return begin;
  };
  const std::int64_t heads = batch * p.num_heads_kv;
  layout.k = take(heads * layout.rows * layout.columns);
  layout.v = take(heads * layout.rows * layout.columns * value_bytes(p.precision));
  layout.k_scale = take(heads * layout.blocks * 4);
  layout.v_scale = take(heads * layout.blocks * 4);
  layout.k_shift = take(p.batch_size * p.num_heads_kv * layout.columns * 4);
  return layout;
}

// The keys and values of an attention problem.
inline QuantizeParams keys_of(const AttentionParams& p) {
  QuantizeParams keys;
  keys.precision = p.precision;
  keys.k = p.k;
  keys.v = p.v;
  keys.device = p.device;
  keys.batch_size = p.batch_size;
  keys.seqlen_k = p.seqlen_k;
  keys.num_heads_kv = p.num_heads_kv;
  keys.head_dim = p.head_dim;
  keys.head_dim_v = p.head_dim_v;
  keys.cu_seqlens_k = p.cu_seqlens_k;
  keys.seqused_k = p.seqused_k;
  keys.total_k = p.total_k;
  return keys;
}

// Where the rows of q lie in 8 bits that share a scale with others (Precision::kFp8), as k does:
// the parts of a buffer that begin at these bytes.
struct QueryLayout {
  int columns;
  int block_m;          // rows that share a scale
  std::int64_t rows;    // of a head
  std::int64_t blocks;  // scales of a head; of a varlen sequence, from first_block() on
  std::int64_t heads;
  std::int64_t scale;  // [batch][heads][blocks], float, behind [batch][heads][rows][columns]
  std::int64_t bytes;
};

template <typename Params>  // AttentionParams or QuantizeTask
QueryLayout query_layout(const Params& p) {
  QueryLayout layout{};
  layout.columns = quantized_columns(p.head_dim, p.head_dim_v);
  layout.block_m = query_block(p.precision);
  layout.heads = p.num_heads;
  const bool varlen = p.cu_seqlens_q;
  const std::int64_t heads = (varlen ? 1 : p.batch_size) * p.num_heads;
  layout.rows = varlen ? p.total_q : p.seqlen_q;
  layout.blocks = num_blocks(varlen, layout.rows, p.batch_size, layout.block_m);
  layout.scale = aligned(heads * layout.rows * layout.columns);
  layout.bytes = layout.scale + aligned(heads * layout.blocks * 4);
  return layout;
}

// The task of a kernel that quantises: k and v, unless quantized_kv is null, and q, unless
// quantized_q is. Each takes a launch of its own.
struct QuantizeTask : QuantizeParams {
  bool queries = false;  // this launch takes q, else k and v
  TensorView q;
  std::int64_t num_heads = 0;
  std::int64_t seqlen_q = 0;
  const std::int32_t* cu_seqlens_q = nullptr;
  std::int64_t total_q = 0;
  void* quantized_q = nullptr;
};

// The task before attention in another precision than kInputs, into `workspace`, which has
// task_bytes(): q first, then k and v.
inline bool quantizes_queries(const AttentionParams& p) {
  return p.precision == Precision::kFp8;
}
inline bool quantizes_keys(const AttentionParams& p) {
  return p.precision != Precision::kInputs && !p.quantized_kv;
}
// Launch::variant of kQuantize.
constexpr const char* kQuantizedTensors[] = {"keys", "queries"};
inline std::int64_t task_bytes(const AttentionParams& p) {
  return (quantizes_queries(p) ? query_layout(p).bytes : 0) +
         (quantizes_keys(p) ? quantized_layout(keys_of(p)).bytes : 0);
}
inline QuantizeTask task_of(const AttentionParams& p, void* workspace) {
  QuantizeTask task;
  static_cast<QuantizeParams&>(task) = keys_of(p);
  task.q = p.q;
  task.num_heads = p.num_heads;
  task.seqlen_q = p.seqlen_q;
  task.cu_seqlens_q = p.cu_seqlens_q;
  task.total_q = p.total_q;
  auto* bytes = static_cast<char*>(workspace);
  if (quantizes_queries(p)) {
    task.quantized_q = bytes;
    bytes += query_layout(p).bytes;
  }
  if (quantizes_keys(p)) task.quantized_kv = bytes;
  return task;
}

// q as kernels read it; strides as of QuantizedView.
struct QuantizedQueries {
  const std::uint8_t* q;
  const float* scale;
  std::int64_t batch_stride, head_stride;
  std::int64_t scale_batch_stride, scale_head_stride;
};

inline QuantizedQueries view_of(const QueryLayout& layout, const void* buffer, bool varlen) {
  QuantizedQueries view;
  view.q = static_cast<const std::uint8_t*>(buffer);
  view.scale = reinterpret_cast<const float*>(view.q + layout.scale);
  view.head_stride = layout.rows * layout.columns;
  view.batch_stride = varlen ? 0 : layout.heads * view.head_stride;
  view.scale_head_stride = layout.blocks;
  view.scale_batch_stride = varlen ? 0 : layout.heads * layout.blocks;
  return view;
}

// The parts of a buffer as kernels read them: with variable length batch strides are 0, but for
// k_shift's.
struct QuantizedView {
  const std::uint8_t *k, *v;  // [batch][head][row][column]; of v value_bytes() each
  const float *k_scale, *v_scale;
  const float* k_shift;
  std::int64_t batch_stride, head_stride;              // of k and v, in numbers
  std::int64_t scale_batch_stride, scale_head_stride;  // of the scales
  std::int64_t shift_batch_stride, shift_head_stride;
};

inline QuantizedView view_of(const QuantizedLayout& layout, const void* buffer, bool varlen) {
  const auto* const bytes = static_cast<const std::uint8_t*>(buffer);
  const auto floats = [bytes](std::int64_t at) {
    return reinterpret_cast<const float*>(bytes + at);
  };
  QuantizedView view;
  view.k = bytes + layout.k;
  view.v = bytes + layout.v;
  view.k_scale = floats(layout.k_scale);
  view.v_scale = floats(layout.v_scale);
  view.k_shift = floats(layout.k_shift);
  view.head_stride = layout.rows * layout.columns;
  view.batch_stride = varlen ? 0 : layout.heads * view.head_stride;
  view.scale_head_stride = layout.blocks;
  view.scale_batch_stride = varlen ? 0 : layout.heads * layout.blocks;
  view.shift_head_stride = layout.columns;
  view.shift_batch_stride = layout.heads * layout.columns;
  return view;
}

}  // namespace dlattn
