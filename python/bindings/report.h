#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dlattn/attention.h"
#include "errors.h"
#include "problem.h"

// Shared by the answers about calls: supported and plan, forward and backward.
namespace dlattn::python {

// Addresses that stand for memory which is not allocated yet, where no memory is and far from each
// other; nothing is launched on it. Below 256 of them.
constexpr std::uintptr_t unallocated(int number) {
  return (std::uintptr_t{1} << 63) + (std::uintptr_t(number) << 55);
}

// A contiguous tensor as it would be allocated.
Tensor stand_in(const char* name, int number, const Shape& shape, dlpack::DLDataType dtype,
                Device device);

nb::tuple to_tuple(const std::vector<std::string>& lines);

// A plan's fields, its text and why other kernels cannot run the problem.
nb::dict plan_fields(const Plan& plan, Device device, const std::vector<std::string>& passed_over);

// Why kernels of `names` other than the chosen one cannot run a problem of a GPU.
template <typename Params>
std::vector<std::string> passed_over(const Params& params, const DeviceInfo& device,
                                     const Options& options, const Plan& chosen,
                                     const std::vector<std::string_view>& names) {
  std::vector<std::string> reasons;
  if (device.type != DeviceType::kCuda) return reasons;
  for (const std::string_view kernel : names) {
    if (kernel == "auto" || kernel == "cpu" || kernel == chosen.kernel) continue;
    Options forced = options;
    forced.kernel = kernel, forced.variant = nullptr;
    const Support support = dlattn::supported(params, device, forced);
    reasons.insert(reasons.end(), support.reasons.begin(), support.reasons.end());
  }
  return reasons;
}

// (ok, reasons) of `support()`; a call that is wrong is not supported.
template <typename Call>
nb::object support_tuple(const Call& support) {
  try {
    const Support answer = support();
    return nb::make_tuple(answer.ok, to_tuple(answer.reasons));
  } catch (const Error& error) {  // neither of its kinds is a mistake in how the question was put
    return nb::make_tuple(false, to_tuple({error.what()}));
  } catch (const nb::python_error& error) {
    if (!is_own(error)) throw;
    return nb::make_tuple(false, to_tuple({text(error.value())}));
  }
}

}  // namespace dlattn::python
