#include "problem.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <sstream>

#include "core/backend.h"
#include "core/plan/plan.h"
#include "core/validate/validate.h"
#include "cpu/convert.h"
#include "cpu/forward/task.h"

namespace test {

using namespace dlattn;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

// Everything of one query and head that the formula needs, in the arithmetic of R.
template <typename R>
struct Row {
  std::vector<R> out;
  R lse;
};

// Plainly, by the strides alone.
double descale(const BasicTensorView<const float>& x, std::int64_t b, std::int64_t h) {
  return x.data ? x.data[b * x.batch_stride + h * x.head_stride] : 1.0;
}

}  // namespace

template <typename R>
Scores<R> scores_of(const Problem& problem, std::int64_t b, std::int64_t i, std::int64_t h) {
  const AttentionParams& p = problem.params;
  const std::int64_t len_k = problem.keys(b);
  const std::int64_t shift = p.causal == Causal::kTopLeft ? 0 : len_k - problem.rows(b);
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t batch = varlen ? 0 : b;
  const std::int64_t first_q = varlen ? p.cu_seqlens_q[b] : 0;
  const std::int64_t first_k = varlen ? p.cu_seqlens_k[b] : 0;
  const std::int64_t h_kv = h / (p.num_heads / p.num_heads_kv);
  const std::int64_t position = i + shift;
  const R q_descale = R(descale(p.q_descale, b, h / p.heads_per_q_descale));
  const R k_descale = R(descale(p.k_descale, b, h_kv));
  Scores<R> row;
  for (std::int64_t j = 0; j < len_k; ++j) {
    R s = 0;
    for (std::int64_t d = 0; d < p.head_dim; ++d) {
      s += R(problem.q.get(batch * p.q.batch_stride + (first_q + i) * p.q.row_stride +
                           h * p.q.head_stride + d)) *
           R(problem.k.get(batch * p.k.batch_stride + (first_k + j) * p.k.row_stride +
                           h_kv * p.k.head_stride + d));
    }
    s *= R(p.softmax_scale) * (q_descale * k_descale);
    R derivative = 1;
    if (p.softcap > 0) {
      const R ratio = std::tanh(s / R(p.softcap));
      s = R(p.softcap) * ratio;
      derivative = 1 - ratio * ratio;
    }
    if (p.alibi_slopes.data) {
      const double slope =
          problem.alibi.get(b * p.alibi_slopes.batch_stride + h * p.alibi_slopes.head_stride);
      const double limited = slope > 0x1p64 ? 0x1p64 : (slope < -0x1p64 ? -0x1p64 : slope);
      s -= R(limited) * R(std::llabs(position - j));
    }
    double bias = 0;
    if (p.bias.data) {
      bias = problem.bias.get(b * p.bias.batch_stride + h * p.bias.head_stride +
                              i * p.bias.row_stride + j * p.bias.col_stride);
      const bool finite = std::isfinite(s) && std::isfinite(bias);
      s += R(bias);
      if (finite && std::isinf(s)) s = std::copysign(std::numeric_limits<R>::max(), s);
    }
    bool seen = bias != -kInf;
    seen = seen && (p.causal == Causal::kNone || j <= position);
    seen = seen && (p.window_left < 0 || j >= position - p.window_left);
    seen = seen && (p.window_right < 0 || j <= position + p.window_right);
    seen = seen && (!p.mask.data || p.mask.data[b * p.mask.batch_stride + h * p.mask.head_stride +
                                                i * p.mask.row_stride + j * p.mask.col_stride]);
    row.score.push_back(seen ? s : R(-kInf));
    row.softcap_derivative.push_back(derivative);
    row.distance.push_back(std::llabs(position - j));
  }
  return row;
}

template Scores<float> scores_of(const Problem&, std::int64_t, std::int64_t, std::int64_t);
template Scores<double> scores_of(const Problem&, std::int64_t, std::int64_t, std::int64_t);

