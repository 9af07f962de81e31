#pragma once

#include <string>
#include <utility>
#include <vector>

#include "core/plan/plan.h"

namespace dlattn::core {

// Whether a call would run. `attention` has its workspace; `validate` throws UnsupportedError for
// what is wrong on any device.
template <typename Params, typename Validate>
Support support_of(const Params& params, const AttentionParams& attention, const DeviceInfo& device,
                   const Options& options, const Validate& validate) {
  try {
    validate();
  } catch (const UnsupportedError& error) {
    return {false, {error.what()}};
  }
  Plan plan;
  std::vector<std::string> reasons = refusals(params, device, options, &plan);
  if (reasons.empty() && attention.workspace && device.type == DeviceType::kCuda) {
    const std::string why = workspace_refusal(attention, plan);
    if (!why.empty()) reasons.push_back(why);
  }
  return {reasons.empty(), std::move(reasons)};
}

}  // namespace dlattn::core
