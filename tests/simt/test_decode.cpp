#include "attention_test.h"
#include "cache_cases.h"
#include "cuda/forward/decode/combine.cuh"
#include "cuda/forward/decode/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"
#include "value_cases.h"

namespace {

constexpr std::string_view kFamily = "decode";

using simt::Cache;
using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;
namespace decode = dlattn::decode;

struct DecodeCase {
  Case sizes;
  Cache cache = {};
  // Thread blocks; 0: a row block has one, whatever there is.
  std::vector<int> blocks = {0, 3};
  // How the keys are split, with thread blocks.
  int num_splits = 0;
  int split_size = 0;
  bool narrow_out = false;  // rows of out are off 4 bytes
  // Thread blocks that have a row block's keys together, one of each of these after the other.
  std::vector<int> clusters = {};
};

// As the launcher does.
template <typename T, typename KV, int kTile, int kVariant>
void run_kernels(const dlattn::AttentionParams& params, const dlattn::Plan& plan,
                 const simt::Tensors<T>& tensors, simt::Schedule schedule) {
  const decode::DecodeShape shape = decode::make_decode_shape(params, plan);
  simt::Launch threads{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32),
                       static_cast<std::size_t>(plan.smem_bytes), schedule};
  threads.cluster_size = static_cast<unsigned>(plan.cluster_size);
  simt::start_early(&threads, tensors);
  using M = std::conditional_t<sizeof(KV) == 1, __half, T>;  // the type of the factors
  const auto run = [&](auto paged, auto general) {
    simt::launch(threads,
                 [&] { decode::kernel<M, KV, kTile, kVariant, paged, general>(params, shape); });
  };
  if (decode::is_general(params)) {
    run(std::true_type(), std::true_type());
  } else if (params.page_table.data) {
    run(std::true_type(), std::false_type());
  } else {
    run(std::false_type(), std::false_type());
  }
  if (shape.whole) return;
  // A thread block for each piece of a row, or by turns for three: the bits are the same.
  const std::int64_t rows_of_block = (plan.grid + schedule) % 2 == 0 ? 3 : 1;
  const std::int64_t combined = decode::rows_to_combine(params, kTile);
  simt::Launch rows{dim3(static_cast<unsigned>((combined + rows_of_block - 1) / rows_of_block)),
                    dim3(decode::kCombineThreads),
                    static_cast<std::size_t>(decode::combine_smem_bytes()), schedule};
  simt::start_early_behind(&rows, tensors);
  simt::launch(rows,
               [&] { decode::combine_kernel<T, kTile, kVariant, sizeof(KV)>(params, shape); });
}

// Whether this build has the kernels of a tile for keys as elements of KV: of those of 8 bits one
// kind. AddressSanitizer's build has e4m3, ThreadSanitizer's int8, the third one int8 in the least
// tile and e4m3 in the others.
template <typename KV>
constexpr bool is_built(int tile) {
  [[maybe_unused]] constexpr bool kInt8 = std::is_same_v<KV, std::int8_t>;
  if (!simt::is_built(simt::DTypeOf<KV>::value, tile)) return false;
  if (sizeof(KV) > 1) return true;
#if defined(SIMT_ASAN) || defined(SIMT_TSAN)
  return kInt8 == simt::kThreadSanitizer;
#elif defined(SIMT_ALL_INSTANCES) || defined(SIMT_TILE)
  return true;
#else
  return kInt8 == (tile == 64);
#endif
}

// The same of the tile of a case, before there are tensors for a plan.
template <typename KV>
bool is_built_for(const Case& c) {
  int tile = 256;
  for (const int smaller : {128, 64}) {
    if (std::max(c.head_dim, c.dim_v()) <= smaller) tile = smaller;
  }
  return is_built<KV>(tile);
}

// Whether there are kernels for a case's keys as elements of KV.
template <typename KV>
bool has_keys_of(const DecodeCase& d) {
  return sizeof(KV) > 1 ||
         (d.cache.any() && d.sizes.head_dim % 16 == 0 && d.sizes.dim_v() % 16 == 0);
}

