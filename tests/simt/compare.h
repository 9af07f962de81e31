#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>

#include "attention_case.h"

// Compares what kernels have written with float64.
namespace simt {

struct Errors {
  double out = 0.0, plain_out = 0.0, lse = 0.0, plain_lse = 0.0;
  // In a random problem: one rounding of the largest sum of weighted magnitudes. The plain
  // computation of a few rows may be exact by luck, and nothing can be held to that.
  double rounding = 0.0;
  // In extremes whose rows are each one key's: the error of lse, in its distance to the next
  // number.
  double lse_ulps = 0.0;
};

// |a - b|; a NaN counts as infinite, equal infinities as none.
inline double distance(double a, double b) {
  if (a == b) return 0.0;
  const double d = std::abs(a - b);
  return std::isnan(d) ? INFINITY : d;
}

template <typename T>
double rounding_of(reference::Problem problem) {
  for (double& x : problem.v) x = std::abs(x);
  double largest = 0.0;
  for (const double x : reference::attention(problem).out) largest = std::max(largest, x);
  return largest * (sizeof(T) == 4              ? 0x1p-24
                    : sizeof(T) == 1            ? 0x1p-4
                    : std::is_same_v<T, __half> ? 0x1p-11
                                                : 0x1p-8);
}

// One head of one sequence, of which `problem` is what the reference computes.
template <typename T, typename Out>
void compare_head(const Case& c, const Tensors<T, Out>& t, int batch, int head,
                  const reference::Problem& problem, const reference::Rounding& rounding,
                  Errors* e) {
  const int at = c.batch_index(batch), start = c.start_q(batch);
  const reference::Result exact = reference::attention(problem);
  const reference::Result plain = reference::plain_attention(problem, rounding);
  const bool one_key = c.extreme && c.extreme->one_key;
  if ((c.seed || c.extreme) && !one_key)
    e->rounding = std::max(e->rounding, rounding_of<T>(problem));
  for (int row = 0; row < problem.seqlen_q; ++row) {
    if (c.varlen() && c.owners(start + row) > 1) continue;  // the last one's to be written
    for (int d = 0; d < c.dim_v(); ++d) {
      const std::size_t i = static_cast<std::size_t>(row) * c.dim_v() + d;
      const float out = static_cast<float>(t.out.at(at, start + row, head, d));
      e->out = std::max(e->out, distance(out, exact.out[i]));
      e->plain_out = std::max(e->plain_out, distance(plain.out[i], exact.out[i]));
    }
    if (!c.lse) continue;
    const float lse = t.lse.at(at, head, start + row, 0);
    constexpr double kLarge = 1e3;  // else it is q.k that rounds it
    if (one_key && std::abs(exact.lse[row]) > kLarge) {
      const float exact_lse = std::abs(static_cast<float>(exact.lse[row]));
      const double ulp = std::nextafter(exact_lse, INFINITY) - exact_lse;
      e->lse_ulps = std::max(e->lse_ulps, distance(lse, exact.lse[row]) / ulp);
    }
    // Errors of extremes are relative to lse: a large one must not excuse the others.
    const double size = std::abs(exact.lse[row]);
    const double unit = c.extreme && std::isfinite(size) ? std::max(1.0, size) : 1.0;
    e->lse = std::max(e->lse, distance(lse, exact.lse[row]) / unit);
    e->plain_lse = std::max(e->plain_lse, distance(plain.lse[row], exact.lse[row]) / unit);
  }
}

// The host works on tensors in functions that host.cpp has, without sanitizers: these are
// for the kernels, and take most of their time here.
#define SIMT_HOST(declared, T, Out)                                                           \
  declared template Tensors<T, Out> allocate_tensors(const Case&);                            \
  declared template dlattn::AttentionParams make_params(const Case&, const Tensors<T, Out>&,  \
                                                        dlattn::DType, dlattn::DType);        \
  declared template void fill_tensors(const Case&, const Tensors<T, Out>&);                   \
  declared template reference::Problem make_problem(const Case&, const Tensors<T, Out>&, int, \
                                                    int);                                     \
  declared template void compare_head(const Case&, const Tensors<T, Out>&, int, int,          \
                                      const reference::Problem&, const reference::Rounding&,  \
                                      Errors*);
#define SIMT_HOST_TYPES(declared)                   \
  declared template class Tensor<__half>;           \
  declared template class Tensor<__nv_bfloat16>;    \
  declared template class Tensor<__nv_fp8_e4m3>;    \
  declared template class Tensor<float>;            \
  declared template class Tensor<std::int8_t>;      \
  declared template class Tensor<std::uint8_t>;     \
  SIMT_HOST(declared, __half, __half)               \
  SIMT_HOST(declared, __nv_bfloat16, __nv_bfloat16) \
  SIMT_HOST(declared, float, float)                 \
  SIMT_HOST(declared, __nv_fp8_e4m3, __half)        \
  SIMT_HOST(declared, __nv_fp8_e4m3, __nv_bfloat16) \
  SIMT_HOST(declared, __nv_fp8_e4m3, float)
SIMT_HOST_TYPES(extern)

}  // namespace simt
