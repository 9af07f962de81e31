// The kernels of sm90_latent.
#define SIMT_SANITIZED_TILE 576

#include "attention_test.h"
#include "cache_cases.h"
#include "cuda/forward/sm90_latent/boxes.h"
#include "cuda/forward/sm90_latent/kernel.cuh"
#include "tensor_maps.h"

namespace {

using simt::Cache;
using simt::Case;
using simt::DividedCase;
using simt::kCausal;
using simt::kFull;
using simt::Layout;
namespace latent = dlattn::sm90_latent;

// As the launcher does.
template <typename T, typename KV>
void run_kernels(const dlattn::AttentionParams& params, const dlattn::Plan& plan,
                 const simt::Tensors<T>& tensors, simt::Schedule schedule) {
  const latent::DecodeShape shape = latent::decode_shape(params, plan);
  const latent::KeyBoxes boxes = latent::key_boxes(params);
  const latent::KernelArgs args = {simt::encode(boxes.box), boxes.page_rows};
  simt::Launch threads{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32),
                       static_cast<std::size_t>(plan.smem_bytes), schedule};
  threads.cluster_size = static_cast<unsigned>(plan.cluster_size);
  simt::start_early(&threads, tensors);
  simt::launch(threads, [&] {
    constexpr bool kBytes = sizeof(KV) == 1;
    using Q = std::conditional_t<kBytes, __half, T>;  // either type's kernel
    if (plan.variant == latent::kRows16) {
      latent::narrow_kernel<Q, 16, KV>(params, shape, args);
    } else if (plan.variant == latent::kRows32) {
      latent::narrow_kernel<Q, 32, KV>(params, shape, args);
    } else if constexpr (!kBytes) {
      latent::kernel<T>(params, shape, args);
    }
  });
  if (shape.whole) return;
  latent::CombineGrid grid = latent::combine_grid(params, plan);
  grid.slices = std::min(grid.slices, 5);  // each has several rows, or parts of one
  simt::Launch rows{dim3(static_cast<unsigned>(grid.row_blocks * grid.slices)),
                    dim3(latent::kCombineThreads),
                    static_cast<std::size_t>(latent::combine_smem_bytes()), schedule};
  simt::start_early(&rows, tensors);
  simt::launch(rows, [&] { latent::combine_kernel<T>(params, shape, grid); });
}

template <typename T, typename KV = T>
void run(simt::Tests& tests, const DividedCase& d, int variant, int blocks, const char* filter) {
  const Case& c = d.sizes;
  constexpr dlattn::DType kDType = simt::DTypeOf<T>::value;
  constexpr bool kBytes = sizeof(KV) == 1;
  if (!kBytes && !simt::is_built(kDType, latent::kWideTile)) return;
  if (kBytes && (variant == latent::kRows64 || c.head_dim % 16 > 0 || c.dim_v() % 16 > 0)) return;
  const int rows = static_cast<int>(c.seqlen_q * c.num_heads / c.num_heads_kv);
  if (variant != latent::kRows64 && rows > latent::rows_of(variant)) return;
  if (blocks == 0 && (d.num_splits || d.split_size)) return;
  const std::string name = "sm90_latent " + std::string(dlattn::to_string(kDType)) + " " +
                           latent::kVariantNames[variant] + " " + c.name() + d.cache.name() +
                           " blocks " + std::to_string(blocks) + (kBytes ? " keys of 8 bits" : "") +
                           (d.num_splits ? " splits " + std::to_string(d.num_splits) : "") +
                           (d.split_size ? " split_size " + std::to_string(d.split_size) : "");
  if (name.find(filter) == std::string::npos) return;
  simt::Tensors<T> t = simt::make_tensors<T>(c);
  dlattn::AttentionParams params = simt::make_params(c, t, kDType, kDType);
  const simt::Pool<T, KV> pool(c, d.cache, t);
  pool.describe(d.cache, &params);
  dlattn::Options options;
  options.kernel = "sm90_latent";
  options.variant = latent::kVariantNames[variant];
  options.batch_invariant = blocks == 0 && !kBytes;
  options.allow_workspace = blocks != 0;
  options.num_splits = d.num_splits;
  options.split_size = d.split_size;
  const std::vector<std::string> refusals = dlattn::core::refusals(params, simt::hopper(), options);
  if (!refusals.empty()) simt::die("%s: %s", name.c_str(), refusals[0].c_str());
  dlattn::Plan plan = dlattn::core::make_plan(params, simt::hopper(), options);
  const bool pairs = latent::are_side_by_side(params);
  plan.grid = (blocks ? blocks : 2) * (pairs ? 2 : 1);
  const bool evenly = blocks && !d.num_splits && !d.split_size;
  plan.cluster_size = pairs || (evenly && blocks % 2 == 0) ? 2 : 1;
  if (d.num_splits == 0 && d.split_size == 0) plan.num_splits = blocks ? 2 : 1;
  const std::int64_t bytes =
      latent::workspace_map(params.batch_size, latent::num_parts(params, plan), plan.block_m,
                            plan.head_dim_tile)
          .total;
  const simt::Memory workspace = simt::workspace_memory(bytes);
  params.workspace = blocks ? workspace.get() : nullptr;
  const simt::HangGuard guard(name);
  std::string trouble;
  std::vector<unsigned char> first_out;
  for (const simt::Schedule schedule : simt::schedules()) {
    t.out.poison(), t.lse.poison();
    std::memset(workspace.get(), 0xFF, bytes);
    run_kernels<T, KV>(params, plan, t, schedule);
    const std::vector<unsigned char> out = t.out.bytes();
    if (first_out.empty()) first_out = out;
    if (out != first_out) trouble = "out depends on the order of threads";
    if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
    if (!simt::other_rows_intact(c, t)) trouble = "a write to rows of no sequence";
  }
  const auto problem_of = [&](int batch, int head) {
    return simt::cached_problem(c, d.cache, t, batch, head);
  };
  tests.report(name, simt::compare(c, t, simt::plain_rounding<T, T>(0.0f), problem_of), kDType,
               trouble);
}

