#include "backward_problem.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <sstream>
#include <type_traits>

#include "core/backend.h"
#include "core/plan/plan.h"

using namespace dlattn;

namespace test {
namespace {

const char* const kNames[] = {"dq", "dk", "dv", "dbias", "dalibi_slopes", "dsinks"};

DType dtype_of(const TensorView& view) {
  return view.dtype;
}
DType dtype_of(const BasicTensorView<const float>&) {
  return DType::kFloat32;
}

// The formulas of backward.h in the arithmetic of R.
template <typename R>
class Plain {
 public:
  Plain(const Backward& backward, bool in_dtype)
      : problem_(backward.problem),
        b_(backward.params),
        p_(b_.forward),
        backward_(backward),
        in_dtype_(in_dtype),
        one_(p_.q.dtype, 1) {
    for (int n = 0; n < kGradients; ++n)
      sums_[n].assign(static_cast<std::size_t>(backward.results[n].size()), R(0));
    for (int n = kDslopes; n < kGradients; ++n)
      magnitudes_[n - kDslopes].assign(sums_[n].size(), 0.0);
    for (std::int64_t b = 0; b < p_.batch_size; ++b) {
      for (std::int64_t i = 0; i < problem_.rows(b); ++i) {
        for (std::int64_t h = 0; h < p_.num_heads; ++h) add_row(b, i, h);
      }
    }
  }

  // Rounded to the gradients' dtypes, unless R is to be exact.
  Gradients results(bool rounds) const {
    Gradients all;
    for (int n = 0; n < kGradients; ++n) {
      Buffer rounded = backward_.results[n];
      for (std::size_t i = 0; i < sums_[n].size(); ++i) {
        rounded.set(static_cast<std::int64_t>(i), static_cast<double>(sums_[n][i]));
        all[n].push_back(rounds ? rounded.get(static_cast<std::int64_t>(i))
                                : static_cast<double>(sums_[n][i]));
      }
    }
    return all;
  }

  std::array<double, kGradients> most() const {
    std::array<double, kGradients> all = {};
    for (int n = 0; n < kGradients; ++n) {
      for (std::size_t i = 0; i < sums_[n].size(); ++i) {
        const double x = n < kDslopes ? std::fabs(static_cast<double>(sums_[n][i]))
                                      : magnitudes_[n - kDslopes][i];
        all[n] = std::max(all[n], x);
      }
    }
    return all;
  }

 private:
  void add_row(std::int64_t b, std::int64_t i, std::int64_t h) {
    const test::Scores<R> row = test::scores_of<R>(problem_, b, i, h);
    const R lse = R(problem_.lse.get(problem_.lse_index(b, h, i)));
    R delta = -R(backward_.dlse.get(problem_.lse_index(b, h, i)));
    for (std::int64_t d = 0; d < p_.head_dim_v; ++d) delta += dout(b, i, h, d) * out(b, i, h, d);
    if (std::isinf(lse)) return;  // it sees nothing
    if (p_.sinks.data) {
      const R sink = R(problem_.sinks.get(h * p_.sinks.head_stride));
      add(kDsinks, h, -std::exp(sink - lse) * delta);
    }
    for (std::int64_t j = 0; j < static_cast<std::int64_t>(row.score.size()); ++j)
      add_pair(b, i, h, j, row, lse, delta);
  }

