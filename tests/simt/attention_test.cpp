#include "attention_test.h"

namespace simt {

template <typename T, typename Out>
void Tests::run_case(std::string_view kernel, const Case& c, const LaunchKernel& launch_kernel,
                     const char* variant) {
  constexpr dlattn::DType kDType = DTypeOf<T>::value, kOut = DTypeOf<Out>::value;
  std::string name = family_ + " " + dlattn::to_string(kDType) + " " + c.name();
  if (kOut != kDType) name += std::string(" to ") + dlattn::to_string(kOut);
  if (variant) name += std::string(" ") + variant;
  if (name.find(filter_) == std::string::npos) return;
  if (c.seed && sizeof(T) > 1 && std::is_same_v<T, __half> != (*c.seed % 2 == 0)) return;
  if ((c.seed || c.extreme) && time_is_up()) return;
  Tensors<T, Out> t = allocate_tensors<T, Out>(c);
  const dlattn::AttentionParams params = make_params(c, t, kDType, kOut);
  dlattn::Options options;
  options.kernel = kernel;
  dlattn::core::validate(params);
  // Some variant serves it.
  if (!c.seed && !c.extreme) dlattn::core::make_plan(params, device_, options);
  options.variant = variant;
  if (!dlattn::core::refusals(params, device_, options).empty()) return;
  const dlattn::Plan plan = dlattn::core::make_plan(params, device_, options);
  if (!build_.is_built(kDType, plan.head_dim_tile)) return;
  // Blocks that write the same rows race, and the last one's results stay.
  const bool overlap = c.sequences_overlap();
  if (overlap && build_.thread_sanitizer) return;
  fill_tensors(c, t);
  const HangGuard guard(name);
  std::vector<unsigned char> first_out;
  std::string trouble;
  for (const Schedule schedule : c.extreme ? std::vector<Schedule>{3} : build_.schedules) {
    t.out.poison(), t.lse.poison();
    launch_plan(&t, params, plan, schedule, launch_kernel);
    const std::vector<unsigned char> out = t.out.bytes();
    if (first_out.empty()) first_out = out;
    if (out != first_out && !overlap) trouble = "out depends on the order of threads";
    if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
    if (!other_rows_intact(c, t)) trouble = "a write to rows of no sequence";
  }
  if (build_.sequences_alone && !overlap && (c.batch_size > 1 || c.varlen())) {
    const std::vector<unsigned char> lse = t.lse.bytes();
    t.out.poison(), t.lse.poison();
    const std::string same_tiles = variant_of_sequences(plan);
    if (!same_tiles.empty()) options.variant = same_tiles.c_str();
    for (int b = 0; b < c.batch_size; ++b) {
      const dlattn::AttentionParams own = alone<T, Out>(c, params, b);
      launch_plan(&t, own, dlattn::core::make_plan(own, device_, options), build_.schedules[0],
                  launch_kernel);
    }
    if (t.out.bytes() != first_out) trouble = "out depends on the other sequences";
    if (t.lse.bytes() != lse) trouble = "lse depends on the other sequences";
  }
  const Errors errors = compare(c, t, plain_rounding<T, Out>(largest_), [&](int batch, int head) {
    return make_problem(c, t, batch, head);
  });
  report(name + ", copies of " + std::to_string(plan.copy_bytes), errors, kOut, trouble,
         kDType == dlattn::DType::kFloat8E4M3);
}
SIMT_RUN_CASES()

void Tests::launch_plan(const void* tensors, const dlattn::AttentionParams& params,
                        const dlattn::Plan& plan, Schedule schedule,
                        const LaunchKernel& launch_kernel) const {
  if (plan.grid == 0) return;
  const auto blocks = static_cast<unsigned>(std::min(plan.grid, most_blocks_));
  Launch threads{dim3(blocks), dim3(plan.num_warps * 32), static_cast<std::size_t>(plan.smem_bytes),
                 schedule};
  threads.cluster_size = static_cast<unsigned>(plan.cluster_size);
  with_folded_heads(params, plan,
                    [&](const dlattn::AttentionParams& launched, const dlattn::LaunchShape& shape) {
                      launch_kernel(threads, tensors, plan.head_dim_tile, launched, shape);
                    });
}

void Tests::with_folded_heads(const dlattn::AttentionParams& params, const dlattn::Plan& plan,
                              const RunLaunch& run) const {
  run(params, dlattn::make_launch_shape(params, plan));
}

void Tests::report(const std::string& name, const Errors& e, dlattn::DType dtype,
                   const std::string& trouble, bool in_e4m3) {
  // Tensor cores keep 14 bits of sums of e4m3.
  const double tiny = in_e4m3 ? 0x1p-12 : dtype == dlattn::DType::kFloat32 ? 2e-6 : 1e-5;
  const double bound = 2.0 * std::max(e.plain_out, e.rounding) + tiny,
               lse_bound = 2.0 * e.plain_lse + (in_e4m3 ? 0x1p-12 : 5e-6);
  if (!std::isfinite(bound + lse_bound)) die("%s: the plain result is not finite", name.c_str());
  const bool ok = e.out <= bound && e.lse <= lse_bound && e.lse_ulps <= 2.0 && trouble.empty();
  ++(ok ? passed_ : failed_);
  std::printf("%s %s: error %.2e (bound %.2e), lse %.2e (%.2e)", ok ? "ok  " : "FAIL", name.c_str(),
              e.out, bound, e.lse, lse_bound);
  if (e.lse_ulps > 0.0) std::printf(", %.2f ulp", e.lse_ulps);
  std::printf(" %s\n", trouble.c_str());
  std::fflush(stdout);
  if (!ok && std::getenv("SIMT_STOP_AT_FAILURE")) std::_Exit(finish());
}

int Tests::finish() const {
  std::printf("%d passed, %d failed\n", passed_, failed_);
  std::fflush(stdout);
  return failed_ != 0 || passed_ == 0;
}

bool Tests::time_is_up() const {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count() >
         seconds_;
}

}  // namespace simt
