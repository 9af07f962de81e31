#include <atomic>
#include <cstdio>
#include <cstdlib>

#include "core/plan/plan.h"
#include "core/util/concat.h"
#include "core/util/published.h"

// Plans in words.
namespace dlattn {
namespace {

// DLATTN_PRINT_PLAN=1 prints the plan of every call to stderr; "", 0, false, no and off, in any
// case, do not.
bool print_plans() {
  static std::atomic<const bool*> on{nullptr};
  return core::published(on, [] {
    const char* value = std::getenv("DLATTN_PRINT_PLAN");
    std::string text = value ? value : "";
    for (char& c : text) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
    for (const char* off : {"", "0", "false", "no", "off"}) {
      if (text == off) return false;
    }
    return true;
  });
}

std::string kernel_text(const Launch& launch) {
  return core::concat(launch.kernel, *launch.variant_name ? ":" : "", launch.variant_name);
}

}  // namespace

std::string describe(const Launch& launch) {
  auto out = core::text_stream();
  out << to_string(launch.operation) << " by " << kernel_text(launch) << ", " << launch.grid;
  if (launch.kernel == core::kCpu) {
    out << " tasks";
  } else {
    out << " blocks of " << launch.num_warps << " warps";
  }
  return out.str();
}

std::string describe(const Plan& plan) {
  auto out = core::text_stream();
  for (int i = 0; i < plan.num_before; ++i) out << "before: " << describe(plan.before[i]) << "\n";
  if (plan.operation != Operation::kForward)
    out << "operation: " << to_string(plan.operation) << "\n";
  out << "kernel: " << kernel_text(plan) << "\n"
      << "dtype: " << to_string(plan.dtype) << "\n"
      << "tile: " << plan.block_m << " queries";
  if (plan.block_n) out << " x " << plan.block_n << " keys";
  if (plan.head_dim_tile) out << ", head_dim <= " << plan.head_dim_tile;
  if (plan.packed_heads > 1) out << ", rows of " << plan.packed_heads << " heads";
  out << "\n";
  if (plan.kernel == core::kCpu) {
    out << "threads: " << plan.num_threads << ", " << plan.isa << ", " << plan.grid << " tasks\n";
  } else {
    out << "grid: " << plan.grid << " blocks of " << plan.num_warps << " warps";
    if (plan.cluster_size > 1) out << ", in clusters of " << plan.cluster_size;
    out << "\n"
        << "shared memory: " << plan.smem_bytes << " bytes per block, " << plan.num_stages
        << " stage(s), copies of " << plan.copy_bytes << " bytes\n";
  }
  for (int i = 0; i < plan.num_after; ++i) out << "after: " << describe(plan.after[i]) << "\n";
  if (plan.predicted_ns > 0.0) out << "predicted: " << plan.predicted_ns / 1e3 << " us\n";
  out << "splits: " << plan.num_splits;
  if (plan.split_size > 0) out << " of " << plan.split_size << " keys";
  out << ", workspace: " << plan.workspace_bytes << " bytes\n";
  return out.str();
}

namespace core {

void print_if_asked(const Plan& plan) {
  if (print_plans()) std::fprintf(stderr, "%s\n", describe(plan).c_str());
}

}  // namespace core
}  // namespace dlattn
