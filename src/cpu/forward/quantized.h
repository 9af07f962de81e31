#pragma once

#include "dlattn/forward.h"
#include "dlattn/plan.h"

namespace dlattn::cpu {

// The problem in fp32 that one of another precision than kInputs is computed as, without its
// tensors.
AttentionParams dequantized(const AttentionParams& params);
// Attention in another precision than kInputs. `plan`: that of dequantized().
void forward_quantized(const AttentionParams& params, const Plan& plan, Poll poll);

}  // namespace dlattn::cpu