  void add_pair(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t j,
                const test::Scores<R>& row, R lse, R delta) {
    const bool varlen = p_.cu_seqlens_q != nullptr;
    const std::int64_t entry = varlen ? 0 : b, head_kv = h / (p_.num_heads / p_.num_heads_kv);
    const std::int64_t at_q = i + (varlen ? p_.cu_seqlens_q[b] : 0);
    const std::int64_t at_k = j + (varlen ? p_.cu_seqlens_k[b] : 0);
    const auto at = [entry](const auto& view, std::int64_t row, std::int64_t head) {
      return static_cast<std::size_t>(entry * view.batch_stride + row * view.row_stride +
                                      head * view.head_stride);
    };
    const std::size_t q = at(p_.q, at_q, h), k = at(p_.k, at_k, head_kv),
                      v = at(p_.v, at_k, head_kv);
    const R p = std::exp(row.score[j] - lse);
    R dp = 0;
    for (std::int64_t d = 0; d < p_.head_dim_v; ++d) {
      dp += dout(b, i, h, d) * R(problem_.v.get(v + d));
      sums_[kDv][v + d] += operand(p) * dout(b, i, h, d);
    }
    const R ds = p * (dp - delta);
    const R dx = operand(ds * row.softcap_derivative[j]) * R(p_.softmax_scale);
    for (std::int64_t d = 0; d < p_.head_dim; ++d) {
      sums_[kDq][q + d] += dx * R(problem_.k.get(k + d));
      sums_[kDk][k + d] += dx * R(problem_.q.get(q + d));
    }
    if (b_.dbias.data) {
      sums_[kDbias][b * b_.dbias.batch_stride + h * b_.dbias.head_stride + i * b_.dbias.row_stride +
                    j * b_.dbias.col_stride] += ds;
    }
    if (b_.dalibi_slopes.data)
      add(kDslopes, b * p_.num_heads + h, -operand(ds) * R(row.distance[j]));
  }

  void add(Gradient which, std::int64_t at, R term) {
    sums_[which][static_cast<std::size_t>(at)] += term;
    magnitudes_[which - kDslopes][static_cast<std::size_t>(at)] +=
        std::fabs(static_cast<double>(term));
  }
  // A number of P or dS.
  R operand(R x) {
    if (!in_dtype_) return x;
    one_.set(0, static_cast<double>(x));
    return R(one_.get(0));
  }
  R dout(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) const {
    return R(backward_.dout.get(problem_.out_index(b, i, h, d)));
  }
  R out(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) const {
    return R(problem_.out.get(problem_.out_index(b, i, h, d)));
  }

  const Problem& problem_;
  const BackwardParams& b_;
  const AttentionParams& p_;
  const Backward& backward_;
  const bool in_dtype_;
  Buffer one_;
  std::array<std::vector<R>, kGradients> sums_;
  std::vector<double> magnitudes_[kGradients - kDslopes];
};

// Whether each element of a gradient is written: all but the gaps between rows are.
std::vector<bool> written(const Backward& backward, Gradient which) {
  const AttentionParams& p = backward.params.forward;
  const bool keys = which == kDk || which == kDv;
  std::vector<bool> all(static_cast<std::size_t>(backward.results[which].size()), which > kDv);
  if (which > kDv) return all;
  const TensorView& view = which == kDq ? p.q : which == kDk ? p.k : p.v;
  const std::int64_t columns = which == kDv ? p.head_dim_v : p.head_dim;
  const std::int64_t rows =
      p.cu_seqlens_q ? (keys ? p.total_k : p.total_q) : (keys ? p.seqlen_k : p.seqlen_q);
  for (std::int64_t b = 0; b < (p.cu_seqlens_q ? 1 : p.batch_size); ++b) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t h = 0; h < (keys ? p.num_heads_kv : p.num_heads); ++h) {
        for (std::int64_t d = 0; d < columns; ++d)
          all[b * view.batch_stride + i * view.row_stride + h * view.head_stride + d] = true;
      }
    }
  }
  return all;
}

}  // namespace

