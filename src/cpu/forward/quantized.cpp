#include "cpu/forward/quantized.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/backend.h"
#include "core/problem/tensor_sizes.h"
#include "cpu/forward/own_lengths.h"
#include "cpu/quantize/rows.h"
#include "cpu/thread_pool.h"

// Attention on q, k and v in 8 bits: what kernels multiply, dequantised to fp32 and computed as
// that. Probabilities are not rounded. For results, not for speed: it takes memory for all of q, k
// and v in fp32.
namespace dlattn::cpu {
namespace {

struct Buffers {
  std::vector<char> quantized;  // if the caller brings none
  std::vector<float> q, k, v, out, lse;
};

Rows query_rows(const AttentionParams& p, std::int64_t sequence) {
  if (!p.cu_seqlens_q) return {sequence, 0, p.seqlen_q};
  return {0, p.cu_seqlens_q[sequence], p.cu_seqlens_q[sequence + 1] - p.cu_seqlens_q[sequence]};
}

// q of a head of a sequence, rotated, rounded and back in fp32, times what products of rotated rows
// are divided by.
void dequantize_q(const AttentionParams& p, std::int64_t sequence, std::int64_t head, int columns,
                  float* to) {
  const Rows rows = query_rows(p, sequence);
  const std::int64_t together = dlattn::query_block(p.precision);
  for (std::int64_t i = 0; i < rows.count; i += together) {
    const std::int64_t block = std::min(together, rows.count - i);
    for (std::int64_t j = 0; j < block; ++j) {
      const Row16 from(p.q, rows.batch, rows.begin + i + j, head);
      float* const x = to + j * columns;
      for (int c = 0; c < columns; ++c) x[c] = c < p.head_dim ? from[c] : 0.0f;
      rotate(x, columns);
    }
    const std::uint32_t largest = largest_magnitude(to, block * columns);
    const bool int8 = multiplies_integers(p.precision);
    const Rounding rounding = int8 ? rounding_to_int8(largest) : rounding_by_power(largest);
    for (std::int64_t c = 0; c < block * columns; ++c) {
      const float rounded = int8 ? static_cast<float>(to_int8(to[c], rounding))
                                 : to_float(Float8{to_e4m3(to[c], rounding)});
      to[c] = rounded * rounding.scale * static_cast<float>(columns);
    }
    to += block * columns;
  }
}

// The i-th number of v, counted in columns as they were given.
float value(Precision precision, const std::uint8_t* v, std::int64_t i, int columns) {
  if (precision != Precision::kInt8Fp16) return to_float(Float8{v[i]});
  const int column = static_cast<int>(i % columns);
  const std::int64_t at = i - column + value_place(precision, column);
  return to_float(Half{reinterpret_cast<const std::uint16_t*>(v)[at]});
}

// k and v of a head of a sequence.
void dequantize_kv(const AttentionParams& p, const QuantizedLayout& layout,
                   const QuantizedView& view, std::int64_t sequence, std::int64_t head, float* k,
                   float* v) {
  const Rows rows = key_rows(p, sequence);
  const bool varlen = p.cu_seqlens_k;
  const std::int64_t at =
      rows.batch * view.batch_stride + head * view.head_stride + rows.begin * layout.columns;
  const std::int64_t scale_at = rows.batch * view.scale_batch_stride +
                                head * view.scale_head_stride +
                                (varlen ? first_block(rows.begin, sequence, layout.block_n) : 0);
  for (std::int64_t i = 0; i < rows.count * layout.columns; ++i) {
    const std::int64_t block = scale_at + i / layout.columns / layout.block_n;
    const std::uint8_t byte = view.k[at + i];
    const float x = multiplies_integers(p.precision)
                        ? static_cast<float>(static_cast<std::int8_t>(byte))
                        : to_float(Float8{byte});
    k[i] = x * view.k_scale[block];
    v[i] = value(p.precision, view.v, at + i, layout.columns) * view.v_scale[block];
  }
}

// The mean that was subtracted from k adds to the logits of a row, all alike: lse and the sink have
// it.
double shift_of_row(const AttentionParams& p, const QuantizedView& view, std::int64_t sequence,
                    std::int64_t row, std::int64_t head, std::int64_t head_kv) {
  const Rows rows = query_rows(p, sequence);
  const Row16 q(p.q, rows.batch, rows.begin + row, head);
  const float* const shift =
      view.k_shift + sequence * view.shift_batch_stride + head_kv * view.shift_head_stride;
  double sum = 0.0;
  for (std::int64_t c = 0; c < p.head_dim; ++c) sum += static_cast<double>(q[c]) * shift[c];
  return sum * p.softmax_scale;
}

template <typename Out>
void store(void* out, std::int64_t at, float x) {
  from_float(x, static_cast<Out*>(out) + at);
}

// out and lse of a head of a sequence from those of the keys as they are stored, without the sink.
void finish(const AttentionParams& p, const QuantizedView& view, std::int64_t sequence,
            std::int64_t head, const float* out, const float* lse) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const Rows rows = query_rows(p, sequence);
  const std::int64_t head_kv = head / (p.num_heads / p.num_heads_kv);
  const double sink =
      p.sinks.data ? static_cast<double>(p.sinks.data[head * p.sinks.head_stride]) : -kInfinity;
  for (std::int64_t i = 0; i < rows.count; ++i) {
    double row_lse = lse[i], weight = 1.0;
    if (row_lse != -kInfinity) row_lse += shift_of_row(p, view, sequence, i, head, head_kv);
    if (sink != -kInfinity) {
      weight = 1.0 / (1.0 + std::exp(sink - row_lse));
      const double largest = std::fmax(sink, row_lse);
      if (sink != sink || row_lse != row_lse) {
        row_lse += sink;
      } else if (largest == kInfinity) {
        row_lse = kInfinity;  // of a row that sees nothing too
      } else {
        row_lse = largest + std::log(std::exp(sink - largest) + std::exp(row_lse - largest));
      }
    }
    const std::int64_t at = rows.batch * p.out.batch_stride + (rows.begin + i) * p.out.row_stride +
                            head * p.out.head_stride;
    for (std::int64_t c = 0; c < p.head_dim_v; ++c) {
      const double own = out[i * p.head_dim_v + c];
      // A sink that leaves nothing of the row leaves nothing of a NaN in v.
      const float x = weight == 0.0 ? 0.0f : static_cast<float>(own * weight);
      if (p.out.dtype == DType::kFloat16)
        store<Half>(p.out.data, at + c, x);
      else
        store<BFloat16>(p.out.data, at + c, x);
    }
    if (p.lse.data) {
      p.lse.data[rows.batch * p.lse.batch_stride + head * p.lse.head_stride + rows.begin + i] =
          static_cast<float>(row_lse);
    }
  }
}

}  // namespace

