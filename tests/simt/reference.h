#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/problem/positions.h"

// Attention of one head of one sequence, on the host: once in float64, and once as plainly as the
// kernels' dtype allows.
namespace simt::reference {

struct Problem {
  explicit Problem(const dlattn::PositionMask<std::int64_t>& positions) : positions(positions) {}

  int seqlen_q = 0;
  int seqlen_k = 0;
  int head_dim = 0;
  int head_dim_v = 0;
  dlattn::PositionMask<std::int64_t> positions;
  double softmax_scale = 1.0;
  double softcap = 0.0;
  double v_descale = 1.0;
  double alibi_slope = 0.0;
  std::optional<double> sink;
  std::vector<double> q;  // [seqlen_q][head_dim]
  std::vector<double> k;  // [seqlen_k][head_dim]
  std::vector<double> v;  // [seqlen_k][head_dim_v]
  // Factors of the elements of q and of k, row by row; empty: 1.
  std::vector<double> q_scales, k_scales;
  std::vector<double> bias;  // [seqlen_q][seqlen_k], or empty
  std::vector<bool> mask;    // [seqlen_q][seqlen_k], true: attend; or empty
};

struct Result {
  std::vector<double> out;  // [seqlen_q][head_dim_v]
  std::vector<double> lse;  // [seqlen_q]
};

Result attention(const Problem& problem);

// How a plain computation rounds. Probabilities are normalised before they are rounded; but where
// `largest` is not 0 they are not, and a row's largest one is that. in_e4m3: q and k are of e4m3,
// and q.k is added up as tensor cores do it.
struct Rounding {
  float (*probability)(float);
  float (*out)(float);
  float largest = 0.0f;
  bool in_e4m3 = largest != 0.0f;
};

// In fp32, with probabilities and output rounded.
Result plain_attention(const Problem& problem, const Rounding& rounding);

}  // namespace simt::reference
