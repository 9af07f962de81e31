#pragma once

#include <vector>

#include "attention_case.h"
#include "feature_cases.h"
#include "length_cases.h"

namespace simt {

// For the kernels whose warps own row groups of 16 rows of a tile of 64, with tiles of 32 or 64
// keys.
std::vector<Case> wmma_cases(bool thread_sanitizer);

}  // namespace simt
