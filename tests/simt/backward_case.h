#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "attention_test.h"
#include "core/problem/score.h"
#include "dlattn/backward.h"

// Backward passes: tensors, and the gradients in float64 and as plainly as the dtype allows.
namespace simt {

// Results and inputs of a backward pass beside its case.
struct Wanted {
  bool dout = true, dlse = true;
  bool dq = true, dk = true, dv = true, dslopes = true, dsinks = true;
  // Dimensions that dbias has: batch, heads, queries, keys. Over the others it is the sum.
  bool dbias = true;
  bool per[4] = {true, true, true, true};
  bool shared_slopes = false;  // one for all sequences
  double dout_scale = 1.0;

  std::string name() const {
    std::string text = dout ? "" : " no-dout";
    text += dlse ? "" : " no-dlse";
    text += std::string(" d:") + (dq ? "q" : "") + (dk ? "k" : "") + (dv ? "v" : "");
    if (dbias) {
      text += " dbias";
      for (const bool has : per) text += has ? "n" : "1";
    }
    return text + (shared_slopes ? " shared-slopes" : "") + (dout_scale != 1.0 ? " scaled" : "");
  }
};

// In the order of a call's results.
enum Gradient { kDq, kDk, kDv, kDbias, kDslopes, kDsinks, kNumGradients };
inline constexpr const char* kGradientNames[] = {"dq", "dk", "dv", "dbias", "dslopes", "dsinks"};

template <typename T>
struct BackwardTensors {
  Tensors<T> forward;
  Tensor<T> dout, dq, dk, dv, dbias;
  Tensor<float> dlse, dbias_float32, dslopes, dsinks;
  Tensor<float> workspace;
};

template <typename T>
void rewrite(const BackwardTensors<T>& t) {
  rewrite(t.forward), rewrite(t.dout), rewrite(t.dlse), rewrite(t.workspace);
  rewrite(t.dq), rewrite(t.dk), rewrite(t.dv), rewrite(t.dbias), rewrite(t.dbias_float32);
  rewrite(t.dslopes), rewrite(t.dsinks);
}

// out and lse are those of the forward pass, rounded.
template <typename T>
BackwardTensors<T> make_backward_tensors(const Case& c, const Wanted& w) {
  BackwardTensors<T> t;
  t.forward = make_tensors<T>(c);
  const std::int64_t rows_q = c.varlen() ? c.total_q : c.seqlen_q;
  const std::int64_t rows_k = c.varlen() ? c.total_k : c.seqlen_k;
  const std::int64_t batch = c.varlen() ? 1 : c.batch_size;
  const Layout layout = c.layout == Layout::kBroadcast ? Layout::kBhsd : c.layout;
  allocate(&t.dout, c.layout, batch, rows_q, c.num_heads, c.dim_v());
  allocate(&t.dlse, Layout::kBshd, batch, c.num_heads, rows_q, 1);
  if (w.dq) allocate(&t.dq, layout, batch, rows_q, c.num_heads, c.head_dim);
  if (w.dk) allocate(&t.dk, layout, batch, rows_k, c.num_heads_kv, c.head_dim);
  if (w.dv) allocate(&t.dv, layout, batch, rows_k, c.num_heads_kv, c.dim_v());
  const auto allocate_dbias = [&](auto* dbias) {
    const std::int64_t sizes[] = {c.batch_size, c.num_heads, c.seqlen_q, c.seqlen_k};
    std::int64_t strides[4], stride = 1;
    for (int i = 3; i >= 0; --i) {
      strides[i] = w.per[i] ? stride : 0;
      if (w.per[i]) stride *= sizes[i];
    }
    dbias->allocate({sizes[0], sizes[1], sizes[2], sizes[3]},
                    {strides[0], strides[1], strides[2], strides[3]});
  };
  if (w.dbias && c.bias == Bias::kOwnDType) allocate_dbias(&t.dbias);
  if (w.dbias && c.bias == Bias::kFloat32) allocate_dbias(&t.dbias_float32);
  if (w.dslopes && c.alibi) {
    const std::int64_t step = w.shared_slopes ? 0 : c.num_heads;
    t.dslopes.allocate({c.batch_size, c.num_heads, 1, 1}, {step, 1, 0, 0});
  }
  if (w.dsinks && c.sinks) t.dsinks.allocate({1, c.num_heads, 1, 1}, {0, 1, 0, 0});
  std::mt19937 random(c.seqlen_q + 31 * c.seqlen_k);
  t.dout.fill(&random, w.dout_scale, 0.25 * w.dout_scale);
  t.dlse.fill(&random, w.dout_scale, 0.5 * w.dout_scale);
  for (int b = 0; b < c.batch_size; ++b) {
    for (int h = 0; h < c.num_heads; ++h) {
      const auto exact = reference::attention(make_problem(c, t.forward, b, h));
      for (int i = 0; i < c.rows_q(b); ++i) {
        const int at = c.batch_index(b), row = c.start_q(b) + i;
        t.forward.lse.at(at, h, row, 0) = static_cast<float>(exact.lse[i]);
        for (int d = 0; d < c.dim_v(); ++d)
          t.forward.out.at(at, row, h, d) =
              static_cast<T>(static_cast<float>(exact.out[i * c.dim_v() + d]));
      }
    }
  }
  return t;
}

template <typename View, typename Element>
void set_view(View* view, const Tensor<Element>& tensor, int row, int head) {
  view->data = tensor.data(), view->dtype = DTypeOf<Element>::value;
  view->batch_stride = tensor.stride(0);
  view->row_stride = tensor.stride(row), view->head_stride = tensor.stride(head);
  view->col_stride = tensor.stride(3);
}

template <typename T>
dlattn::BackwardParams make_backward_params(const Case& c, const Wanted& w,
                                            const BackwardTensors<T>& t) {
  const dlattn::DType dtype = DTypeOf<T>::value;
  dlattn::BackwardParams p;
  p.forward = make_params(c, t.forward, dtype, dtype);
  p.forward.lse.row_stride = 977;  // not read: rows lie side by side
  if (w.dout) set_view(&p.dout, t.dout, 1, 2);
  if (w.dlse) set_view(&p.dlse, t.dlse, 2, 1);
  set_view(&p.dq, t.dq, 1, 2), set_view(&p.dk, t.dk, 1, 2), set_view(&p.dv, t.dv, 1, 2);
  if (t.dbias.data()) set_view(&p.dbias, t.dbias, 2, 1);
  if (t.dbias_float32.data()) set_view(&p.dbias, t.dbias_float32, 2, 1);
  set_view(&p.dalibi_slopes, t.dslopes, 2, 1), set_view(&p.dsinks, t.dsinks, 2, 1);
  return p;
}

// All gradients of a call, as tensors that have every dimension or sums.
struct AllGradients {
  Tensor<double> of[kNumGradients];
};

template <typename T>
AllGradients empty_gradients(const Case& c, const BackwardTensors<T>& t) {
  AllGradients g;
  const auto like = [](Tensor<double>* to, const auto& from) {
    if (!from.data()) return;
    to->allocate({from.size(0), from.size(1), from.size(2), from.size(3)},
                 {from.stride(0), from.stride(1), from.stride(2), from.stride(3)});
    to->for_each([](double& x) { x = 0.0; });
  };
  like(&g.of[kDq], t.dq), like(&g.of[kDk], t.dk), like(&g.of[kDv], t.dv);
  if (c.bias == Bias::kOwnDType) like(&g.of[kDbias], t.dbias);
  if (c.bias == Bias::kFloat32) like(&g.of[kDbias], t.dbias_float32);
  like(&g.of[kDslopes], t.dslopes), like(&g.of[kDsinks], t.dsinks);
  return g;
}

// Adds the gradients of one head of one sequence, computed in Real. `round`: what becomes of
// probabilities and of gradients of scores, which are factors of products.
template <typename Real, typename T>
void add_gradients(const Case& c, const Wanted& w, const BackwardTensors<T>& t, int b, int h,
                   Real (*round)(Real), AllGradients* g) {
  const reference::Problem p = make_problem(c, t.forward, b, h);
  const int at = c.batch_index(b), row0 = c.start_q(b), key0 = c.start_k(b);
  const int head_kv = h / (c.num_heads / c.num_heads_kv), dim = c.head_dim, dim_v = c.dim_v();
  const Real scale = static_cast<Real>(p.softmax_scale), cap = static_cast<Real>(p.softcap);
  const auto add = [&](Gradient which, std::int64_t i0, std::int64_t i1, std::int64_t i2,
                       std::int64_t i3, Real x) {
    if (g->of[which].data()) g->of[which].at(i0, i1, i2, i3) += x;
  };
  for (int i = 0; i < p.seqlen_q; ++i) {
    const Real lse = t.forward.lse.at(at, h, row0 + i, 0);
    Real delta = w.dlse ? -static_cast<Real>(t.dlse.at(at, h, row0 + i, 0)) : Real(0);
    std::vector<Real> dout(dim_v);
    for (int d = 0; d < dim_v; ++d) {
      dout[d] = w.dout ? static_cast<Real>(static_cast<float>(t.dout.at(at, row0 + i, h, d))) : 0;
      delta +=
          dout[d] * static_cast<Real>(static_cast<float>(t.forward.out.at(at, row0 + i, h, d)));
    }
    if (lse == -INFINITY) continue;  // the row sees nothing
    if (p.sink) {
      const auto sink = static_cast<Real>(*p.sink);
      add(kDsinks, 0, h, 0, 0, (sink >= lse ? Real(-1) : -std::exp(sink - lse)) * delta);
    }
    const auto visible = p.positions.row(i);
    for (int j = 0; j < p.seqlen_k; ++j) {
      const std::size_t pair = static_cast<std::size_t>(i) * p.seqlen_k + j;
      if (!dlattn::contains<std::int64_t>(visible, j) || (!p.mask.empty() && !p.mask[pair]))
        continue;
      Real x = 0, dp = 0;
      for (int d = 0; d < dim; ++d)
        x += static_cast<Real>(p.q[i * dim + d]) * static_cast<Real>(p.k[j * dim + d]);
      for (int d = 0; d < dim_v; ++d) dp += dout[d] * static_cast<Real>(p.v[j * dim_v + d]);
      const Real capped = dlattn::softcapped(x * scale, cap, [](Real y) { return std::tanh(y); });
      const Real tanh = cap == 0 ? Real(0) : capped / cap;
      const auto distance = static_cast<Real>(std::abs(p.positions.position(i) - j));
      Real score = capped - static_cast<Real>(p.alibi_slope) * distance;
      if (!p.bias.empty()) score += static_cast<Real>(p.bias[pair]);
      const Real probability = std::exp(score - lse), ds = probability * (dp - delta);
      // Rounded to the bias's dtype before heads or sequences add it up.
      add(kDbias, b, h, i, j, c.bias == Bias::kFloat32 ? ds : round(ds));
      add(kDslopes, b, h, 0, 0, -ds * distance);
      const Real dx = round(ds * (1 - tanh * tanh)), rounded = round(probability);
      for (int d = 0; d < dim_v; ++d) add(kDv, at, key0 + j, head_kv, d, rounded * dout[d]);
      for (int d = 0; d < dim; ++d) {
        add(kDk, at, key0 + j, head_kv, d, scale * dx * static_cast<Real>(p.q[i * dim + d]));
        add(kDq, at, row0 + i, h, d, scale * dx * static_cast<Real>(p.k[j * dim + d]));
      }
    }
  }
}

template <typename Real, typename T>
AllGradients gradients(const Case& c, const Wanted& w, const BackwardTensors<T>& t,
                       Real (*round)(Real)) {
  AllGradients g = empty_gradients(c, t);
  for (int b = 0; b < c.batch_size; ++b) {
    for (int h = 0; h < c.num_heads; ++h) add_gradients<Real, T>(c, w, t, b, h, round, &g);
  }
  return g;
}

struct GradientError {
  double ours = 0.0, plain = 0.0, largest = 0.0;

