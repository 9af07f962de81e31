#pragma once

#include "dlattn/attention.h"

namespace dlattn::core {

// Throws UnsupportedError for a problem that is wrong whatever computes it: sizes, strides, ranges.
// A feature that one kernel family lacks is that family's refusal (plan.h), not an error here.
void validate(const AttentionParams& params);
void validate(const Options& options);
void validate(const MergeParams& params);
void validate(const QuantizeParams& params);
void validate(const AppendParams& params);          // validate_append.cpp
void validate_sizes(const QuantizeParams& params);  // the fields that quantized_kv_bytes() reads

}  // namespace dlattn::core