template <typename T, typename KV = T>
void run(simt::Tests& tests, const DecodeCase& d, int variant, int blocks, int cluster,
         const char* filter) {
  if (!has_keys_of<KV>(d)) return;
  const Case& c = d.sizes;
  constexpr dlattn::DType kDType = simt::DTypeOf<T>::value;
  constexpr dlattn::DType kKeys = simt::DTypeOf<KV>::value;
  if (blocks == 0 && (d.num_splits || d.split_size)) return;
  const std::string name =
      "decode " + std::string(dlattn::to_string(kDType)) + " " + c.name() + d.cache.name() + " " +
      decode::kVariantNames[variant] + " blocks " + std::to_string(blocks) +
      (sizeof(KV) == 1 ? " keys " + std::string(dlattn::to_string(kKeys)) : "") +
      (cluster > 1 ? " cluster " + std::to_string(cluster) : "") +
      (d.num_splits ? " splits " + std::to_string(d.num_splits) : "") +
      (d.split_size ? " split_size " + std::to_string(d.split_size) : "");
  if (name.find(filter) == std::string::npos) return;
  if (std::is_same_v<T, __half> && std::abs(c.rise) > 1000.0) return;  // beyond float16
  if (!is_built_for<KV>(c)) return;
  simt::Tensors<T> t = simt::make_tensors<T>(c);
  if (d.narrow_out)
    simt::allocate(&t.out, Layout::kAlign2, c.batch_size, c.seqlen_q, c.num_heads, c.dim_v());
  dlattn::AttentionParams params = simt::make_params(c, t, kDType, kDType);
  std::optional<simt::Pool<T, KV>> pool;
  if (d.cache.any()) {
    pool.emplace(c, d.cache, t);
    pool->describe(d.cache, &params);
  }
  dlattn::Options options;
  options.kernel = kFamily;
  options.variant = decode::kVariantNames[variant];
  options.batch_invariant = blocks == 0;
  options.allow_workspace = blocks != 0;
  options.num_splits = d.num_splits;
  options.split_size = d.split_size;
  const std::vector<std::string> refusals = dlattn::core::refusals(params, simt::ada(), options);
  if (!refusals.empty()) {
    if (c.seed || variant == decode::kRows32) return;
    simt::die("%s: %s", name.c_str(), refusals[0].c_str());
  }
  dlattn::Plan plan = dlattn::core::make_plan(params, simt::ada(), options);
  if (!simt::is_built(plan.dtype, plan.head_dim_tile) || !is_built<KV>(plan.head_dim_tile)) return;
  if (plan.grid == 0) return;
  std::string trouble;
  plan.grid = blocks ? blocks : std::min<std::int64_t>(plan.grid, 2);
  if (d.num_splits == 0 && d.split_size == 0) plan.num_splits = blocks ? 2 : 1;
  if (cluster > 1) {
    if (cluster * plan.num_warps * 32 > simt::kMaxThreads) return;
    plan.cluster_size = plan.num_splits = cluster;
    plan.grid *= cluster;
  }
  const std::int64_t bytes =
      decode::workspace_map(params.batch_size, decode::num_parts(params, plan), plan.block_m,
                            plan.head_dim_tile)
          .total;
  const simt::Memory workspace = simt::workspace_memory(bytes);
  params.workspace = blocks ? workspace.get() : nullptr;
  const simt::HangGuard guard(name);
  std::vector<unsigned char> first_out;
  for (const simt::Schedule schedule : simt::schedules()) {
    t.out.poison(), t.lse.poison();
    std::memset(workspace.get(), 0xFF, bytes);
    simt::with_instance<kFamily, KV>(plan.head_dim_tile, [&](auto tile) {
      // Wide heads have a test of their own.
      if constexpr (is_built<KV>(tile) && !decode::is_wide(tile)) {
        if constexpr (decode::has_variant(tile, decode::kRows32)) {
          if (variant == decode::kRows32)
            return run_kernels<T, KV, tile, decode::kRows32>(params, plan, t, schedule);
        }
        run_kernels<T, KV, tile, decode::kRows16>(params, plan, t, schedule);
      }
    });
    const std::vector<unsigned char> out = t.out.bytes();
    if (first_out.empty()) first_out = out;
    if (out != first_out && !c.sequences_overlap())
      trouble = "out depends on the order of threads, or on who adds up";
    if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
    if (!simt::other_rows_intact(c, t)) trouble = "a write to rows of no sequence";
  }
  const auto problem_of = [&](int batch, int head) {
    return simt::cached_problem(c, d.cache, t, batch, head);
  };
  tests.report(name, simt::compare(c, t, simt::plain_rounding<T, T>(0.0f), problem_of), kDType,
               trouble);
}

