#pragma once

#include <string>
#include <vector>

#include "dlattn/attention.h"

namespace dlattn::core {

// Why `kernel` cannot run a valid problem on `device`; empty if it can. Of `options` only the
// variant counts.
std::string refusal(Kernel kernel, const AttentionParams& params, const DeviceInfo& device,
                    const Options& options = {});

// The widest copy, in bytes, that every row of q, k and v is aligned to. Dimensions of one element
// do not count.
int copy_bytes(const AttentionParams& params);

// The name of a score feature (softcap, bias, mask, alibi_slopes) that a problem uses; null: none.
const char* score_feature(const AttentionParams& params);

// The plan of a valid problem; throws UnsupportedError if no kernel, or not the one asked for, can
// run it.
Plan make_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options);

// Why none of the kernels that `options` admits can run a valid problem; empty if one can.
std::vector<std::string> refusals(const AttentionParams& params, const DeviceInfo& device,
                                  const Options& options);

// Whether machine code and PTX for `archs` (CMAKE_CUDA_ARCHITECTURES, ';'-separated) serve a
// compute capability. Machine code for X.Y runs on X.Z with Z >= Y; PTX for X.Y on anything from
// X.Y up. Only those from `least` (90 for 9.0) on count.
bool archs_serve(const std::string& archs, int compute_major, int compute_minor, int least = 0);

}  // namespace dlattn::core
