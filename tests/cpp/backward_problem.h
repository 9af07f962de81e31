#pragma once

#include <array>
#include <string>
#include <vector>

#include "dlattn/backward.h"
#include "problem.h"

// Backward passes beside problem.h's problems: gradients in memory, and the formulas of backward.h.
namespace test {

enum Gradient { kDq, kDk, kDv, kDbias, kDslopes, kDsinks, kGradients };
using Gradients = std::array<std::vector<double>, kGradients>;  // as they lie in memory

// A problem with its gradients, which are NaN until they are computed. out and lse are those of the
// CPU backend.
struct Backward {
  // `bias_dims`: bits for the dimensions of dbias that have one element: 1 for keys, 2 for queries,
  // 4 for heads, 8 for batch entries.
  explicit Backward(const Spec& spec, unsigned bias_dims = 0);

  Problem problem;
  dlattn::BackwardParams params;
  Buffer dout, dlse, results[kGradients];

 private:
  template <typename From, typename To>
  void place(Gradient which, const From& like, std::int64_t size, To* view);
  void place_bias(unsigned single);
};

// In float64, and how large the numbers are of which roundings are made: the largest gradient, of
// dalibi_slopes and dsinks the largest sum of their terms' magnitudes, which may be far above it.
struct ExactGradients {
  Gradients values;
  std::array<double, kGradients> most = {};
};

// From the same out and lse: in float64; and plainly, in float32 (float64 of that dtype) and
// rounded to the gradients' dtypes. `in_dtype`: P and dS are rounded to the inputs' dtype before
// they are multiplied or added up, as a plain computation in that dtype has them.
ExactGradients exact_gradients(const Backward& backward);
Gradients plain_gradients(const Backward& backward, bool in_dtype = false);

// Describes what is wrong with the results, by "" if nothing is: accepted is three times the error
// of the plain formula, plus a few roundings for where that had luck. Elements that are not written
// stay NaN, bytes around them as they were.
std::string verdict(Backward& backward, const ExactGradients& exact, const Gradients& plain);

}  // namespace test