// As a plan's grid deals them: units in one piece and in several, whole row blocks, sequences that
// begin and end within a thread block's units, thread blocks without units.
std::vector<DecodeCase> cases() {
  std::vector<DecodeCase> cases = {
      {{1, 1, 64, kFull}},
      {{1, 300, 64, kFull, 4, 1}, {}, {0, 1, 2, 5}},
      {{1, 500, 128, kCausal, 8, 2}, {}, {0, 3, 4, 60}},
      {{1, 129, 128, kFull, 7, 1}},
      {{3, 200, 128, kCausal, 4, 1}, {}, {0, 2, 3}},
      {{8, 170, 64, kCausal, 4, 1}, {}, {0, 3}},
      {{1, 200, 256, kCausal, 4, 2}, {}, {0, 3}},
      {{5, 90, 192, kFull, 2, 2}},
      // Many parts of a row, and few.
      {{1, 700, 128, kFull, 3, 1, Layout::kBshd, 0, 2}, {{700, 90}, 16}, {40, 41}},
      // Rows that see nothing.
      {{40, 20, 128, kCausal, 1, 1}},
      {{9, 3, 64, kCausal, 4, 2}},
      // Caches: lengths of 0, of one key, at the edges of pages and tiles, beyond what there is.
      {{1, 200, 128, kCausal, 4, 1, Layout::kBshd, 0, 5}, {{0, 1, 64, 200, 300}}, {0, 1, 3, 7}},
      {{2, 150, 64, kCausal, 4, 2, Layout::kBhsd, 0, 3}, {{17, 150, -3}, 16}, {0, 2, 5}},
      // Pages and entries that there are not, and padding: the nearest that there is.
      {{2, 90, 64, kCausal, 2, 1, Layout::kBshd, 0, 2}, {{90, 33}, 16, {}, {}, true, true}},
      {{1, 90, 64, kFull, 2, 1, Layout::kBshd, 0, 2}, {{90, 40}, 1, {}, {}, true, true}, {0, 3}},
      {{1, 100, 64, kFull, 2, 1, Layout::kBshd, 0, 2}, {{100, 60}, 0, {-5, 7}, {INT32_MIN, 3}}},
      {{2, 100, 64, kCausal, 2, 1, Layout::kBshd, 0, 3},
       {{INT32_MAX, INT32_MIN, 40}, 16, {}, {7, 0, INT32_MAX}},
       {0, 3}},
      {{1, 90, 128, kFull, 2, 1, Layout::kPacked, 0, 3}, {{90, 5, 33}, 1}, {0, 4}},
      {{3, 130, 128, kCausal, 2, 2, Layout::kBshd, 0, 2}, {{130, 40}, 48}, {0, 3}},
      {{1, 100, 64, kFull, 2, 1, Layout::kBshd, 0, 3}, {{100, 7, 60}, 0, {2, 0, 7}}, {0, 3}},
      {{2, 100, 64, kCausal, 2, 1, Layout::kBshd, 0, 4}, {{100, 7, 60, 9}, 32, {}, {3, 7, 0, 100}}},
      {{1, 100, 256, kFull, 2, 1, Layout::kBshd, 0, 2}, {{100, 35}, 7}},
      // Caches of 8 bits with more rows than a row block has, and more heads.
      {{6, 300, 128, kCausal, 8, 2, Layout::kBshd, 0, 3}, {{300, 40, 129}, 16}, {0, 2, 9}},
      {{1, 290, 192, kFull, 8, 1, Layout::kBhsd, 0, 2}, {{290, 3}}, {0, 5}},
      // Windows, and pages before them that there are not, within their first tile too.
      {simt::with({1, 400, 128, kCausal, 4, 1, Layout::kBshd, 0, 3},
                  [](Case& c) { c.window_left = 90; }),
       {{400, 5, 131}, 16},
       {0, 2}},
      {simt::with({3, 300, 64, kCausal, 2, 1, Layout::kBhsd, 0, 2},
                  [](Case& c) { c.window_left = 5; }),
       {{300, 77}, 1}},
      // Keys split as the caller asks: more parts than there are tiles, parts of which windows
      // leave a piece, sequences without a part.
      {{1, 700, 64, kFull, 4, 1, Layout::kBshd, 0, 4}, {{700, 0, 1, 300}, 16}, {1, 3, 40}, 3},
      {{2, 500, 128, kCausal, 4, 2, Layout::kBshd, 0, 2}, {{500, 64}}, {2, 7}, 100},
      {{1, 700, 64, kFull, 4, 1, Layout::kBshd, 0, 4}, {{700, 0, 128, 300}, 16}, {1, 3}, 0, 128},
      {{3, 400, 128, kCausal, 2, 1, Layout::kBshd, 0, 2}, {{400, 257}, 7}, {3}, 0, 256},
      {{1, 300, 256, kFull, 2, 1, Layout::kBshd, 0, 2}, {{300, 129}}, {2}, 0, 128},
      {{1, 300, 128, kCausal, 2, 1}, {}, {2}, 2},
      // Queries of variable length: of an only sequence, of several, without lengths of keys.
      {simt::varlen_queries({1, 90, 64, kCausal, 2, 1}, {2}), {{78}, 16}},
      {simt::varlen_queries({1, 300, 64, kCausal, 4, 2}, {2, 0, 9}), {{300, 60, 129}, 16}, {0, 5}},
      {simt::varlen_queries({1, 200, 128, kCausal, 4, 1}, {1, 8}),
       {{200, 200}, 0, {}, {}, false},
       {0, 3}},
      // No sequence is as the first one, without lengths too.
      {{1, 300, 64, kFull, 2, 1, Layout::kBshd, 0, 3},
       {{300, 300, 300}, 0, {}, {170, 0, 3}, false}},
  };
  for (const Case& c : simt::far_key_cases()) cases.push_back({c, {}, {0, 3}});
  // Clusters: more blocks than there are tiles, so that some have none, rows that see nothing,
  // sequences of several lengths one after the other, windows, draft tokens, keys of 8 bits.
  const auto add_clusters = [&](const Case& c, const Cache& cache, std::vector<int> sizes) {
    cases.push_back({c, cache, {}});
    cases.back().clusters = std::move(sizes);
  };
  add_clusters({1, 500, 128, kCausal, 8, 2}, {}, {2, 4, 8});
  add_clusters({1, 90, 64, kFull, 4, 1}, {}, {2, 8});
  add_clusters({40, 20, 128, kCausal, 1, 1}, {}, {4});
  add_clusters({1, 200, 128, kCausal, 4, 1, Layout::kBshd, 0, 5}, {{0, 1, 64, 200, 300}}, {4});
  add_clusters({2, 90, 64, kCausal, 2, 1, Layout::kBshd, 0, 2}, {{90, 33}, 16, {}, {}, true, true},
               {2});
  add_clusters({6, 300, 128, kCausal, 8, 2, Layout::kBshd, 0, 3}, {{300, 40, 129}, 16}, {2, 4});
  add_clusters({1, 290, 192, kFull, 8, 1, Layout::kBhsd, 0, 2}, {{290, 3}}, {2, 8});
  add_clusters(simt::with({2, 400, 128, kCausal, 4, 2, Layout::kBshd, 0, 2},
                          [](Case& c) { c.softcap = 3.0, c.window_left = 150, c.sinks = true; }),
               {{400, 230}, 16}, {4});
  add_clusters(simt::with({3, 300, 64, kFull}, [](Case& c) { c.rise = -1e9; }), {}, {2});
  for (const Case& c : simt::packed_cases(64)) {
    if (c.batch_size > 0) add_clusters(c, {}, {4});
  }
  const auto add = [&](const Case& c) {
    if (c.batch_size > 0) cases.push_back({c});
  };
  for (const Case& c : simt::shape_cases()) add(c);
  for (const Case& c : simt::packed_cases(64)) add(c);
  for (const Case& c : simt::feature_cases(128)) add(c);
  cases.push_back({{3, 300, 64, kCausal, 4, 2}});
  cases.back().narrow_out = true;
  // Pages of K and V that are not alike, and more slices than a ring of stages has room for.
  cases.push_back({simt::with({2, 1100, 40, kCausal, 2, 1, Layout::kBshd, 0, 2},
                              [](Case& c) { c.head_dim_v = 64; }),
                   {{1100, 700}, 16},
                   {0, 3}});
  add(simt::with({3, 90, 64, kCausal, 4, 2}, [](Case& c) { c.softcap = 5.0; }));
  add(simt::with({3, 90, 128, kCausal, 4, 2}, [](Case& c) { c.alibi = true, c.sinks = true; }));
  add(simt::with({8, 70, 64, kCausal, 2, 1}, [](Case& c) { c.mask = true; }));
  cases.push_back({simt::with({4, 90, 64, kCausal, 2, 1, Layout::kBshd, 0, 2},
                              [](Case& c) { c.mask = true, c.window_left = 40; }),
                   {{90, 33}, 16}});
  cases.push_back(
      {simt::with({2, 400, 128, kCausal, 4, 2, Layout::kBshd, 0, 2},
                  [](Case& c) { c.softcap = 3.0, c.window_left = 150, c.sinks = true; }),
       {{400, 230}, 16},
       {1, 4},
       0,
       128});
  // Row maxima that rise from key to key, and one that overflows.
  for (const double rise : {4.0, -1000.0, 1e4, -1e5, -1e9})
    add(simt::with({3, 300, 64, kFull}, [rise](Case& c) { c.rise = rise; }));
  if (simt::kThreadSanitizer) return cases;
  for (const Case& c : simt::packed_cases(128)) add(c);
  for (const Case& c : simt::feature_cases(64)) add(c);
  for (const Case& c : simt::feature_cases(200)) add(c);
  for (const Case& c : simt::length_cases(64)) add(c);
  cases.push_back({{1, 130, 128, kFull, 4, 1, Layout::kBshd, 0, 40},
                   {std::vector<int>(40, 30), 16},
                   {0, 5, 11}});
  return cases;
}

