#pragma once

#include <string>

#include "dlattn/attention.h"

namespace dlattn::core {

// Which of wmma's tile shapes ("variants", src/cuda/wmma/traits.h) a problem that the family
// accepts runs on. `head_dim_tile` is the instance's.
// For `batch_invariant` see Options.
int choose_wmma_variant(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                        bool batch_invariant);

// Why a given variant cannot run the problem, without the family's name; empty if it can.
std::string wmma_variant_refusal(const AttentionParams& params, int head_dim_tile, int variant);

}  // namespace dlattn::core