AttentionParams dequantized(const AttentionParams& params) {
  AttentionParams p = params;
  p.precision = Precision::kInputs;
  p.quantized_kv = nullptr;
  p.head_dim = quantized_columns(params.head_dim, params.head_dim_v);
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat32;
  p.sinks = {};
  return p;
}

void forward_quantized(const AttentionParams& given, const Plan& plan, Poll poll) {
  const OwnLengths lengths(given);
  AttentionParams p = lengths.params();
  QuantizeParams keys = keys_of(p);
  const QuantizedLayout layout = quantized_layout(keys);
  const int columns = layout.columns;
  Buffers buffers;
  if (!p.quantized_kv) {
    buffers.quantized.resize(static_cast<std::size_t>(layout.bytes));
    keys.quantized_kv = buffers.quantized.data();
    quantize_kv(keys, plan.num_threads, poll);
    p.quantized_kv = keys.quantized_kv;
  }
  const QuantizedView view = view_of(layout, p.quantized_kv, p.cu_seqlens_k);
  const core::TensorSizes queries = core::query_sizes(p), keys_size = core::key_sizes(p);
  const auto elements = [](const core::TensorSizes& sizes, std::int64_t width) {
    return static_cast<std::size_t>(sizes.batch * sizes.heads * sizes.rows * width);
  };
  // [batch][heads][rows][columns], all.
  buffers.q.resize(elements(queries, columns));
  buffers.k.resize(elements(keys_size, columns));
  buffers.v.resize(elements(keys_size, columns));
  buffers.out.resize(elements(queries, p.head_dim_v));
  buffers.lse.resize(elements(queries, 1));
  const auto place = [](const core::TensorSizes& sizes, const Rows& rows, std::int64_t head,
                        std::int64_t width) {
    return ((rows.batch * sizes.heads + head) * sizes.rows + rows.begin) * width;
  };
  const auto for_each = [&](std::int64_t heads, auto function) {
    parallel_for(
        p.batch_size * heads, plan.num_threads,
        [&](std::int64_t index, int) { function(index / heads, index % heads); }, poll);
  };
  for_each(p.num_heads, [&](std::int64_t sequence, std::int64_t head) {
    const Rows rows = query_rows(p, sequence);
    dequantize_q(p, sequence, head, columns,
                 buffers.q.data() + place(queries, rows, head, columns));
  });
  for_each(p.num_heads_kv, [&](std::int64_t sequence, std::int64_t head) {
    const std::int64_t at = place(keys_size, key_rows(p, sequence), head, columns);
    dequantize_kv(p, layout, view, sequence, head, buffers.k.data() + at, buffers.v.data() + at);
  });

  AttentionParams inner = dequantized(p);
  const auto view_as = [](auto* view, auto* data, const core::TensorSizes& sizes,
                          std::int64_t width) {
    view->data = data;
    view->row_stride = width;
    view->head_stride = sizes.rows * width;
    view->batch_stride = sizes.heads * view->head_stride;
  };
  view_as(&inner.q, buffers.q.data(), queries, columns);
  view_as(&inner.k, buffers.k.data(), keys_size, columns);
  view_as(&inner.v, buffers.v.data(), keys_size, columns);
  view_as(&inner.out, buffers.out.data(), queries, p.head_dim_v);
  view_as(&inner.lse, buffers.lse.data(), queries, 1);
  forward(inner, plan, poll);

  for_each(p.num_heads, [&](std::int64_t sequence, std::int64_t head) {
    const Rows rows = query_rows(p, sequence);
    finish(p, view, sequence, head, buffers.out.data() + place(queries, rows, head, p.head_dim_v),
           buffers.lse.data() + place(queries, rows, head, 1));
  });
}

}  // namespace dlattn::cpu
