#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "dlattn/attention.h"

namespace dlattn::core {

// What Options::kernel may be beside the families' names.
constexpr std::string_view kAuto = "auto", kCpu = "cpu";

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

// What of machine code and PTX for `archs` (CMAKE_CUDA_ARCHITECTURES, ';'-separated) runs on a
// compute capability. Machine code for X.Y runs on X.Z with Z >= Y; PTX for X.Y on anything from
// X.Y up; code for X.Ya on X.Y alone.
struct Code {
  int capability = 0;          // the highest that runs there, times ten; 0: none does
  bool arch_specific = false;  // whether there is such for X.Ya
};
Code code_for(const std::string& archs, int compute_major, int compute_minor);

}  // namespace dlattn::core