namespace {

template <typename R>
Row<R> attend(const Problem& problem, std::int64_t b, std::int64_t i, std::int64_t h) {
  const AttentionParams& p = problem.params;
  const std::int64_t batch = p.cu_seqlens_q ? 0 : b;
  const std::int64_t first_k = p.cu_seqlens_q ? p.cu_seqlens_k[b] : 0;
  const std::int64_t h_kv = h / (p.num_heads / p.num_heads_kv), len_k = problem.keys(b);
  std::vector<R> score = scores_of<R>(problem, b, i, h).score;
  const R sink = p.sinks.data ? R(problem.sinks.get(h * p.sinks.head_stride)) : R(-kInf);
  R max = sink;
  bool nothing_seen = sink == R(-kInf);
  for (const R s : score) {
    if (s > max) max = s;
    if (s != R(-kInf)) nothing_seen = false;  // so does a NaN
  }
  Row<R> row;
  row.out.assign(p.head_dim_v, R(0));
  row.lse = R(-kInf);
  if (nothing_seen) return row;
  if (std::isnan(sink)) max = sink;
  R sum = sink == max ? R(1) : std::exp(sink - max);
  for (std::int64_t j = 0; j < len_k; ++j) sum += score[j] = std::exp(score[j] - max);
  for (R& p : score) p /= sum;
  for (std::int64_t j = 0; j < len_k; ++j) {
    for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
      row.out[d] +=
          score[j] * R(problem.v.get(batch * p.v.batch_stride + (first_k + j) * p.v.row_stride +
                                     h_kv * p.v.head_stride + d));
    }
  }
  const R v_descale = R(descale(p.v_descale, b, h_kv));
  for (R& o : row.out) o *= v_descale;
  row.lse = max + std::log(sum);
  return row;
}

double rounded(DType dtype, double value) {
  Buffer one(dtype, 1);
  one.set(0, value);
  return one.get(0);
}

// An lse, which is float; a finite one stays finite.
template <typename R>
double to_lse(R lse) {
  constexpr R kLargest = std::numeric_limits<float>::max();
  if (std::isfinite(lse) && std::fabs(lse) > kLargest) lse = std::copysign(kLargest, lse);
  return static_cast<double>(lse);
}

// |got - want|, where NaN and infinities must agree.
double difference(double got, double want) {
  if (std::isnan(want)) return std::isnan(got) ? 0 : kInf;
  if (std::isinf(want)) return got == want ? 0 : kInf;
  return std::isfinite(got) ? std::fabs(got - want) : kInf;
}

template <typename Exact, typename Plain>
void fill(const Problem& problem, Reference* reference) {
  const AttentionParams& p = problem.params;
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    for (std::int64_t i = 0; i < problem.rows(b); ++i) {
      for (std::int64_t h = 0; h < p.num_heads; ++h) {
        const Row<Exact> exact = attend<Exact>(problem, b, i, h);
        const Row<Plain> plain = attend<Plain>(problem, b, i, h);
        for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
          reference->out.push_back(static_cast<double>(exact.out[d]));
          const double error = difference(rounded(p.out.dtype, static_cast<double>(plain.out[d])),
                                          reference->out.back());
          if (error > reference->plain_error) reference->plain_error = error;
        }
        reference->lse.push_back(to_lse(exact.lse));
        const double error =
            difference(static_cast<float>(to_lse(plain.lse)), reference->lse.back());
        if (error > reference->plain_lse_error) reference->plain_lse_error = error;
      }
    }
  }
}

const char* name(Layout layout) {
  switch (layout) {
    case Layout::kBshd:
      return "bshd";
    case Layout::kBhsd:
      return "bhsd";
    case Layout::kPadded:
      return "padded";
    case Layout::kBroadcast:
      return "broadcast";
  }
  return "";
}

struct Strides {
  std::int64_t batch, row, head, size;
};

Strides strides(Layout layout, bool output, std::int64_t batch, std::int64_t rows,
                std::int64_t heads, std::int64_t dim) {
  switch (layout) {
    case Layout::kBhsd:
      return {heads * rows * dim, dim, rows * dim, batch * heads * rows * dim};
    case Layout::kPadded: {
      const std::int64_t head = dim + 3, row = heads * head + 5, all = rows * row + 7;
      return {all, row, head, batch * all};
    }
    case Layout::kBroadcast:
      if (!output) return {0, dim, 0, rows * dim};
      [[fallthrough]];
    case Layout::kBshd:
      return {rows * heads * dim, heads * dim, dim, batch * rows * heads * dim};
  }
  return {};
}

