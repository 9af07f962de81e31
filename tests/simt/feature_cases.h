#pragma once

#include <vector>

#include "attention_case.h"

namespace simt {

// Nothing to compute, heads, and strides, for kernels whose rows are aligned to 16 bytes.
std::vector<Case> shape_cases();

// Windows, sinks and variable length, which every family has.
std::vector<Case> feature_cases(int head_dim);

// Query heads that share tiles, for the tile shapes that pack them. `head_dim` is a multiple of 8.
std::vector<Case> packed_cases(int head_dim);

}  // namespace simt
