#include "reference.h"

#include <cmath>
#include <cstddef>
#include <limits>

namespace simt::reference {
namespace {

// Real is the type of scores, probabilities and sums.
template <typename Real, typename Round>
Result compute(const Problem& p, Round round) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  const std::size_t rows = p.seqlen_q, dim = p.head_dim, dim_v = p.head_dim_v;
  Result result;
  result.out.assign(rows * dim_v, 0.0);
  result.lse.assign(rows, -std::numeric_limits<double>::infinity());
  std::vector<Real> score(p.seqlen_k);
  for (std::size_t i = 0; i < rows; ++i) {
    Real maximum = -kInf;
    for (std::size_t j = 0; j < score.size(); ++j) {
      Real dot = 0;
      for (std::size_t d = 0; d < dim; ++d) {
        dot += static_cast<Real>(p.q[i * dim + d]) * static_cast<Real>(p.k[j * dim + d]);
      }
      const bool visible = !p.causal || static_cast<long>(j) <= static_cast<long>(i) + p.shift;
      score[j] = visible ? dot * static_cast<Real>(p.softmax_scale) : -kInf;
      if (score[j] > maximum) maximum = score[j];
    }
    if (maximum == -kInf) continue;  // out = 0, lse = -inf
    Real sum = 0;
    for (Real& x : score) sum += x = std::exp(x - maximum);
    result.lse[i] = maximum + std::log(sum);
    for (std::size_t d = 0; d < dim_v; ++d) {
      Real acc = 0;
      for (std::size_t j = 0; j < score.size(); ++j) {
        acc += round(score[j] / sum) * static_cast<Real>(p.v[j * dim_v + d]);
      }
      result.out[i * dim_v + d] = round(acc);
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