std::vector<std::int32_t> offsets(const std::vector<std::int32_t>& lengths) {
  std::vector<std::int32_t> result = {0};
  for (const std::int32_t length : lengths) result.push_back(result.back() + length);
  return result;
}

// By trying them all; half-way between two, the even one.
cpu::Float8 nearest_float8(double value) {
  if (std::isnan(value)) return {0x7f};
  unsigned nearest = 0;
  double least = kInf;
  for (unsigned bits = 0; bits < 0x7f; ++bits) {
    const double distance =
        std::fabs(std::fabs(value) - cpu::to_float(cpu::Float8{static_cast<std::uint8_t>(bits)}));
    if (distance < least || (distance == least && bits % 2 == 0)) nearest = bits, least = distance;
  }
  return {static_cast<std::uint8_t>(nearest | (std::signbit(value) ? 0x80 : 0))};
}

}  // namespace

Buffer::Buffer(DType dtype, std::int64_t elements, std::int64_t offset)
    : dtype_(dtype), elements_(elements), first_(offset * size_of(dtype)) {
  bytes_.assign(static_cast<std::size_t>(2 * kGuard + first_ + elements * size_of(dtype)), 0xff);
  writable_.assign(bytes_.size(), false);
}

double Buffer::get(std::int64_t index) const {
  const char* base = static_cast<const char*>(data());
  switch (dtype_) {
    case DType::kFloat16:
      return cpu::to_float(reinterpret_cast<const cpu::Half*>(base)[index]);
    case DType::kBFloat16:
      return cpu::to_float(reinterpret_cast<const cpu::BFloat16*>(base)[index]);
    case DType::kFloat32:
      return reinterpret_cast<const float*>(base)[index];
    case DType::kFloat64:
      return reinterpret_cast<const double*>(base)[index];
    case DType::kFloat8E4M3:
      return cpu::to_float(reinterpret_cast<const cpu::Float8*>(base)[index]);
  }
  return 0;
}

void Buffer::set(std::int64_t index, double value) {
  char* base = static_cast<char*>(data());
  switch (dtype_) {
    case DType::kFloat16:
      cpu::from_float(static_cast<float>(value), &reinterpret_cast<cpu::Half*>(base)[index]);
      break;
    case DType::kBFloat16:
      cpu::from_float(static_cast<float>(value), &reinterpret_cast<cpu::BFloat16*>(base)[index]);
      break;
    case DType::kFloat32:
      reinterpret_cast<float*>(base)[index] = static_cast<float>(value);
      break;
    case DType::kFloat64:
      reinterpret_cast<double*>(base)[index] = value;
      break;
    case DType::kFloat8E4M3:
      reinterpret_cast<cpu::Float8*>(base)[index] = nearest_float8(value);
      break;
  }
}

void Buffer::fill_normal(std::mt19937& random, double mean, double deviation) {
  std::normal_distribution<double> normal(mean, deviation);
  for (std::int64_t i = 0; i < elements_; ++i) set(i, normal(random));
}

void Buffer::expect_write(std::int64_t index) {
  const std::int64_t bytes = size_of(dtype_);
  for (std::int64_t i = 0; i < bytes; ++i) writable_[kGuard + first_ + index * bytes + i] = true;
}

std::int64_t Buffer::stray_writes() const {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < bytes_.size(); ++i) count += !writable_[i] && bytes_[i] != 0xff;
  return count;
}

std::string Spec::describe() const {
  std::ostringstream text;
  text << to_string(dtype) << " b" << batch_size << " q" << seqlen_q << " k" << seqlen_k << " h"
       << num_heads << "/" << num_heads_kv << " d" << head_dim << "/" << head_dim_v << " "
       << name(layout) << " causal " << static_cast<int>(causal) << " window " << window_left << ","
       << window_right << " softcap " << softcap;
  if (bias) text << " bias" << (bias_fp32 ? "32" : "") << (bias_broadcast ? "*" : "");
  if (mask) text << " mask" << (mask_broadcast ? "*" : "");
  if (alibi) text << " alibi";
  if (sinks) text << " sinks";
  if (!lengths_q.empty()) text << " varlen";
  if (!used_k.empty()) text << " used_k";
  if (is_8_bit()) text << " out " << to_string(out_dtype);
  if (descales) text << " descales" << (q_descale_by_kv_head ? " by KV head" : "");
  return text.str();
}

