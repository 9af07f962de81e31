#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/plan/family.h"
#include "core/problem/quantized.h"
#include "dlattn/attention.h"

namespace dlattn::core {

// The values of Options::kernel beside the families' names.
constexpr std::string_view kAuto = "auto", kCpu = "cpu";

// The name of a score feature (softcap, bias, mask, alibi_slopes) that a problem uses; null: none.
const char* score_feature(const AttentionParams& params);
// The name of what tells where a cache's keys are (page_table, cache_batch_idx, leftpad_k,
// seqused_k).
const char* cache_feature(const AttentionParams& params);

// The plan of a valid problem; throws UnsupportedError if no kernel, or not the one asked for, can
// run it.
Plan make_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options);
Plan make_plan(const BackwardParams& params, const DeviceInfo& device, const Options& options);
// The same of any other operation. Defined in choose.h, and instantiated where the operation's
// functions are (core/calls/).
template <typename Params>
Plan make_plan(const Params& params, const DeviceInfo& device);
[[noreturn]] void fail_without_kernel(const std::vector<std::string>& reasons);

// The same without that error: whether there is a plan.
bool find_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options,
               Plan* plan);

// Why none of the kernels that `options` admits can run a valid problem; empty if one can. `plan`,
// unless it is null, is then how.
std::vector<std::string> refusals(const AttentionParams& params, const DeviceInfo& device,
                                  const Options& options, Plan* plan = nullptr);
std::vector<std::string> refusals(const BackwardParams& params, const DeviceInfo& device,
                                  const Options& options, Plan* plan = nullptr);

// Whether the device can launch all that a plan does; if not, `why`, unless it is null, says why
// not.
bool can_launch(const Plan& plan, const DeviceInfo& device, std::string* why);

// The same of a block's shared memory alone.
bool has_shared_memory(const DeviceInfo& device, std::int64_t bytes, std::string* why);

bool refuse_variant(const char* variant, std::string* why);  // of a family without variants
std::string unknown_kernel(std::string_view kernel, const std::vector<std::string_view>& names);
// That q may have.
template <typename Params>
std::string accepted_dtypes(const ListedFamily<Params>& family) {
  std::string dtypes;
  const Instance* before = nullptr;
  for (const Instance& instance : family.instances) {
    // int8 is no tensor's, and in families that read caches 8 bits are the keys' alone.
    const bool of_keys = family.record->reads_caches && size_of(instance.dtype) == 1;
    if (instance.dtype == DType::kInt8 || of_keys) continue;
    if (!before || before->dtype != instance.dtype)
      dtypes += concat(dtypes.empty() ? "" : ", ", to_string(instance.dtype));
    before = &instance;
  }
  return dtypes;
}

// Why the parameters' workspace is none for `plan`; "" if it is one, or the plan needs none.
std::string workspace_refusal(const AttentionParams& params, const Plan& plan);

// The workspace of a call that follows `plan`: the parameters', or what `allocator` gives; null if
// the plan needs none. Throws UnsupportedError if there is none, if it is too small or misaligned,
// or if what the allocator gives shares memory with a tensor.
void* workspace_of(const AttentionParams& params, const Plan& plan,
                   const WorkspaceAllocator& allocator);
void* workspace_of(const BackwardParams& params, const Plan& plan,
                   const WorkspaceAllocator& allocator);

// Prints a plan to stderr if the environment variable DLATTN_PRINT_PLAN asks for it.
void print_if_asked(const Plan& plan);

}  // namespace dlattn::core