Backward::Backward(const Spec& spec, unsigned bias_dims) : problem(spec) {
  AttentionParams& p = problem.params;
  cpu::forward(p, core::make_plan(p, cpu_device(""), {}));
  std::mt19937 random(77);
  dout = Buffer(p.out.dtype, problem.out.size(), spec.layout == Layout::kPadded ? 1 : 0);
  dout.fill_normal(random, 0.3, 1.0);
  dlse = Buffer(DType::kFloat32, problem.lse.size());
  dlse.fill_normal(random, 0.2, 1.0);
  params.forward = p;
  params.dout = {dout.data(),       p.out.batch_stride, p.out.row_stride,
                 p.out.head_stride, p.out.col_stride,   p.out.dtype};
  params.dlse.data = static_cast<const float*>(dlse.data());
  params.dlse.batch_stride = p.lse.batch_stride, params.dlse.row_stride = 1;
  params.dlse.head_stride = p.lse.head_stride;
  place(kDq, p.q, problem.q.size(), &params.dq);
  place(kDk, p.k, problem.k.size(), &params.dk);
  place(kDv, p.v, problem.v.size(), &params.dv);
  if (p.bias.data) place_bias(bias_dims);
  if (p.alibi_slopes.data) {
    place(kDslopes, p.alibi_slopes, p.batch_size * p.num_heads, &params.dalibi_slopes);
    params.dalibi_slopes.batch_stride = p.num_heads, params.dalibi_slopes.head_stride = 1;
  }
  if (p.sinks.data) {
    place(kDsinks, p.sinks, p.num_heads, &params.dsinks);
    params.dsinks.head_stride = 1;
  }
}

template <typename From, typename To>
void Backward::place(Gradient which, const From& like, std::int64_t size, To* view) {
  results[which] = Buffer(dtype_of(like), size);
  view->data = reinterpret_cast<decltype(view->data)>(results[which].data());
  view->batch_stride = like.batch_stride, view->row_stride = like.row_stride;
  view->head_stride = like.head_stride, view->col_stride = like.col_stride;
  if constexpr (std::is_same_v<To, MutableTensorView>) view->dtype = like.dtype;
}

void Backward::place_bias(unsigned single) {
  const AttentionParams& p = params.forward;
  std::int64_t size = 1;
  const auto stride = [&](unsigned bit, std::int64_t count) {
    if (single & bit) return std::int64_t{0};
    const std::int64_t step = size;
    size *= count;
    return step;
  };
  MutableTensorView view;
  view.col_stride = stride(1, p.seqlen_k), view.row_stride = stride(2, p.seqlen_q);
  view.head_stride = stride(4, p.num_heads), view.batch_stride = stride(8, p.batch_size);
  view.dtype = p.bias.dtype;
  results[kDbias] = Buffer(view.dtype, size);
  view.data = results[kDbias].data();
  params.dbias = view;
}

ExactGradients exact_gradients(const Backward& backward) {
  const Plain<double> plain(backward, false);
  return {plain.results(false), plain.most()};
}

Gradients plain_gradients(const Backward& backward, bool in_dtype) {
  return backward.problem.params.q.dtype == DType::kFloat64
             ? Plain<double>(backward, in_dtype).results(true)
             : Plain<float>(backward, in_dtype).results(true);
}

std::string verdict(Backward& backward, const ExactGradients& exact, const Gradients& plain) {
  const DType dtype = backward.problem.params.q.dtype;
  std::ostringstream wrong;
  for (int n = 0; n < kGradients; ++n) {
    Buffer& got = backward.results[n];
    const std::vector<bool> expected = written(backward, static_cast<Gradient>(n));
    double error = 0, plain_error = 0;
    for (std::size_t i = 0; i < exact.values[n].size(); ++i) {
      const double value = got.get(static_cast<std::int64_t>(i));
      if (!expected[i]) {
        if (!std::isnan(value)) wrong << kNames[n] << " is written between its rows; ";
        continue;
      }
      got.expect_write(static_cast<std::int64_t>(i));
      const double off = std::fabs(value - exact.values[n][i]);
      if (!(off <= error)) error = off;  // NaN stays
      plain_error = std::max(plain_error, std::fabs(plain[n][i] - exact.values[n][i]));
    }
    const double unit = dtype == DType::kFloat64 && n < kDslopes ? 0x1p-46 : 0x1p-22;
    if (!(error <= 3 * plain_error + unit * exact.most[n])) {
      wrong << kNames[n] << " is off by " << error << ", the plain formula by " << plain_error
            << ", the largest is " << exact.most[n] << "; ";
    }
    if (got.stray_writes()) wrong << "bytes about " << kNames[n] << " were overwritten; ";
  }
  return wrong.str().empty() ? "" : backward.problem.spec.describe() + ": " + wrong.str();
}

}  // namespace test