Problem::Problem(const Spec& wanted) : spec(wanted) {
  std::mt19937 random(1234);
  AttentionParams& p = params;
  const bool varlen = !spec.lengths_q.empty();
  if (varlen) {
    spec.batch_size = static_cast<std::int64_t>(spec.lengths_q.size());
    cu_seqlens_q = offsets(spec.lengths_q);
    cu_seqlens_k = offsets(spec.lengths_k);
    for (const std::int32_t length : spec.lengths_q)
      spec.seqlen_q = std::max<std::int64_t>(spec.seqlen_q, length);
    for (const std::int32_t length : spec.lengths_k)
      spec.seqlen_k = std::max<std::int64_t>(spec.seqlen_k, length);
    p.cu_seqlens_q = cu_seqlens_q.data();
    p.cu_seqlens_k = cu_seqlens_k.data();
    p.seqused_k = spec.used_k.empty() ? nullptr : spec.used_k.data();
    p.total_q = cu_seqlens_q.back();
    p.total_k = cu_seqlens_k.back();
  }
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = spec.dtype;
  if (spec.is_8_bit()) p.out.dtype = spec.out_dtype;
  p.batch_size = spec.batch_size;
  p.seqlen_q = spec.seqlen_q;
  p.seqlen_k = spec.seqlen_k;
  p.num_heads = spec.num_heads;
  p.num_heads_kv = spec.num_heads_kv;
  p.head_dim = spec.head_dim;
  p.head_dim_v = spec.head_dim_v;
  p.softmax_scale = spec.softmax_scale > 0 ? spec.softmax_scale
                                           : 1.0 / std::sqrt(static_cast<double>(spec.head_dim));
  p.softcap = spec.softcap;
  p.causal = spec.causal;
  p.window_left = spec.window_left;
  p.window_right = spec.window_right;

  const std::int64_t batch = varlen ? 1 : p.batch_size;
  const std::int64_t rows_q = varlen ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = varlen ? p.total_k : p.seqlen_k;
  const std::int64_t offset = spec.layout == Layout::kPadded ? 1 : 0;
  const Strides sq = strides(spec.layout, false, batch, rows_q, p.num_heads, p.head_dim);
  const Strides sk = strides(spec.layout, false, batch, rows_k, p.num_heads_kv, p.head_dim);
  const Strides sv = strides(spec.layout, false, batch, rows_k, p.num_heads_kv, p.head_dim_v);
  const Strides so = strides(spec.layout, true, batch, rows_q, p.num_heads, p.head_dim_v);
  q = Buffer(p.q.dtype, sq.size, offset);
  k = Buffer(p.q.dtype, sk.size, offset);
  v = Buffer(p.q.dtype, sv.size, offset);
  q.fill_normal(random, 0.3, 1.0);
  k.fill_normal(random, 0.2, 1.0);
  v.fill_normal(random, 0.5, 1.0);
  p.q.data = q.data(), p.k.data = k.data(), p.v.data = v.data();
  p.q.batch_stride = sq.batch, p.q.row_stride = sq.row, p.q.head_stride = sq.head;
  p.k.batch_stride = sk.batch, p.k.row_stride = sk.row, p.k.head_stride = sk.head;
  p.v.batch_stride = sv.batch, p.v.row_stride = sv.row, p.v.head_stride = sv.head;
  p.out.batch_stride = so.batch, p.out.row_stride = so.row, p.out.head_stride = so.head;
  p.lse.head_stride = rows_q + (offset ? 3 : 0);
  p.lse.batch_stride = p.num_heads * p.lse.head_stride;

  if (spec.bias) {
    p.bias.dtype = spec.bias_fp32 ? DType::kFloat32 : p.q.dtype;
    const std::int64_t heads = spec.bias_broadcast ? 1 : p.num_heads;
    bias = Buffer(p.bias.dtype, p.batch_size * heads * p.seqlen_q * p.seqlen_k);
    bias.fill_normal(random, 0.1, 1.0);
    p.bias.data = bias.data();
    p.bias.col_stride = 1;
    p.bias.row_stride = p.seqlen_k;
    p.bias.head_stride = spec.bias_broadcast ? 0 : p.seqlen_q * p.seqlen_k;
    p.bias.batch_stride = heads * p.seqlen_q * p.seqlen_k;
  }
  if (spec.mask) {
    const std::int64_t rows = spec.mask_broadcast ? 1 : p.seqlen_q;
    mask.resize(static_cast<std::size_t>(p.batch_size * p.num_heads * rows * p.seqlen_k));
    for (std::uint8_t& m : mask) m = random() % 3 != 0 ? 1 + random() % 255 : 0;
    p.mask.data = mask.data();
    p.mask.col_stride = 1;
    p.mask.row_stride = spec.mask_broadcast ? 0 : p.seqlen_k;
    p.mask.head_stride = rows * p.seqlen_k;
    p.mask.batch_stride = p.num_heads * rows * p.seqlen_k;
  }
  if (spec.alibi) {
    alibi = Buffer(DType::kFloat32, p.batch_size * p.num_heads);
    for (std::int64_t i = 0; i < alibi.size(); ++i) alibi.set(i, 0.02 * static_cast<double>(i + 1));
    p.alibi_slopes.data = static_cast<const float*>(alibi.data());
    p.alibi_slopes.batch_stride = p.num_heads;
    p.alibi_slopes.head_stride = 1;
  }
  if (spec.sinks) {
    sinks = Buffer(DType::kFloat32, 2 * p.num_heads);
    sinks.fill_normal(random, 1.0, 2.0);
    p.sinks.data = static_cast<const float*>(sinks.data());
    p.sinks.head_stride = 2;
  }
  if (spec.descales) {
    const auto fill = [&](Buffer* buffer, BasicTensorView<const float>* view, std::int64_t heads) {
      *buffer = Buffer(DType::kFloat32, p.batch_size * heads * 2);  // every second one
      for (std::int64_t i = 0; i < buffer->size(); ++i)
        buffer->set(i, std::exp2(static_cast<double>(random() % 1000) / 500.0 - 1.5));
      view->data = static_cast<const float*>(buffer->data());
      view->batch_stride = 2 * heads, view->head_stride = 2;
    };
    if (spec.q_descale_by_kv_head) p.heads_per_q_descale = p.num_heads / p.num_heads_kv;
    fill(&q_descale, &p.q_descale, p.num_heads / p.heads_per_q_descale);
    fill(&k_descale, &p.k_descale, p.num_heads_kv);
    fill(&v_descale, &p.v_descale, p.num_heads_kv);
  }
  poison();
}

