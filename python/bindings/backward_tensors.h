#pragma once

#include <string>
#include <string_view>

#include "dlattn/backward.h"
#include "problem.h"

// The tensors of a backward call beside those of its forward call, as they have come in. Nothing
// here needs the GIL.
namespace dlattn::python {

// The gradients, in the order in which they are returned, and whose they are.
constexpr int kNumGradients = 6;
constexpr const char* kGradients[kNumGradients] = {"dq",    "dk", "dv", "dbias", "dalibi_slopes",
                                                   "dsinks"};
constexpr const char* kInputs[kNumGradients] = {"q", "k", "v", "bias", "alibi_slopes", "sinks"};

// The dtype of the gradient of `input`.
DType gradient_dtype(int i, const Tensor& input);

// Each fills its field of `params`; the problem has its tensors, out and lse.
void set_dout(const Tensor& dout, const Problem& problem, BackwardParams* params);
void set_dlse(const Tensor& dlse, const Problem& problem, BackwardParams* params);
// Checks that the tensor is as the input.
void set_gradient(int i, const Tensor& tensor, const Tensor& input, const Problem& problem,
                  BackwardParams* params);

// Refuses `needs`, as Python prints it, which names no gradient.
[[noreturn]] void refuse_needs(const std::string& needs);

}  // namespace dlattn::python
