#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/operations/operation.h"
#include "core/plan/choice_problem.h"
#include "core/plan/family.h"
#include "core/plan/plan.h"
#include "core/util/concat.h"

// The choice between the families of an operation: of those that accept a problem, the one that is
// predicted to be the fastest.
namespace dlattn::core {

// The number that a problem's head dims must be multiples of for a family. Rows of k and v that
// quantize_kv() wrote are as long as an instance has them, whatever head_dim is.
template <typename Params>
int head_dim_step(const Family<Params>& family, const Params& p) {
  if constexpr (std::is_same_v<Params, AttentionParams>) {
    if (p.precision != Precision::kInputs) return 1;
  }
  return family.head_dim_step;
}

// Whether a family's instances of a problem's dtype are for such a problem: in families that read
// caches, those of 8-bit dtypes are for caches of them alone.
template <typename Params>
bool is_served(const Family<Params>& family, const Params& p) {
  if constexpr (std::is_same_v<Params, AttentionParams>)
    return !family.reads_caches || size_of(dtype_of(p)) > 1 || is_8_bit_cache(p);
  return true;
}

// The instance that serves a problem, null if there is none.
template <typename Params>
const Instance* instance_of(const ListedFamily<Params>& family, const Params& p, std::string* why) {
  const int step = head_dim_step(*family.record, p);
  const DType dtype = dtype_of(p);
  const HeadDims dims = head_dims_of(p);
  const auto fits_step = [step](const NamedSize& dim) { return dim.value % step == 0; };
  const auto instance_for = [&](std::int64_t head_dim) {
    return is_served(*family.record, p) ? family.instance(dtype, head_dim) : nullptr;
  };
  const Instance* instance = instance_for(std::max(dims.first.value, dims.second.value));
  if (instance && fits_step(dims.first) && fits_step(dims.second)) return instance;
  if (!why) return nullptr;
  if (!instance_for(1)) {
    if constexpr (std::is_same_v<Params, AttentionParams>) {
      if (p.precision != Precision::kInputs) {
        refuse(why, "does not implement precision ", to_string(p.precision));
        return nullptr;
      }
    }
    refuse(why, "dtype is ", to_string(dtype), "; accepted: ", accepted_dtypes(family));
    return nullptr;
  }
  int largest = 0;
  for (const Instance& each : family.instances) {
    if (each.dtype == dtype) largest = std::max(largest, each.head_dim_tile);
  }
  const bool first_fits = dims.first.value <= largest && fits_step(dims.first);
  const NamedSize& wrong = first_fits ? dims.second : dims.first;
  refuse(why, wrong.name, " is ", wrong.value,
         "; accepted: ", step == 1 ? "1 to " : concat("multiples of ", step, " up to "), largest);
  return nullptr;
}

template <typename Params>
bool is_for(const Family<Params>& family, const DeviceInfo& device) {
  return !family.capability ||
         family.capability == 10 * device.compute_major + device.compute_minor;
}

// Whether a plan splits the keys as its caller asks.
inline bool splits_as_asked(const Plan& plan, const Options& options, std::string* why) {
  if (options.split_size > 0 && plan.split_size != options.split_size)
    return refuse(why, "does not implement split_size");
  const bool fixed = plan.fixed_splits || plan.num_splits == options.num_splits;
  if (options.num_splits > 0 && !fixed) return refuse(why, "does not implement num_splits");
  return true;
}

// Whether a family can run a problem. If so, `plan`, whose copy_bytes are set, is how; if not,
// `why` says why not, without the family's name, unless it is null.
template <typename Params>
bool plan_on(const ListedFamily<Params>& family, const Params& p, const DeviceInfo& device,
             const Options& options, Plan* plan, std::string* why) {
  const Family<Params>& record = *family.record;
  if (device.type != DeviceType::kCuda) return refuse(why, "the tensors are on the CPU");
  if (!device.unserved.empty()) return refuse(why, device.unserved);
  if (!is_for(record, device)) {
    return refuse(why, "needs compute capability ", record.capability / 10, ".",
                  record.capability % 10, "; ", device.name, " has ", device.compute_major, ".",
                  device.compute_minor);
  }
  if constexpr (std::is_same_v<Params, AttentionParams>) {
    if (is_cache(p) && !record.reads_caches)
      return refuse(why, "does not read keys in a cache: ", cache_feature(p), " is given");
  }
  const Instance* instance = instance_of(family, p, why);
  if (!instance) return false;
  if (options.variant && !record.accepted_variants) return refuse_variant(options.variant, why);
  plan->operation = operation_of(p);
  plan->kernel = record.name;
  plan->dtype = instance->dtype;
  plan->head_dim_tile = instance->head_dim_tile;
  if (options.batch_invariant && options.kernel == kAuto && record.varies_with_batch) {
    const std::string reason = record.varies_with_batch(p);
    if (!reason.empty()) return refuse(why, reason);
  }
  if (!record.plan(p, device, options, plan, why) || !can_launch(*plan, device, why)) return false;
  if (!splits_as_asked(*plan, options, why)) return false;
  if (!options.allow_workspace && plan->workspace_bytes > 0)
    return refuse(why, "needs a workspace of ", plan->workspace_bytes, " bytes");
  return positions_fit(p, why);
}

// Makes a plan as good as new. Launches before and after it are not counted then, so they stay as
// they are, which is quicker than a new Plan.
inline void start_over(Plan* plan) {
  static_cast<Launch&>(*plan) = Launch();
  plan->num_before = plan->num_after = 0;
  plan->num_splits = 1;
  plan->fixed_splits = false;
  plan->split_size = 0;
  plan->workspace_bytes = 0;
  plan->cleared_bytes = plan->parts_per_head = 0;
  plan->margin = 1.0;
}

// The time by which plans are compared.
inline double compared_ns(const Plan& plan) {
  return plan.margin * plan.predicted_ns;
}

// Whether a family that `options` admit can run a problem on a GPU. If so, `best` is how, by the
// families' models the fastest; if not, `reasons` are why not, unless that is null.
template <typename Params>
bool fastest_plan(const Params& p, const DeviceInfo& device, const Options& options, Plan* best,
                  std::vector<std::string>* reasons) {
  std::string text;
  std::string* why = reasons ? &text : nullptr;
  const bool any = options.kernel == kAuto;
  bool found = false, known = any;
  const int bytes = copy_bytes(p);
  Plan other;
  Plan *plan = best, *least = &other;  // taken in turn, as a Plan is long to copy
  for (const ListedFamily<Params>& family : families<Params>()) {
    if (any ? !is_for(*family.record, device) : options.kernel != family.record->name) continue;
    known = true;
    start_over(plan);
    plan->copy_bytes = bytes;
    if (!plan_on(family, p, device, options, plan, why)) {
      if (reasons) reasons->push_back(concat(family.record->name, ": ", text));
    } else if (!found || compared_ns(*plan) < compared_ns(*least)) {
      std::swap(plan, least);
      found = true;
    }
  }
  if (found && least != best) *best = *least;
  if (!known && reasons) {
    std::vector<std::string_view> names = {kAuto, kCpu};
    for (const ListedFamily<Params>& family : families<Params>())
      names.push_back(family.record->name);
    reasons->push_back(unknown_kernel(options.kernel, names));
  }
  return found;
}

// Names the choices of a plan, as Options::kernel and Options::variant would.
template <typename Params>
std::string request_of(const Plan& plan) {
  for (const ListedFamily<Params>& family : families<Params>()) {
    if (plan.kernel == family.record->name && family.record->request_of)
      return family.record->request_of(plan);
  }
  return {};
}

// The same with Options::batch_invariant: the fastest for the problem that choices are made for,
// which has none of the real lengths. Where the real problem is beyond that kernel's limits it is
// refused: another kernel would give other bits than the sequence has elsewhere.
inline bool invariant_plan(const AttentionParams& p, const DeviceInfo& device,
                           const Options& options, Plan* best, std::vector<std::string>* reasons) {
  const AttentionParams choice = problem_for_choice(p);
  if (!fastest_plan(choice, device, options, best, nullptr)) {
    // A tile shape that the caller names is no choice: the real problem alone decides. Otherwise it
    // has the reasons, which name the real tensors, unless it would be served.
    const bool found = fastest_plan(p, device, options, best, reasons);
    if (!found || options.variant) return found;
    if (reasons) reasons->clear();  // of those that do not serve the real problem either
    return fastest_plan(choice, device, options, best, reasons);
  }
  const std::string request = request_of<AttentionParams>(*best);
  Options as_chosen = options;
  as_chosen.kernel = best->kernel;
  as_chosen.variant = request.empty() ? nullptr : request.c_str();
  if (fastest_plan(p, device, as_chosen, best, reasons)) return true;
  if (reasons && !options.variant) {
    for (std::string& reason : *reasons)
      reason += "; with batch_invariant no other kernel is taken";
  }
  return false;
}

template <typename Params>
bool best_plan(const Params& p, const DeviceInfo& device, const Options& options, Plan* best,
               std::vector<std::string>* reasons) {
  if constexpr (std::is_same_v<Params, AttentionParams>) {
    if (options.batch_invariant) return invariant_plan(p, device, options, best, reasons);
  }
  return fastest_plan(p, device, options, best, reasons);
}

template <typename Params>
Plan make_plan(const Params& params, const DeviceInfo& device) {
  Plan plan;
  if (device.type == DeviceType::kCpu) {
    plan.operation = operation_of(params);
    plan.kernel = kCpu;
    plan.dtype = dtype_of(params);
    plan.num_threads = device.num_threads;
    plan.isa = device.isa;
    return plan;
  }
  if (best_plan(params, device, Options(), &plan, nullptr)) return plan;
  std::vector<std::string> reasons;
  best_plan(params, device, Options(), &plan, &reasons);
  fail_without_kernel(reasons);
}

}  // namespace dlattn::core
