#include "reference.h"

#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>

namespace simt::reference {
namespace {

bool visible(const Problem& p, long i, long j) {
  const long position = i + p.shift;
  if (p.causal && j > position) return false;
  if (p.window_left >= 0 && j < position - p.window_left) return false;
  if (p.window_right >= 0 && j > position + p.window_right) return false;
  return p.mask.empty() || p.mask[i * p.seqlen_k + j];
}

// Real is the type of scores, probabilities and sums.
template <typename Real>
Real score(const Problem& p, long i, long j) {
  Real dot = 0;
  for (long d = 0; d < p.head_dim; ++d) {
    dot += static_cast<Real>(p.q[i * p.head_dim + d]) * static_cast<Real>(p.k[j * p.head_dim + d]);
  }
  Real x = dot * static_cast<Real>(p.softmax_scale);
  if (p.softcap > 0) {
    x = static_cast<Real>(p.softcap) * std::tanh(x / static_cast<Real>(p.softcap));
  }
  x -= static_cast<Real>(p.alibi_slope) * static_cast<Real>(std::labs(i + p.shift - j));
  if (!p.bias.empty()) x += static_cast<Real>(p.bias[i * p.seqlen_k + j]);
  return x;
}

template <typename Real, typename Round>
Result compute(const Problem& p, Round round) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  Result result;
  result.out.assign(static_cast<std::size_t>(p.seqlen_q) * p.head_dim_v, 0.0);
  result.lse.assign(p.seqlen_q, -std::numeric_limits<double>::infinity());
  std::vector<Real> x(p.seqlen_k);
  const Real sink = p.sink ? static_cast<Real>(*p.sink) : -kInf;
  for (long i = 0; i < p.seqlen_q; ++i) {
    Real maximum = sink;
    for (long j = 0; j < p.seqlen_k; ++j) {
      x[j] = visible(p, i, j) ? score<Real>(p, i, j) : -kInf;
      if (x[j] > maximum) maximum = x[j];
    }
    if (maximum == -kInf) continue;  // out = 0, lse = -inf
    Real sum = std::exp(sink - maximum);
    for (Real& score : x) {
      score = std::exp(score - maximum);
      sum += score;
    }
    result.lse[i] = maximum + std::log(sum);
    for (long d = 0; d < p.head_dim_v; ++d) {
      Real acc = 0;
      for (long j = 0; j < p.seqlen_k; ++j) {
        acc += round(x[j] / sum) * static_cast<Real>(p.v[j * p.head_dim_v + d]);
      }
      result.out[i * p.head_dim_v + d] = round(acc);
    }
  }
  return result;
}

}  // namespace

Result attention(const Problem& problem) {
  return compute<double>(problem, [](double x) { return x; });
}

Result plain_attention(const Problem& problem, float (*round)(float)) {
  return compute<float>(problem, round);
}

}  // namespace simt::reference
