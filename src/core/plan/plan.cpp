#include "core/plan/plan.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/backend.h"
#include "core/plan/choose.h"
#include "core/problem/limits.h"
#include "core/problem/quantized.h"
#include "core/util/concat.h"
#include "core/validate/call_memory.h"

namespace dlattn::core {
namespace {

bool runs_on_cpu(const DeviceInfo& device, const Options& options, std::string* why) {
  if (device.type != DeviceType::kCpu) return refuse(why, "the tensors are on a CUDA device");
  return !options.variant || refuse_variant(options.variant, why);
}

bool asks_for_cpu(const DeviceInfo& device, const Options& options) {
  return options.kernel == kCpu || (options.kernel == kAuto && device.type == DeviceType::kCpu);
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

bool can_launch(const Launch& launch, const DeviceInfo& device, std::string* why) {
  if (!has_shared_memory(device, launch.smem_bytes, why)) return false;
  if (launch.grid > kMaxGrid)
    return refuse(why, "needs ", launch.grid, " thread blocks; accepted: up to ", kMaxGrid);
  return true;
}

}  // namespace

void fail_without_kernel(const std::vector<std::string>& reasons) {
  throw UnsupportedError("no kernel can run this: " + join(reasons));
}

bool has_shared_memory(const DeviceInfo& device, std::int64_t bytes, std::string* why) {
  return bytes <= device.max_smem_per_block ||
         refuse(why, "needs ", bytes, " bytes of shared memory per block; ", device.name, " has ",
                device.max_smem_per_block);
}

bool can_launch(const Plan& plan, const DeviceInfo& device, std::string* why) {
  for (int i = 0; i < plan.num_launches(); ++i) {
    if (!can_launch(plan.launch(i), device, why)) return false;
  }
  return true;
}

bool positions_fit(const AttentionParams& p, std::string* why) {
  for (const NamedSize& length : {NamedSize{"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}}) {
    if (length.value > kMaxSeqlen)
      return refuse(why, length.name, " is ", length.value, "; accepted: up to ", kMaxSeqlen);
  }
  return true;
}

bool positions_fit(const QuantizeTask& p, std::string* why) {
  if (p.seqlen_k <= kMaxSeqlen) return true;
  return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", kMaxSeqlen);
}

bool refuse_variant(const char* variant, std::string* why) {
  return refuse(why, "variant is ", variant, "; accepted: none, this kernel has one tile shape");
}

std::string unknown_kernel(std::string_view kernel, const std::vector<std::string_view>& names) {
  std::string text;
  for (const std::string_view name : names) text += concat(text.empty() ? "" : ", ", name);
  return concat("kernel is ", kernel, "; accepted: ", text);
}

const char* score_feature(const AttentionParams& p) {
  if (p.softcap != 0.0) return "softcap";
  if (p.bias.data) return "bias";
  if (p.mask.data) return "mask";
  return p.alibi_slopes.data ? "alibi_slopes" : nullptr;
}

const char* cache_feature(const AttentionParams& p) {
  if (p.page_table.data) return "page_table";
  if (p.cache_batch_idx) return "cache_batch_idx";
  return p.leftpad_k ? "leftpad_k" : "seqused_k";
}

namespace {

// Adds the launches that quantise a plan's inputs into its workspace.
void add_quantization(const AttentionParams& params, const DeviceInfo& device, Plan* plan) {
  QuantizeTask task = task_of(params, plan);  // any address: which tensors there are is what counts
  for (const bool queries : {true, false}) {
    task.queries = queries;
    if (!(queries ? task.quantized_q : task.quantized_kv)) continue;
    const Plan quantization = make_plan(task, device);
    if (quantization.grid > 0) plan->before[plan->num_before++] = quantization;
    plan->predicted_ns += quantization.predicted_ns;
  }
  plan->workspace_bytes += task_bytes(params);
}

// The plan of the CPU backend. If it cannot run the problem, `reasons`, unless it is null, are why.
template <typename Params>
bool plan_on_cpu(const Params& params, const DeviceInfo& device, const Options& options, Plan* plan,
                 std::vector<std::string>* reasons) {
  std::string why;
  if (!runs_on_cpu(device, options, reasons ? &why : nullptr)) {
    if (reasons) *reasons = {concat(kCpu, ": ", why)};
    return false;
  }
  plan->operation = operation_of(params);
  plan->kernel = kCpu;
  plan->dtype = dtype_of(params);
  cpu::plan(params, device, options, plan);  // throws for numbers of threads and parts
  return true;
}

// As find_plan(). If there is none, `reasons`, unless it is null, are why.
bool plan_of(const AttentionParams& params, const DeviceInfo& device, const Options& options,
             Plan* plan, std::vector<std::string>* reasons) {
  if (asks_for_cpu(device, options)) {
    if (!plan_on_cpu(params, device, options, plan, reasons)) return false;
    plan->dtype = params.q.dtype;
    return true;
  }
  if (!best_plan(params, device, options, plan, reasons)) return false;
  if (quantizes_queries(params) || quantizes_keys(params)) add_quantization(params, device, plan);
  return true;
}

bool plan_of(const BackwardParams& params, const DeviceInfo& device, const Options& options,
             Plan* plan, std::vector<std::string>* reasons) {
  if (asks_for_cpu(device, options)) return plan_on_cpu(params, device, options, plan, reasons);
  if (options.batch_invariant) {
    if (reasons) {
      *reasons = {
          "batch_invariant is true; accepted: false in a backward pass on a GPU, which has "
          "deterministic"};
    }
    return false;
  }
  return best_plan(params, device, options, plan, reasons);
}

template <typename Params>
std::vector<std::string> refusals_of(const Params& params, const DeviceInfo& device,
                                     const Options& options, Plan* plan) {
  Plan own;
  std::vector<std::string> reasons;
  try {
    if (plan_of(params, device, options, plan ? plan : &own, &reasons)) reasons.clear();
  } catch (const UnsupportedError& error) {
    return {error.what()};
  }
  return reasons;
}

}  // namespace

bool find_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options,
               Plan* plan) {
  return plan_of(params, device, options, plan, nullptr);
}

std::vector<std::string> refusals(const AttentionParams& params, const DeviceInfo& device,
                                  const Options& options, Plan* plan) {
  return refusals_of(params, device, options, plan);
}

std::vector<std::string> refusals(const BackwardParams& params, const DeviceInfo& device,
                                  const Options& options, Plan* plan) {
  return refusals_of(params, device, options, plan);
}

Plan make_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  Plan plan;
  if (find_plan(params, device, options, &plan)) return plan;
  fail_without_kernel(refusals(params, device, options));
}

Plan make_plan(const BackwardParams& params, const DeviceInfo& device, const Options& options) {
  Plan plan;
  if (plan_of(params, device, options, &plan, nullptr)) return plan;
  fail_without_kernel(refusals(params, device, options));
}

std::string workspace_refusal(const AttentionParams& params, const Plan& plan) {
  if (plan.workspace_bytes == 0) return {};
  if (!params.workspace) {
    return concat("workspace is null; accepted: ", plan.workspace_bytes,
                  " bytes of device memory, or an allocator in the options");
  }
  if (params.workspace_bytes < plan.workspace_bytes) {
    return concat("workspace has ", params.workspace_bytes, " bytes; accepted: at least ",
                  plan.workspace_bytes);
  }
  const auto past = reinterpret_cast<std::uintptr_t>(params.workspace) % kWorkspaceAlignment;
  if (past == 0) return {};
  return concat("workspace: its address is ", past, " byte(s) past a multiple of ",
                kWorkspaceAlignment, "; accepted: multiples of it");
}

namespace {

// `given`: a copy of the parameters, `attention` the part of it that has the workspace.
template <typename Params>
void* taken_workspace(const Params& given, AttentionParams* attention, const Plan& plan,
                      const WorkspaceAllocator& allocator) {
  if (plan.workspace_bytes == 0) return nullptr;
  const bool allocates = !attention->workspace && allocator.function;
  if (allocates) {
    attention->workspace = allocator.function(allocator.context, plan.workspace_bytes);
    attention->workspace_bytes = plan.workspace_bytes;
  }
  if (const std::string why = workspace_refusal(*attention, plan); !why.empty())
    throw UnsupportedError(why);
  if (allocates) check_workspace_memory(given);
  return attention->workspace;
}

}  // namespace

void* workspace_of(const AttentionParams& params, const Plan& plan,
                   const WorkspaceAllocator& allocator) {
  AttentionParams given = params;
  return taken_workspace(given, &given, plan, allocator);
}

void* workspace_of(const BackwardParams& params, const Plan& plan,
                   const WorkspaceAllocator& allocator) {
  BackwardParams given = params;
  return taken_workspace(given, &given.forward, plan, allocator);
}

}  // namespace dlattn::core
