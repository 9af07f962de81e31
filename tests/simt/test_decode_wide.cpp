// The kernels of decode for heads of more than 256 columns.
#define SIMT_SANITIZED_TILE 576

#include "attention_test.h"
#include "cache_cases.h"
#include "cuda/forward/decode/combine.cuh"
#include "cuda/forward/decode/wide_kernel.cuh"

namespace {

using simt::Cache;
using simt::Case;
using simt::DividedCase;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;
namespace decode = dlattn::decode;

// As the launcher does.
template <typename T, typename KV, int kVariant>
void run_kernels(const dlattn::AttentionParams& params, const dlattn::Plan& plan,
                 const simt::Tensors<T>& tensors, simt::Schedule schedule) {
  const decode::DecodeShape shape = decode::make_decode_shape(params, plan);
  simt::Launch threads{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32),
                       static_cast<std::size_t>(plan.smem_bytes), schedule};
  simt::start_early(&threads, tensors);
  using M = std::conditional_t<sizeof(KV) == 1, __half, T>;  // the type of the factors
  simt::launch(threads, [&] { decode::wide_kernel<M, KV, kVariant>(params, shape); });
  if (shape.whole) return;
  const std::int64_t grid = params.batch_size * params.num_heads * params.seqlen_q *
                            decode::combine_blocks(decode::kWideTile);
  simt::Launch rows{dim3(static_cast<unsigned>(grid)), dim3(decode::kCombineThreads),
                    static_cast<std::size_t>(decode::combine_smem_bytes()), schedule};
  simt::start_early_behind(&rows, tensors);
  simt::launch(rows, [&] {
    decode::combine_kernel<T, decode::kWideTile, kVariant, sizeof(KV)>(params, shape);
  });
}

// Whether this build has the kernels for a case's keys as elements of KV: of those of 8 bits one
// kind, AddressSanitizer's build and the plain one e4m3, ThreadSanitizer's int8.
template <typename KV>
bool has_keys_of(const DividedCase& d) {
  if (sizeof(KV) > 1) return simt::is_built(simt::DTypeOf<KV>::value, decode::kWideTile);
#if !defined(SIMT_ALL_INSTANCES) && !defined(SIMT_TILE)
  if (std::is_same_v<KV, std::int8_t> != simt::kThreadSanitizer) return false;
#endif
  return d.cache.any() && d.sizes.head_dim % 16 == 0 && d.sizes.dim_v() % 16 == 0;
}

