#include "reference.h"

#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <type_traits>

#include "core/problem/score.h"
#include "harness/e4m3_sum.h"

namespace simt::reference {
namespace {

bool visible(const Problem& p, long i, long j) {
  if (!dlattn::contains<std::int64_t>(p.positions.row(i), j)) return false;
  return p.mask.empty() || p.mask[i * p.seqlen_k + j];
}

// The terms whose sum a score is.
template <typename Real>
struct Score {
  Real of_product = 0, of_distance = 0, of_bias = 0;

  Real sum() const { return of_product + of_distance + of_bias; }
  Real largest_term() const {
    return std::abs(of_distance) > std::abs(of_bias) ? of_distance : of_bias;
  }
  // Whether adding the rest to it leaves the largest term as it is in float32, in either log base.
  bool is_its_largest_term() const {
    const Real rest = std::min(std::abs(of_distance), std::abs(of_bias)) + std::abs(of_product);
    return rest <= std::abs(largest_term()) * 0x1p-26;
  }
};

// q.k of row i and key j.
template <typename Real>
class Products {
 public:
  // in_e4m3: as tensor cores add up products of e4m3.
  Products(const Problem& p, bool in_e4m3) : p_(p) {
    if (!in_e4m3) return;
    q_ = groups(p.q), k_ = groups(p.k);
  }

  Real operator()(long i, long j) const {
    if (!q_.empty()) {
      const long count = groups_of_row();
      float dot = 0.0f;
      for (long x = 0; x < count; ++x)
        dot = simt::add_e4m3_products(dot, q_[i * count + x], k_[j * count + x]);
      return dot;
    }
    const long q = i * p_.head_dim, k = j * p_.head_dim;
    Real dot = 0;
    for (long d = 0; d < p_.head_dim; ++d)
      dot += static_cast<Real>(p_.q[q + d]) * static_cast<Real>(p_.k[k + d]);
    return dot;
  }

 private:
  static constexpr int kTogether = 16;
  long groups_of_row() const { return (p_.head_dim + kTogether - 1) / kTogether; }

  // Each row's numbers, as many in a group as tensor cores add up together.
  std::vector<simt::E4m3Numbers> groups(const std::vector<double>& numbers) const {
    std::vector<std::uint8_t> bytes;
    for (const double x : numbers)
      bytes.push_back(__nv_cvt_double_to_fp8(x, __NV_SATFINITE, __NV_E4M3));
    std::vector<simt::E4m3Numbers> groups;
    for (std::size_t row = 0; row < bytes.size(); row += p_.head_dim) {
      for (int d = 0; d < p_.head_dim; d += kTogether)
        groups.emplace_back(&bytes[row + d], std::min(kTogether, p_.head_dim - d));
    }
    return groups;
  }

  const Problem& p_;
  std::vector<simt::E4m3Numbers> q_, k_;
};

// Real is the type of scores, probabilities and sums.
template <typename Real>
Score<Real> score(const Problem& p, Real dot, long i, long j) {
  Score<Real> x;
  x.of_product =
      dlattn::softcapped(dot * static_cast<Real>(p.softmax_scale), static_cast<Real>(p.softcap),
                         [](Real y) { return std::tanh(y); });
  const auto slope = static_cast<Real>(dlattn::limited_slope(p.alibi_slope));
  const auto distance = static_cast<Real>(p.positions.position(i) - j);
  x.of_distance = -dlattn::alibi_penalty(slope, distance);
  if (!p.bias.empty()) x.of_bias = static_cast<Real>(p.bias[i * p.seqlen_k + j]);
  return x;
}

// Scores are formed in float32. Where all keys that can have a weight share one term that leaves
// nothing of the others, their scores are that term.
void absorb(const std::vector<Score<double>>& scores, double maximum, std::vector<double>* x) {
  constexpr double kNegligible = 30.0;
  const double least = maximum - std::abs(maximum) * 0x1p-20 - kNegligible;
  const Score<double>* first = nullptr;
  for (std::size_t j = 0; j < x->size(); ++j) {
    if (!((*x)[j] >= least)) continue;
    if (!first) first = &scores[j];
    if (!scores[j].is_its_largest_term() || scores[j].largest_term() != first->largest_term()) {
      return;
    }
  }
  for (double& score : *x) {
    if (first && score >= least) score = first->largest_term();
  }
}

template <typename Real, typename Rounding>
Result compute(const Problem& p, const Rounding& rounding) {
  constexpr Real kInf = std::numeric_limits<Real>::infinity();
  Result result;
  result.out.assign(static_cast<std::size_t>(p.seqlen_q) * p.head_dim_v, 0.0);
  result.lse.assign(p.seqlen_q, -std::numeric_limits<double>::infinity());
  std::vector<Real> x(p.seqlen_k);
  std::vector<Score<Real>> scores(p.seqlen_k);
  const Products<Real> products(p, rounding.in_e4m3);
  const auto scale = [](const std::vector<double>& scales, long i) {
    return static_cast<Real>(scales.empty() ? 1.0 : scales[static_cast<std::size_t>(i)]);
  };
  const Real sink = p.sink ? static_cast<Real>(*p.sink) : -kInf;
  for (long i = 0; i < p.seqlen_q; ++i) {
    for (long j = 0; j < p.seqlen_k; ++j) {
      scores[j] = score(p, products(i, j) * scale(p.q_scales, i) * scale(p.k_scales, j), i, j);
      x[j] = visible(p, i, j) ? scores[j].sum() : -kInf;
    }
    Real maximum = sink;
    for (const Real score : x) maximum = std::max(maximum, score);
    if (maximum == -kInf) continue;  // out = 0, lse = -inf
    if (sink == kInf) {              // out = 0
      result.lse[i] = kInf;
      continue;
    }
    if constexpr (std::is_same_v<Real, double>) {
      absorb(scores, maximum, &x);
      maximum = sink;
      for (const Real score : x) maximum = std::max(maximum, score);
    }
    const Real largest = rounding.largest;
    if (largest != 0 && maximum == sink) {  // no probability: all are relative to the keys' own
      maximum = -kInf;
      for (const Real score : x) maximum = std::max(maximum, score);
      if (maximum == -kInf) maximum = sink;
    }
    Real sum = std::exp(sink - maximum);
    for (Real& score : x) {
      score = std::exp(score - maximum);
      sum += score;
    }
    // Beside a sink as large as fp32 holds all keys are nothing.
    result.lse[i] = std::isinf(sum) ? sink : maximum + std::log(sum);
    for (Real& probability : x) {
      probability = rounding.probability(largest == 0 ? probability / sum : probability * largest);
    }
    for (long d = 0; d < p.head_dim_v; ++d) {
      Real acc = 0;
      for (long j = 0; j < p.seqlen_k; ++j) {
        acc += x[j] * static_cast<Real>(p.v[j * p.head_dim_v + d]);
      }
      if (largest != 0) acc /= largest * sum;
      result.out[i * p.head_dim_v + d] = rounding.out(acc * static_cast<Real>(p.v_descale));
    }
  }
  return result;
}

}  // namespace

Result attention(const Problem& problem) {
  struct {
    double (*probability)(double) = [](double x) { return x; };
    double (*out)(double) = [](double x) { return x; };
    double largest = 0.0;
    bool in_e4m3 = false;
  } none;
  return compute<double>(problem, none);
}

Result plain_attention(const Problem& problem, const Rounding& rounding) {
  return compute<float>(problem, rounding);
}

}  // namespace simt::reference
