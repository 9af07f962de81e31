#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/backend.h"
#include "cpu/convert.h"

namespace dlattn::cpu {
namespace {

template <typename T>
void attend_row(const AttentionParams& p, std::int64_t b, std::int64_t h, std::int64_t i, std::int64_t first_q,
                std::int64_t len_q, std::int64_t first_k, std::int64_t len_k, std::vector<double>& score) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t bb = varlen ? 0 : b;
  const std::int64_t h_kv = h / (p.num_heads / p.num_heads_kv);
  const std::int64_t shift = p.causal == Causal::kTopLeft ? 0 : len_k - len_q;
  const T* q = static_cast<const T*>(p.q) + bb * p.q_batch_stride + (first_q + i) * p.q_row_stride + h * p.q_head_stride;
  double max = p.sinks ? p.sinks[h * p.sinks_stride] : -kInf;
  for (std::int64_t j = 0; j < len_k; ++j) {
    const T* k =
        static_cast<const T*>(p.k) + bb * p.k_batch_stride + (first_k + j) * p.k_row_stride + h_kv * p.k_head_stride;
    double s = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      s += static_cast<double>(to_float(q[d])) * static_cast<double>(to_float(k[d]));
    }
    s *= p.softmax_scale;
    if (p.softcap > 0) s = p.softcap * std::tanh(s / p.softcap);
    if (p.alibi_slopes) {
      s -= static_cast<double>(p.alibi_slopes[b * p.alibi_batch_stride + h * p.alibi_head_stride]) *
           static_cast<double>(std::abs(i + shift - j));
    }
    if (p.bias) {
      const std::int64_t at =
          b * p.bias_batch_stride + h * p.bias_head_stride + i * p.bias_row_stride + j * p.bias_col_stride;
      s += p.bias_dtype == DType::kFloat32 ? static_cast<const float*>(p.bias)[at]
                                           : static_cast<double>(to_float(static_cast<const T*>(p.bias)[at]));
    }
    const bool hidden =
        (p.causal != Causal::kNone && j > i + shift) || (p.window_left >= 0 && j < i + shift - p.window_left) ||
        (p.window_right >= 0 && j > i + shift + p.window_right) ||
        (p.mask && !p.mask[b * p.mask_batch_stride + h * p.mask_head_stride + i * p.mask_row_stride +
                           j * p.mask_col_stride]);
    score[j] = hidden ? -kInf : s;
    max = std::max(max, score[j]);
  }
  const double base = max == -kInf ? 0 : max;
  double sum = p.sinks ? std::exp(p.sinks[h * p.sinks_stride] - base) : 0;
  for (std::int64_t j = 0; j < len_k; ++j) sum += score[j] = std::exp(score[j] - base);
  T* out =
      static_cast<T*>(p.out) + bb * p.out_batch_stride + (first_q + i) * p.out_row_stride + h * p.out_head_stride;
  for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
    double o = 0;
    for (std::int64_t j = 0; j < len_k; ++j) {
      const T* v =
          static_cast<const T*>(p.v) + bb * p.v_batch_stride + (first_k + j) * p.v_row_stride + h_kv * p.v_head_stride;
      if (score[j] != 0) o += score[j] * static_cast<double>(to_float(v[d]));
    }
    from_float(static_cast<decltype(to_float(T{}))>(sum == 0 ? 0 : o / sum), &out[d]);
  }
  if (p.lse) {
    p.lse[bb * p.lse_batch_stride + h * p.lse_head_stride + first_q + i] =
        static_cast<float>(sum == 0 ? -kInf : base + std::log(sum));
  }
}

template <typename T>
void attend(const AttentionParams& p) {
  std::vector<double> score(static_cast<std::size_t>(std::max(p.seqlen_k, p.total_k)));
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    const std::int64_t first_q = p.cu_seqlens_q ? p.cu_seqlens_q[b] : 0;
    const std::int64_t first_k = p.cu_seqlens_k ? p.cu_seqlens_k[b] : 0;
    const std::int64_t len_q = p.cu_seqlens_q ? p.cu_seqlens_q[b + 1] - first_q : p.seqlen_q;
    std::int64_t len_k = p.cu_seqlens_k ? p.cu_seqlens_k[b + 1] - first_k : p.seqlen_k;
    if (p.seqused_k) len_k = p.seqused_k[b];
    for (std::int64_t h = 0; h < p.num_heads; ++h) {
      for (std::int64_t i = 0; i < len_q; ++i) attend_row<T>(p, b, h, i, first_q, len_q, first_k, len_k, score);
    }
  }
}

}  // namespace

void plan(const AttentionParams& params, const DeviceInfo& device, int num_threads, Plan* plan) {
  plan->block_m = 1;
  plan->block_n = 1;
  plan->num_threads = num_threads > 0 ? num_threads : device.num_threads;
  plan->isa = device.isa;
  plan->grid = params.batch_size * params.num_heads * params.seqlen_q;
}

void forward(const AttentionParams& params, const Plan&) {
  switch (params.dtype) {
    case DType::kFloat16: return attend<Half>(params);
    case DType::kBFloat16: return attend<BFloat16>(params);
    case DType::kFloat32: return attend<float>(params);
    case DType::kFloat64: return attend<double>(params);
  }
}

}  // namespace dlattn::cpu