  // The plain computation sums in float64; what sums in fp32 lose is small beside the largest.
  bool ok() const { return ours <= 2.0 * plain + 2e-5 * largest; }
};

// Compares one gradient of a call with the exact and the plain one, which is rounded like ours.
template <typename Element>
GradientError compare_gradient(const Tensor<Element>& ours, const Tensor<double>& exact,
                               const Tensor<double>& plain) {
  GradientError error;
  for (std::int64_t a = 0; ours.data() && a < ours.size(0); ++a) {
    for (std::int64_t b = 0; b < ours.size(1); ++b) {
      for (std::int64_t c = 0; c < ours.size(2); ++c) {
        for (std::int64_t d = 0; d < ours.size(3); ++d) {
          const double x = exact.at(a, b, c, d);
          const auto rounded = static_cast<Element>(static_cast<float>(plain.at(a, b, c, d)));
          error.ours = std::max(error.ours, distance(static_cast<float>(ours.at(a, b, c, d)), x));
          error.plain = std::max(error.plain, distance(static_cast<float>(rounded), x));
          error.largest = std::max(error.largest, std::abs(x));
        }
      }
    }
  }
  return error;
}

// In host.cpp, as compare.h says.
#define SIMT_HOST_BACKWARD(declared, T)                                                           \
  declared template BackwardTensors<T> make_backward_tensors(const Case&, const Wanted&);         \
  declared template AllGradients gradients(const Case&, const Wanted&, const BackwardTensors<T>&, \
                                           double (*)(double));                                   \
  declared template AllGradients gradients(const Case&, const Wanted&, const BackwardTensors<T>&, \
                                           float (*)(float));                                     \
  declared template GradientError compare_gradient(const Tensor<T>&, const Tensor<double>&,       \
                                                   const Tensor<double>&);
#define SIMT_HOST_BACKWARD_TYPES(declared)    \
  declared template class Tensor<double>;     \
  SIMT_HOST_BACKWARD(declared, __half)        \
  SIMT_HOST_BACKWARD(declared, __nv_bfloat16) \
  SIMT_HOST_BACKWARD(declared, float)
SIMT_HOST_BACKWARD_TYPES(extern)

}  // namespace simt