#if defined(SIMT_ALL_INSTANCES) || defined(SIMT_ALL_TILES)
constexpr bool kBothTypes = true;
#else
constexpr bool kBothTypes = false;
#endif

// With 8-bit keys one kernel serves q and out of either type, which it reads and writes in one
// place: those are in turns of one type and of the other.
void run_types(simt::Tests& tests, const DecodeCase& c, int variant, int blocks, int cluster,
               const char* filter) {
  run<__half>(tests, c, variant, blocks, cluster, filter);
  run<__nv_bfloat16>(tests, c, variant, blocks, cluster, filter);
  static int number = 0;
  const bool half = (number++ / decode::kNumVariants + variant) % 2 == 0;
  if (kBothTypes || half) {
    run<__half, std::int8_t>(tests, c, variant, blocks, cluster, filter);
    run<__half, __nv_fp8_e4m3>(tests, c, variant, blocks, cluster, filter);
  }
  if (kBothTypes || !half) {
    run<__nv_bfloat16, std::int8_t>(tests, c, variant, blocks, cluster, filter);
    run<__nv_bfloat16, __nv_fp8_e4m3>(tests, c, variant, blocks, cluster, filter);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("decode", arguments);
  for (const DecodeCase& c : cases()) {
    for (const int blocks : c.blocks) {
      // Races of the fewest blocks and of the most: others are between.
      const bool between = blocks != c.blocks.front() && blocks != c.blocks.back();
      if (simt::kThreadSanitizer && between) continue;
      for (int variant = 0; variant < decode::kNumVariants; ++variant) {
        run_types(tests, c, variant, blocks, 1, arguments.filter());
      }
    }
    for (const int cluster : c.clusters) {
      for (int variant = 0; variant < decode::kNumVariants; ++variant)
        run_types(tests, c, variant, 0, cluster, arguments.filter());
    }
  }
  return tests.finish();
}