template <typename T, typename KV = T>
void run(simt::Tests& tests, const DividedCase& d, int variant, int blocks, const char* filter) {
  const Case& c = d.sizes;
  constexpr dlattn::DType kDType = simt::DTypeOf<T>::value;
  if (!has_keys_of<KV>(d)) return;
  if (blocks == 0 && (d.num_splits || d.split_size)) return;
  const std::string name =
      "decode_wide " + std::string(dlattn::to_string(kDType)) + " " + c.name() + d.cache.name() +
      " " + decode::kVariantNames[variant] + " blocks " + std::to_string(blocks) +
      (sizeof(KV) == 1 ? " keys " + std::string(dlattn::to_string(simt::DTypeOf<KV>::value)) : "") +
      (d.num_splits ? " splits " + std::to_string(d.num_splits) : "") +
      (d.split_size ? " split_size " + std::to_string(d.split_size) : "");
  if (name.find(filter) == std::string::npos) return;
  simt::Tensors<T> t = simt::make_tensors<T>(c);
  dlattn::AttentionParams params = simt::make_params(c, t, kDType, kDType);
  std::optional<simt::Pool<T, KV>> pool;
  if (d.cache.any()) {
    pool.emplace(c, d.cache, t);
    pool->describe(d.cache, &params);
  }
  dlattn::Options options;
  options.kernel = "decode";
  options.variant = decode::kVariantNames[variant];
  options.batch_invariant = blocks == 0;
  options.allow_workspace = blocks != 0;
  options.num_splits = d.num_splits;
  options.split_size = d.split_size;
  const std::vector<std::string> refusals = dlattn::core::refusals(params, simt::ada(), options);
  if (!refusals.empty()) {
    simt::die("%s: %s", name.c_str(), refusals[0].c_str());
  }
  dlattn::Plan plan = dlattn::core::make_plan(params, simt::ada(), options);
  plan.grid = blocks ? blocks : std::min<std::int64_t>(plan.grid, 2);
  if (d.num_splits == 0 && d.split_size == 0) plan.num_splits = blocks ? 2 : 1;
  const std::int64_t bytes =
      decode::workspace_map(params.batch_size, decode::num_parts(params, plan), plan.block_m,
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
    if (variant == decode::kRows32) {
      run_kernels<T, KV, decode::kRows32>(params, plan, t, schedule);
    } else {
      run_kernels<T, KV, decode::kRows16>(params, plan, t, schedule);
    }
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

// With 8-bit keys one kernel serves q and out of either type, which it reads and writes in one
// place: by turns.
template <typename KV>
void run_bytes(simt::Tests& tests, const DividedCase& d, int variant, int blocks,
               const char* filter) {
  static int number = 0;
  if ((number++ / 2 + variant) % 2 == 0) {
    run<__half, KV>(tests, d, variant, blocks, filter);
  } else {
    run<__nv_bfloat16, KV>(tests, d, variant, blocks, filter);
  }
}

Case wide(Case c, int head_dim_v, const std::function<void(Case&)>& set = {}) {
  c.head_dim_v = head_dim_v;
  if (set) set(c);
  return c;
}

// Latents in pages, with lengths of 0, of one key, at the edges of pages and slices, beyond what
// there is; more rows than a row block has, and fewer; V of its own; splits; score features.
std::vector<DividedCase> cases() {
  const auto latent = [](Cache cache) {
    cache.latent = true;
    return cache;
  };
  return {
      {wide({1, 150, 576, kCausal, 20, 1, Layout::kBshd, 0, 4}, 512),
       latent({{0, 1, 64, 150}, 64}),
       {0, 1, 7}},
      {wide({2, 140, 576, kCausal, 35, 1, Layout::kBshd, 0, 2}, 512),
       latent({{140, 33}, 16, {}, {}, true, true}),
       {0, 3}},
      // More slices than a ring of stages has room for, and several KV heads.
      {wide({1, 260, 576, kFull, 4, 2, Layout::kBhsd, 0, 2}, 512), latent({{260, 97}, 7}), {2}},
      // Smaller heads, entries, padding.
      {wide({3, 90, 320, kCausal, 4, 1, Layout::kBshd, 0, 2}, 256),
       latent({{90, 40}, 0, {-5, 7}, {5, INT32_MIN}})},
      // V of its own, in pages and not in a cache at all.
      {wide({3, 130, 512, kCausal, 4, 2, Layout::kBshd, 0, 2}, 512), {{130, 17}, 16}},
      {wide({2, 75, 264, kTopLeft, 2, 1}, 96), {}, {0, 2}},
      {simt::varlen(wide({1, 1, 520, kCausal, 2, 1}, 512), {3, 0, 1}, {40, 20, 33}), {}, {0, 2}},
      // Keys split as the caller asks.
      {wide({1, 300, 576, kFull, 4, 1, Layout::kBshd, 0, 2}, 512), latent({{300, 0}, 16}), {3}, 3},
      {wide({1, 300, 576, kFull, 36, 1, Layout::kBshd, 0, 2}, 512),
       latent({{300, 129}, 64}),
       {2},
       0,
       128},
      // Windows, score features, row maxima that rise from key to key.
      {wide({2, 100, 576, kCausal, 4, 1, Layout::kBshd, 0, 2}, 512,
            [](Case& c) { c.softcap = 3.0, c.window_left = 40, c.sinks = true; }),
       latent({{100, 77}, 16})},
      {wide({2, 70, 576, kCausal, 4, 1, Layout::kBshd, 0, 2}, 512,
            [](Case& c) { c.mask = true, c.alibi = true; }),
       latent({{70, 33}, 16})},
      {wide({1, 120, 576, kFull, 2, 1, Layout::kBshd, 0, 1}, 512, [](Case& c) { c.rise = 4.0; }),
       latent({{120}, 64})},
      {wide({1, 140, 576, kFull, 2, 1, Layout::kBshd, 0, 1}, 512, [](Case& c) { c.rise = -30.0; }),
       latent({{140}, 64})},
  };
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("decode_wide", arguments);
  for (const DividedCase& c : cases()) {
    for (const int blocks : c.blocks) {
      if (simt::kThreadSanitizer && blocks != c.blocks.back()) continue;  // it is slow
      for (const int variant : {decode::kRows16, decode::kRows32}) {
        run<__nv_bfloat16>(tests, c, variant, blocks, arguments.filter());
        if (std::abs(c.sizes.rise) > 1000.0) continue;  // beyond float16 and 8 bits
        run<__half>(tests, c, variant, blocks, arguments.filter());
        run_bytes<std::int8_t>(tests, c, variant, blocks, arguments.filter());
        run_bytes<__nv_fp8_e4m3>(tests, c, variant, blocks, arguments.filter());
      }
    }
  }
  return tests.finish();
}