// One kernel serves q and out of either type, which it reads and writes in one place: by turns.
void run_bytes(simt::Tests& tests, const DividedCase& d, int variant, int blocks,
               const char* filter) {
  static int number = 0;
  if ((number++ / 2 + variant) % 2 == 0) {
    run<__half, __nv_fp8_e4m3>(tests, d, variant, blocks, filter);
  } else {
    run<__nv_bfloat16, __nv_fp8_e4m3>(tests, d, variant, blocks, filter);
  }
}

Case wide(Case c, int head_dim_v = 512, const std::function<void(Case&)>& set = {}) {
  c.head_dim_v = head_dim_v;
  if (set) set(c);
  return c;
}

// Lengths of 0, of one key, at the edges of pages and tiles, beyond what there is; fewer rows than
// a row block has and more, pages that there are not, entries, smaller heads, splits, windows.
std::vector<DividedCase> cases() {
  const auto latents = [](Cache cache) {
    cache.latent = true;
    return cache;
  };
  return {
      {wide({1, 270, 576, kCausal, 20, 1, Layout::kBshd, 0, 5}),
       latents({{0, 1, 63, 65, 300}, 64}),
       {0, 1, 5}},
      {wide({2, 140, 576, kCausal, 35, 1, Layout::kBshd, 0, 2}),
       latents({{140, 64}, 16, {}, {}, true, true}),
       {0, 3}},
      // More tiles than stages, an odd number of them for each row block, and several KV heads.
      {wide({3, 310, 576, kFull, 4, 2, Layout::kBhsd, 0, 2}), latents({{310, 97}, 8}), {2}},
      // Entries, and smaller heads.
      {wide({3, 90, 328, kCausal, 4, 1, Layout::kBshd, 0, 2}, 264),
       latents({{90, 40}, 0, {-5, 7}})},
      {wide({1, 130, 520, kFull, 2, 1, Layout::kBshd, 0, 2}, 8),
       latents({{130, 128}, 128}),
       {0, 2}},
      // Queries of variable length.
      {simt::varlen(wide({1, 150, 576, kCausal, 8, 1}), {3, 0, 11}, {150, 150, 150}),
       latents({{150, 20, 129}, 64}),
       {2}},
      // Keys split as the caller asks.
      {wide({1, 300, 576, kFull, 4, 1, Layout::kBshd, 0, 2}), latents({{300, 0}, 16}), {3}, 3},
      {wide({1, 300, 576, kFull, 70, 1, Layout::kBshd, 0, 2}),
       latents({{300, 129}, 64}),
       {2},
       0,
       128},
      // Two parts of each row block, of one and none, of equal lengths that the host knows.
      {wide({1, 300, 576, kCausal, 40, 1, Layout::kBshd, 0, 2}, 512,
            [](Case& c) { c.sinks = true; }),
       latents({{300, 290}, 64}),
       {4}},
      {wide({1, 300, 576, kFull, 4, 1, Layout::kBshd, 0, 2}, 264), latents({{150, 300}, 64}), {4}},
      {wide({1, 200, 576, kFull, 4, 1, Layout::kBshd, 0, 2}),
       latents({{200, 200}, 8, {}, {}, false}),
       {4}},
      // So many parts that groups of threads share them.
      {wide({1, 600, 576, kFull, 3, 1, Layout::kBshd, 0, 1}), latents({{600}, 64}), {10}},
      // Windows and sinks, row maxima that a later tile raises.
      {wide({2, 200, 576, kCausal, 4, 1, Layout::kBshd, 0, 2}, 512,
            [](Case& c) { c.window_left = 40, c.sinks = true; }),
       latents({{200, 77}, 16})},
      {wide({1, 200, 576, kFull, 2, 1, Layout::kBshd, 0, 1}, 512, [](Case& c) { c.rise = -40.0; }),
       latents({{200}, 64})},
      {wide({1, 200, 576, kFull, 2, 1, Layout::kBshd, 0, 1}, 512, [](Case& c) { c.rise = -1e9; }),
       latents({{200}, 64}),
       {0}},
  };
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("sm90_latent", arguments);
  for (const DividedCase& c : cases()) {
    for (const int blocks : c.blocks) {
      if (simt::kThreadSanitizer && blocks != c.blocks.back()) continue;  // it is slow
      for (int variant = 0; variant < latent::kNumVariants; ++variant) {
        if (std::abs(c.sizes.rise) < 1000.0)  // beyond float16
          run<__half>(tests, c, variant, blocks, arguments.filter());
        run<__nv_bfloat16>(tests, c, variant, blocks, arguments.filter());
        run_bytes(tests, c, variant, blocks, arguments.filter());
      }
    }
  }
  return tests.finish();
}
