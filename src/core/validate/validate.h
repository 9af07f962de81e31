#pragma once

#include "core/operations/tensors.h"
#include "dlattn/attention.h"

namespace dlattn::core {

// Throws UnsupportedError for a problem that is wrong whatever computes it: sizes, strides, ranges.
// A feature that one kernel family lacks is that family's refusal (plan.h), not an error here.
void validate(const AttentionParams& params);
void validate(const BackwardParams& params);  // validate_backward.cpp
void validate(const Options& options);
void validate(const QuantizeParams& params);
void validate_sizes(const QuantizeParams& params);  // the fields that quantized_kv_bytes() reads

// The part of the checks of an AttentionParams that depends on where its tensors lie.
void check_call_memory(const AttentionParams& params);

// The two parts of the checks of an AttentionParams, which those of a backward pass have too: of
// what is no tensor, and of the tensors that the operation's table lists.
void check_numbers(const AttentionParams& params);
void check_tensors(const AttentionParams& params, const GivenTensors& tensors, const Sizes& sizes);

}  // namespace dlattn::core
