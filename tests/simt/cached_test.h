#pragma once

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "attention_test.h"
#include "cache_cases.h"

namespace simt {

// Runs a family's kernel of a variant on a case whose keys lie in a cache, and compares with
// float64. `run_kernel(head_dim_tile, params, shape)` runs in every thread of at most `most_blocks`
// blocks.
template <typename T, typename RunKernel>
void run_cached(Tests& tests, std::string_view family, const char* variant,
                const dlattn::DeviceInfo& device, std::int64_t most_blocks, const CachedCase& d,
                const char* filter, RunKernel run_kernel) {
  const Case& c = d.sizes;
  constexpr dlattn::DType kDType = DTypeOf<T>::value;
  const std::string name = std::string(family) + " " + dlattn::to_string(kDType) + " " + c.name() +
                           d.cache.name() + " " + variant;
  if (name.find(filter) == std::string::npos) return;
  Tensors<T> t = make_tensors<T>(c);
  dlattn::AttentionParams params = make_params(c, t, kDType, kDType);
  const Pool<T, T> pool(c, d.cache, t);
  pool.describe(d.cache, &params);
  dlattn::Options options;
  options.kernel = family;
  options.variant = variant;
  const dlattn::Plan plan = dlattn::core::make_plan(params, device, options);
  if (!is_built(kDType, plan.head_dim_tile)) return;
  const HangGuard guard(name);
  std::string trouble;
  std::vector<unsigned char> first_out;
  for (const Schedule schedule : schedules()) {
    t.out.poison(), t.lse.poison();
    const dlattn::LaunchShape shape = dlattn::make_launch_shape(params, plan);
    Launch threads{dim3(static_cast<unsigned>(std::min(plan.grid, most_blocks))),
                   dim3(plan.num_warps * 32), static_cast<std::size_t>(plan.smem_bytes), schedule};
    start_early(&threads, t);
    launch(threads, [&] { run_kernel(plan.head_dim_tile, params, shape); });
    if (first_out.empty()) first_out = t.out.bytes();
    if (t.out.bytes() != first_out) trouble = "out depends on the order of threads";
    if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
  }
  const auto problem_of = [&](int batch, int head) {
    return cached_problem(c, d.cache, t, batch, head);
  };
  tests.report(name, compare(c, t, plain_rounding<T, T>(272.0f), problem_of), kDType, trouble);
}

}  // namespace simt
