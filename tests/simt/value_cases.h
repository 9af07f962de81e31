#pragma once

#include <vector>

#include "attention_case.h"

namespace simt {

// Cases of extreme values, for every family: those of features that one lacks are passed over.
std::vector<Case> value_cases_of(const Case& base, bool all);

// Biases that hide keys, and those at the ends of fp32: for families whose inputs have 8 bits.
std::vector<Case> extreme_bias_cases(const Case& base);

// Scores of 10^3 to 10^6, of which each row's furthest key has the largest by far.
std::vector<Case> far_key_cases();

// Scores are made in the same way at every head_dim: one has every value, others a few of them.
#if defined(SIMT_ALL_INSTANCES)
constexpr bool kEveryValue = true;
#else
constexpr bool kEveryValue = false;
#endif

std::vector<Case> value_cases(bool every_value);

}  // namespace simt