void Problem::poison() {
  AttentionParams& p = params;
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t batch = varlen ? 1 : p.batch_size;
  const std::int64_t rows_q = varlen ? p.total_q : p.seqlen_q;
  out =
      Buffer(p.out.dtype, strides(spec.layout, true, batch, rows_q, p.num_heads, p.head_dim_v).size,
             spec.layout == Layout::kPadded ? 1 : 0);
  lse = Buffer(DType::kFloat32, batch * p.lse.batch_stride);
  p.out.data = out.data();
  p.lse.data = spec.lse ? static_cast<float*>(lse.data()) : nullptr;
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    for (std::int64_t i = 0; i < rows(b); ++i) {
      for (std::int64_t h = 0; h < p.num_heads; ++h) {
        for (std::int64_t d = 0; d < p.head_dim_v; ++d) out.expect_write(out_index(b, i, h, d));
        if (spec.lse) lse.expect_write(lse_index(b, h, i));
      }
    }
  }
}

std::int64_t Problem::rows(std::int64_t b) const {
  return spec.lengths_q.empty() ? params.seqlen_q : cu_seqlens_q[b + 1] - cu_seqlens_q[b];
}

std::int64_t Problem::keys(std::int64_t b) const {
  if (!spec.used_k.empty()) return spec.used_k[b];
  return spec.lengths_q.empty() ? params.seqlen_k : cu_seqlens_k[b + 1] - cu_seqlens_k[b];
}

