#include <algorithm>
#include <cstring>
#include <vector>

#include "core/backend.h"
#include "core/util/default_floats.h"
#include "cpu/forward/own_lengths.h"
#include "cpu/quantize/rows.h"
#include "cpu/thread_pool.h"

namespace dlattn::cpu {
namespace {

// One head of one sequence.
class HeadQuantizer {
 public:
  HeadQuantizer(const QuantizeParams& p, const QuantizedLayout& layout, std::int64_t batch,
                std::int64_t head)
      : p_(p), layout_(layout), head_(head), rows_(key_rows(p, batch)) {
    const bool varlen = p.cu_seqlens_k;
    const QuantizedView view = view_of(layout, p.quantized_kv, varlen);
    const std::int64_t numbers =
        rows_.batch * view.batch_stride + head * view.head_stride + rows_.begin * layout.columns;
    const std::int64_t first = varlen ? first_block(rows_.begin, batch, layout.block_n) : 0;
    const auto scales = [&](const float* at) {
      return const_cast<float*>(at) + rows_.batch * view.scale_batch_stride +
             head * view.scale_head_stride + first;
    };
    k_ = const_cast<std::uint8_t*>(view.k) + numbers;
    v_ = const_cast<std::uint8_t*>(view.v) + numbers * value_bytes(p.precision);
    k_scale_ = scales(view.k_scale);
    v_scale_ = scales(view.v_scale);
    k_shift_ = const_cast<float*>(view.k_shift) + batch * view.shift_batch_stride +
               head * view.shift_head_stride;
  }

  void run() {
    sample_shift();
    std::vector<float> block(static_cast<std::size_t>(layout_.block_n * layout_.columns));
    for (std::int64_t n = 0; n < rows_.count; n += layout_.block_n) {
      const std::int64_t keys = std::min<std::int64_t>(layout_.block_n, rows_.count - n);
      quantize_k(n, keys, block.data());
      quantize_v(n, keys, block.data());
    }
  }

 private:
  Row16 row(const TensorView& x, std::int64_t key) const {
    return Row16(x, rows_.batch, rows_.begin + key, head_);
  }

  // The mean of the sampled keys.
  void sample_shift() {
    const auto count = static_cast<int>(std::min<std::int64_t>(rows_.count, kSampledKeys));
    for (std::int64_t c = 0; c < layout_.columns; ++c) {
      float sums[kPartialSums] = {};
      for (int i = 0; i < count && c < p_.head_dim; ++i) {
        const float x = row(p_.k, sampled_key(i, count, rows_.count))[c];
        if (magnitude_bits(x) < kInfinityBits) sums[i % kPartialSums] += x;
      }
      for (int half = kPartialSums / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
      }
      k_shift_[c] = mean_of_sum(sums[0], count);
    }
  }

  void quantize_k(std::int64_t n, std::int64_t keys, float* block) {
    const int columns = layout_.columns;
    for (std::int64_t j = 0; j < keys; ++j) {
      const Row16 from = row(p_.k, n + j);
      float* const x = block + j * columns;
      for (int c = 0; c < columns; ++c) x[c] = c < p_.head_dim ? from[c] - k_shift_[c] : 0.0f;
      rotate(x, columns);
    }
    std::uint8_t* const to = k_ + n * columns;
    const std::int64_t count = keys * columns;
    if (multiplies_integers(p_.precision)) {
      const Rounding rounding = rounding_to_int8(largest_magnitude(block, count));
      for (std::int64_t i = 0; i < count; ++i)
        to[i] = static_cast<std::uint8_t>(to_int8(block[i], rounding));
      k_scale_[n / layout_.block_n] = rounding.scale;
    } else {
      k_scale_[n / layout_.block_n] = store_e4m3(block, count, kLargestE4m3, to);
    }
  }

  void quantize_v(std::int64_t n, std::int64_t keys, float* block) {
    const int columns = layout_.columns;
    for (std::int64_t j = 0; j < keys; ++j) {
      const Row16 from = row(p_.v, n + j);
      for (int c = 0; c < columns; ++c) block[j * columns + c] = c < p_.head_dim_v ? from[c] : 0.0f;
    }
    const float limit = largest_value(p_.precision);
    const std::int64_t count = keys * columns;
    float& scale = v_scale_[n / layout_.block_n];
    if (p_.precision != Precision::kInt8Fp16) {
      scale = store_e4m3(block, count, limit, v_ + n * columns);
      return;
    }
    const Rounding rounding = rounding_by_power(largest_finite(block, count), limit);
    auto* const to = reinterpret_cast<std::uint16_t*>(v_) + n * columns;
    for (std::int64_t i = 0; i < count; ++i) {
      const int column = static_cast<int>(i % columns);
      to[i - column + value_place(p_.precision, column)] = to_fp16(block[i], rounding);
    }
    scale = rounding.scale;
  }

  static std::uint32_t largest_finite(const float* x, std::int64_t count) {
    std::uint32_t largest = 0;
    for (std::int64_t i = 0; i < count; ++i) {
      const std::uint32_t bits = magnitude_bits(x[i]);
      if (bits < kInfinityBits) largest = std::max(largest, bits);
    }
    return largest;
  }

  // Returns the scale, that of the largest finite magnitude.
  static float store_e4m3(const float* x, std::int64_t count, float limit, std::uint8_t* to) {
    const Rounding rounding = rounding_by_power(largest_finite(x, count), limit);
    for (std::int64_t i = 0; i < count; ++i) to[i] = to_e4m3(x[i], rounding);
    return rounding.scale;
  }

  const QuantizeParams& p_;
  const QuantizedLayout& layout_;
  const std::int64_t head_;
  const Rows rows_;
  std::uint8_t *k_, *v_;
  float *k_scale_, *v_scale_, *k_shift_;
};

}  // namespace

void quantize_kv(const QuantizeParams& given, int num_threads, Poll poll) {
  const core::DefaultFloats floats;
  const OwnKeyLengths lengths(given);
  const QuantizeParams& p = lengths.params();
  const QuantizedLayout layout = quantized_layout(p);
  if (layout.rows == 0) return;  // without keys there may be no buffer
  parallel_for(
      p.batch_size * p.num_heads_kv, num_threads,
      [&](std::int64_t index, int) {
        HeadQuantizer(p, layout, index / p.num_heads_kv, index % p.num_heads_kv).run();
      },
      poll);
}

}  // namespace dlattn::cpu