std::int64_t Problem::out_index(std::int64_t b, std::int64_t i, std::int64_t h,
                                std::int64_t d) const {
  const bool varlen = !spec.lengths_q.empty();
  return (varlen ? 0 : b * params.out.batch_stride) +
         ((varlen ? cu_seqlens_q[b] : 0) + i) * params.out.row_stride + h * params.out.head_stride +
         d;
}

std::int64_t Problem::lse_index(std::int64_t b, std::int64_t h, std::int64_t i) const {
  const bool varlen = !spec.lengths_q.empty();
  return (varlen ? 0 : b * params.lse.batch_stride) + h * params.lse.head_stride +
         (varlen ? cu_seqlens_q[b] : 0) + i;
}

Reference::Reference(const Problem& problem) {
  if (problem.params.q.dtype == DType::kFloat64) {
    fill<long double, double>(problem, this);
  } else {
    fill<double, float>(problem, this);
  }
}

Errors errors_of(const Problem& problem, const Reference& reference) {
  const AttentionParams& p = problem.params;
  Errors errors;
  std::size_t at = 0, row = 0;
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    for (std::int64_t i = 0; i < problem.rows(b); ++i) {
      for (std::int64_t h = 0; h < p.num_heads; ++h) {
        for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
          const double error =
              difference(problem.out.get(problem.out_index(b, i, h, d)), reference.out[at++]);
          if (error > errors.out) errors.out = error;
        }
        const double want = reference.lse[row++];
        if (!problem.spec.lse) continue;
        const double error = difference(problem.lse.get(problem.lse_index(b, h, i)), want);
        if (error > errors.lse) errors.lse = error;
      }
    }
  }
  return errors;
}

std::string run_and_judge(Problem& problem, const Reference& reference, const char* isa,
                          int num_threads) {
  problem.poison();
  const DType dtype = problem.params.q.dtype;
  Options options;
  options.num_threads = num_threads;
  core::validate(problem.params);
  const Plan plan = core::make_plan(problem.params, cpu_device(isa), options);
  cpu::forward(problem.params, plan);

  // Twice the error of the plain formula in the same arithmetic, plus a few roundings for where
  // that had luck.
  const double unit = dtype == DType::kFloat64 ? 0x1p-52 : 0x1p-23;
  const Errors errors = errors_of(problem, reference);
  std::ostringstream wrong;
  if (!(errors.out <= 2 * reference.plain_error + 8 * unit)) {
    wrong << "out is off by " << errors.out << ", the plain formula by " << reference.plain_error
          << "; ";
  }
  if (!(errors.lse <= 2 * reference.plain_lse_error + 8 * 0x1p-23)) {
    wrong << "lse is off by " << errors.lse << ", the plain formula by "
          << reference.plain_lse_error << "; ";
  }
  if (!std::isfinite(reference.plain_error) || !std::isfinite(reference.plain_lse_error))
    wrong << "the plain formula has no finite error, so it bounds nothing; ";
  if (problem.out.stray_writes())
    wrong << problem.out.stray_writes() << " bytes about out were overwritten; ";
  if (problem.lse.stray_writes())
    wrong << problem.lse.stray_writes() << " bytes about lse were overwritten; ";
  if (wrong.str().empty()) return {};
  return problem.spec.describe() + " on " + isa + ", " + std::to_string(num_threads) +
         " thread(s): " + wrong.str();
}

DeviceInfo cpu_device(const char* isa) {
  DeviceInfo device;
  device.name = "CPU";
  device.num_threads = 2;
  device.isa = isa;
  return device;
}

std::vector<const char*> isas() {
  std::vector<const char*> result;
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    try {
      cpu::kernels_for(isa);
      result.push_back(isa);
    } catch (const UnsupportedError&) {
    }
  }
  return result;
}

}  // namespace test
