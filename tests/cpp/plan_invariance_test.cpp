// Options::batch_invariant: of random features on made-up GPUs, what a plan chooses must be the
// same whatever the lengths, the batch and the numbers of heads are. Needs no GPU and no CUDA.
#include <algorithm>
#include <cstdio>
#include <random>
#include <sstream>
#include <string>

#include "check.h"
#include "core/plan.h"
#include "plan_problems.h"

using namespace dlattn;
using test::kApart;
using test::memory;

namespace {

const std::int32_t list[1] = {};
const float numbers[1] = {};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  // 0 .. count - 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(count));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T, std::size_t kCount>
  T one_of(const T (&choices)[kCount]) {
    return choices[below(kCount)];
  }

 private:
  std::mt19937_64 engine_;
};

// All that a choice may depend on.
struct Features {
  DeviceInfo device;
  Options options;
  AttentionParams params;  // without sizes and strides
  std::int64_t group = 1;
  bool cache = false;
};

// The choices of a plan that decide about the bits of a row.
struct Choice {
  std::string kernel;
  int variant, packed_heads, block_m, block_n, num_warps, num_stages, copy_bytes, cluster_size;
  std::int64_t split_size;

  explicit Choice(const Plan& plan)
      : kernel(plan.kernel),
        variant(plan.variant),
        packed_heads(plan.packed_heads),
        block_m(plan.block_m),
        block_n(plan.block_n),
        num_warps(plan.num_warps),
        num_stages(plan.num_stages),
        copy_bytes(plan.copy_bytes),
        cluster_size(plan.cluster_size),
        split_size(plan.split_size) {}

  std::string text() const {
    std::ostringstream out;
    out << kernel << " variant " << variant << " packed_heads " << packed_heads << " tile "
        << block_m << " x " << block_n << " warps " << num_warps << " stages " << num_stages
        << " copy_bytes " << copy_bytes << " cluster " << cluster_size << " split_size "
        << split_size;
    return out.str();
  }
};

DeviceInfo random_device(Random& random) {
  const DeviceInfo devices[] = {
      test::gpu("A100", 8, 0, 108, 166912),     test::gpu("RTX 3060", 8, 6, 28, 101376),
      test::gpu("RTX 3090", 8, 6, 82, 101376),  test::gpu("L4", 8, 9, 58, 101376),
      test::gpu("RTX 4090", 8, 9, 128, 101376), test::gpu("H200", 9, 0, 132, 232448),
      test::gpu("H100", 9, 0, 114, 232448),     test::gpu("H200", 9, 0, 132, 232448),
      test::gpu("B200", 10, 0, 148, 232448),    test::gpu("RTX 5090", 12, 0, 170, 101376)};
  DeviceInfo device = random.one_of(devices);
  if (device.compute_major == 9 && random.chance(20)) device.arch_specific_code = false;
  return device;
}

void set_masks_and_scores(Random& random, AttentionParams* p) {
  constexpr Causal kCausal[] = {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft};
  constexpr std::int64_t kSides[] = {-1, -1, 0, 5, 70, 128, 1000, 100000};
  p->causal = random.one_of(kCausal);
  p->window_left = random.one_of(kSides), p->window_right = random.one_of(kSides);
  p->softmax_scale = random.chance(90) ? 0.125 : 1e-7;
  if (random.chance(25)) p->softcap = random.chance(80) ? 9.0 : 1e-6;
  if (random.chance(25)) p->alibi_slopes.data = numbers;
  if (random.chance(20)) p->sinks.data = numbers;
  if (random.chance(15)) p->bias.data = numbers;
  p->bias.dtype = random.chance(50) ? p->q.dtype : DType::kFloat32;
  if (random.chance(15)) p->mask.data = reinterpret_cast<const std::uint8_t*>(numbers);
  const std::int64_t stride = random.chance(80) ? 1 : 2;
  p->bias.col_stride = p->mask.col_stride = stride;
}

void set_cache(Random& random, AttentionParams* p) {
  if (random.chance(60)) p->seqused_k = list;
  if (random.chance(20)) p->leftpad_k = list;
  if (random.chance(50)) {
    constexpr std::int64_t kPages[] = {1, 16, 48, 64, 256, 4096};
    p->page_table.data = list;
    p->page_size = random.one_of(kPages);
  } else if (!p->seqused_k || random.chance(30)) {
    p->cache_batch_idx = list;
  }
  if (random.chance(30))
    p->k.dtype = p->v.dtype = random.chance(50) ? DType::kInt8 : DType::kFloat8E4M3;
}

Features random_features(Random& random) {
  Features f;
  f.device = random_device(random);
  AttentionParams& p = f.params;
  p.device = {DeviceType::kCuda, 0};
  constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                              DType::kFloat8E4M3};
  const DType dtype = random.chance(75) ? kTypes[random.below(2)] : random.one_of(kTypes);
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype;
  if (dtype == DType::kFloat8E4M3) p.out.dtype = DType::kBFloat16;
  constexpr std::int64_t kDims[] = {16, 32, 64, 64, 80, 96, 128, 128, 192, 256};
  p.head_dim = random.chance(85) ? random.one_of(kDims) : 1 + random.below(256);
  p.head_dim_v = random.chance(85) ? p.head_dim : random.one_of(kDims);
  constexpr std::int64_t kGroups[] = {1, 1, 2, 4, 7, 8, 16, 71, 128, 600};
  f.group = random.one_of(kGroups);
  set_masks_and_scores(random, &p);
  f.cache = size_of(dtype) == 2 && random.chance(30);
  if (f.cache) set_cache(random, &p);
  constexpr Precision kPrecisions[] = {Precision::kFp8, Precision::kInt8Fp8, Precision::kInt8Fp16};
  if (size_of(dtype) == 2 && !f.cache && random.chance(15)) {
    p.precision = random.one_of(kPrecisions);
    p.softcap = 0.0, p.bias.data = nullptr, p.alibi_slopes.data = nullptr;
    p.head_dim = std::min<std::int64_t>(p.head_dim, 128);
    p.head_dim_v = std::min<std::int64_t>(p.head_dim_v, 128);
  }
  f.options.batch_invariant = true;
  f.options.allow_workspace = random.chance(85);
  if (random.chance(15)) f.options.split_size = 128 * (1 + random.below(20));
  if (f.options.split_size == 0 && random.chance(10)) f.options.num_splits = 1;
  constexpr std::string_view kKernels[] = {"wmma", "decode", "sm90", "scalar", "wmma_qk"};
  if (random.chance(25)) f.options.kernel = random.one_of(kKernels);
  if (f.options.kernel == "wmma" && random.chance(40)) f.options.variant = "unpacked";
  return f;
}

// Contiguous rows, as far apart as the alignment that is drawn for each tensor lets them be. The
// stride of a dimension of one element may be anything.
template <typename T>
void lay_out(Random& random, bool heads_first, const std::int64_t (&sizes)[3], std::int64_t columns,
             T* x) {
  const std::int64_t step = 16 / size_of(x->dtype);
  const std::int64_t row = (columns + step - 1) / step * step;
  const std::int64_t batch = sizes[0], rows = sizes[1], heads = sizes[2];
  x->head_stride = heads_first ? rows * row : row;
  x->row_stride = heads_first ? row : heads * row;
  x->batch_stride = rows * heads * row;
  const std::int64_t unused = random.chance(50) ? 1 : 7;
  if (batch <= 1) x->batch_stride = unused;
  if (rows <= 1) x->row_stride = unused;
  if (heads <= 1) x->head_stride = unused;
}

// One of the problems that have these features.
AttentionParams random_problem(Random& random, const Features& f, bool varlen) {
  constexpr std::int64_t kLengths[] = {0,   1,   1,   2,    9,    16,   17,    64,    100,
                                       129, 300, 511, 1024, 1500, 4096, 16384, 65536, 131072};
  constexpr std::int64_t kBatches[] = {1, 1, 1, 2, 7, 64, 1000};
  constexpr std::int64_t kHeads[] = {1, 2, 8, 16};
  AttentionParams p = f.params;
  p.batch_size = random.one_of(kBatches);
  p.num_heads_kv = random.one_of(kHeads), p.num_heads = p.num_heads_kv * f.group;
  p.seqlen_q = random.one_of(kLengths), p.seqlen_k = random.one_of(kLengths);
  if (p.batch_size * p.num_heads > 4096) {
    p.seqlen_q = 1 + random.below(64);
    p.seqlen_k = std::min<std::int64_t>(p.seqlen_k, 2000);
  }
  if (p.batch_size * p.num_heads_kv * p.seqlen_k > 100'000'000) p.seqlen_k = 1 + random.below(9000);
  if (random.chance(50)) p.seqlen_q = std::min<std::int64_t>(p.seqlen_q, 1 + random.below(64));
  // decode counts tiles of keys in 31 bits.
  if (f.cache || f.options.kernel != core::kAuto || f.options.split_size > 0)
    p.seqlen_q = std::min<std::int64_t>(p.seqlen_q, 300);
  std::int64_t queries[3] = {p.batch_size, p.seqlen_q, p.num_heads};
  std::int64_t keys[3] = {p.batch_size, p.seqlen_k, p.num_heads_kv};
  if (varlen) {
    // Between one long sequence with many empty ones, and sequences that are all alike.
    p.cu_seqlens_q = list;
    p.total_q = p.seqlen_q + random.below(1 + (p.batch_size - 1) * p.seqlen_q);
    queries[0] = 1, queries[1] = p.total_q;
    if (!f.cache) {
      p.cu_seqlens_k = list;
      p.total_k = p.seqlen_k + random.below(1 + (p.batch_size - 1) * p.seqlen_k);
      keys[0] = 1, keys[1] = p.total_k;
    }
  }
  if (p.page_table.data) {
    p.num_pages = 1 + random.below(10000);
    keys[0] = p.num_pages, keys[1] = p.page_size;
  } else if (p.cache_batch_idx) {
    keys[0] = p.cache_batch_size = 1 + random.below(100);
  }
  const bool heads_first = random.chance(30);
  lay_out(random, heads_first, queries, p.head_dim, &p.q);
  lay_out(random, heads_first, keys, p.head_dim, &p.k);
  lay_out(random, heads_first, keys, p.head_dim_v, &p.v);
  lay_out(random, heads_first, queries, p.head_dim_v, &p.out);
  p.bias.row_stride = p.mask.row_stride = p.seqlen_k * p.bias.col_stride;
  p.bias.head_stride = p.mask.head_stride = p.seqlen_q * p.bias.row_stride;
  return p;
}

// Addresses that are aligned as each tensor's rows are to be.
void set_alignment(Random& random, AttentionParams* p) {
  const auto address = [&](int index, DType dtype) {
    const std::int64_t past = random.chance(92) ? 0 : size_of(dtype) << random.below(4);
    return memory + index * kApart + past % 16;
  };
  p->q.data = address(0, p->q.dtype), p->k.data = address(1, p->k.dtype);
  p->v.data = address(2, p->v.dtype), p->out.data = address(3, p->out.dtype);
}

std::string describe_problem(const AttentionParams& p) {
  std::ostringstream out;
  out << "batch " << p.batch_size << " seqlens " << p.seqlen_q << " " << p.seqlen_k << " heads "
      << p.num_heads << "/" << p.num_heads_kv << (p.cu_seqlens_q ? " varlen" : "");
  return out.str();
}

// Problems of the same features, of fixed and of variable length: all of one choice. Each way of
// calling serves all of them or none.
void one_choice() {
  int accepted = 0, by_decode = 0, by_sm90 = 0, of_caches = 0, matters = 0;
  for (unsigned seed = 0; seed < 4000; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    set_alignment(random, &f.params);
    const std::string at_seed = "seed " + std::to_string(seed) + ": ";
    std::string first, first_problem, answers[2];
    bool fastest_differs = false;
    std::string fastest;
    for (int i = 0; i < 16; ++i) {
      const bool varlen = i % 2 == 1;
      const AttentionParams p = random_problem(random, f, varlen);
      const std::vector<std::string> reasons = core::refusals(p, f.device, f.options);
      const std::string answer = reasons.empty() ? "served" : "refused";
      std::string& of_kind = answers[varlen ? 1 : 0];
      if (of_kind.empty()) of_kind = answer;
      CHECK_FOR(answer == of_kind, at_seed + describe_problem(p) + ", which is " + answer +
                                       (reasons.empty() ? "" : ": " + reasons[0]));
      if (!reasons.empty()) continue;
      const Plan plan = core::make_plan(p, f.device, f.options);
      const std::string choice = Choice(plan).text();
      if (first.empty()) first = choice, first_problem = describe_problem(p);
      CHECK_FOR(choice == first, at_seed + describe_problem(p) + ": " + choice + ", but " +
                                     first_problem + ": " + first);
      CHECK(plan.predicted_ns > 0.0);
      // Few rows have no kernel of their own, but with keys in a cache or as the caller asks.
      if (!f.cache && f.options.kernel == core::kAuto && f.options.split_size == 0)
        CHECK(plan.kernel != "decode");
      ++accepted, by_decode += plan.kernel == "decode", by_sm90 += plan.kernel == "sm90";
      of_caches += f.cache;
      Options any = f.options;
      any.batch_invariant = false;
      const std::string other = Choice(core::make_plan(p, f.device, any)).text();
      if (fastest.empty()) fastest = other;
      fastest_differs |= other != fastest;
    }
    matters += fastest_differs;
  }
  // The test is about something: all of these occur, and mostly lengths would decide.
  CHECK(accepted > 10000);
  CHECK(by_decode > 3000);
  CHECK(by_sm90 > 1000);
  CHECK(of_caches > 2000);
  CHECK(matters > 500);
}

Options invariant() {
  Options options;
  options.batch_invariant = true;
  return options;
}

// A fault that a caller saw: alone a few rows were decode's, and in a batch sm90's.
void few_rows_with_softcap() {
  const DeviceInfo h200 = test::gpu("H200", 9, 0, 132, 232448);
  constexpr std::int64_t kLengths[][2] = {{1, 300},   {17, 17},   {300, 511},
                                          {511, 300}, {64, 1024}, {130, 129}};
  AttentionParams p = test::problem(DType::kBFloat16, 64);
  p.num_heads_kv = 2, p.softcap = 9.0, p.window_left = 70, p.window_right = 5;
  p.k.row_stride = p.v.row_stride = 2 * 64;
  AttentionParams pack = p;
  pack.batch_size = 6, pack.cu_seqlens_q = pack.cu_seqlens_k = list;
  for (const auto& lengths : kLengths) {
    pack.total_q += lengths[0], pack.seqlen_q = std::max(pack.seqlen_q, lengths[0]);
    pack.total_k += lengths[1], pack.seqlen_k = std::max(pack.seqlen_k, lengths[1]);
  }
  const std::string of_pack = Choice(core::make_plan(pack, h200, invariant())).text();
  for (const auto& lengths : kLengths) {
    p.batch_size = 1, p.seqlen_q = lengths[0], p.seqlen_k = lengths[1];
    const std::string alone = Choice(core::make_plan(p, h200, invariant())).text();
    CHECK_FOR(alone == of_pack, alone + ", but the pack " + of_pack);
  }
}

// Beyond the limits of the kernel that is taken for all lengths there is no other one.
void beyond_limits() {
  const DeviceInfo h200 = test::gpu("H200", 9, 0, 132, 232448);
  const DeviceInfo l4 = test::gpu("L4", 8, 9, 58, 101376);
  AttentionParams p = test::problem(DType::kFloat16, 128);
  p.seqlen_k = 200000;
  CHECK(core::make_plan(p, h200, {}).kernel == "wmma");
  CHECK_THROWS(core::make_plan(p, h200, invariant()), UnsupportedError,
               "no kernel can run this: sm90: seqlen_k is 200000; accepted: up to 131072; with "
               "batch_invariant no other kernel is taken");
  CHECK_THROWS(core::make_plan(p, l4, invariant()), UnsupportedError,
               "no kernel can run this: wmma: variant narrow: seqlen_k is 200000; accepted: up to "
               "131072; with batch_invariant no other kernel is taken");
  // By name all sequences may have a kernel for any length.
  Options general = invariant();
  general.kernel = "wmma", general.variant = "general";
  for (const bool varlen : {false, true}) {
    p.cu_seqlens_q = p.cu_seqlens_k = varlen ? list : nullptr;
    p.total_q = p.total_k = varlen ? 400000 : 0;
    CHECK(core::make_plan(p, l4, general).variant_name == std::string("general"));
  }
  // Strides that TMA takes of one way of calling alone.
  p.seqlen_k = 2048;
  p.k.head_stride = std::int64_t{1} << 34;
  CHECK_THROWS(core::make_plan(p, h200, invariant()), UnsupportedError,
               "no kernel can run this: sm90: k has a head stride of 34359738368 bytes; accepted: "
               "multiples of 16 from 0 to 17179869168; with batch_invariant no other kernel is "
               "taken");
  // Where the caller names all, the limits are those of what is named.
  Options single_pass = invariant();
  single_pass.kernel = "wmma", single_pass.variant = "single_pass";
  p = test::problem(DType::kFloat16, 64);
  const DeviceInfo a100 = test::gpu("A100", 8, 0, 108, 166912);
  CHECK(!core::refusals(p, a100, single_pass).empty());
  p.seqlen_k = 256;
  CHECK(core::refusals(p, a100, single_pass).empty());
  // A problem that no kernel serves is refused for the tensors that it has.
  p = test::problem(DType::kFloat16, 64);
  p.k.data = static_cast<const char*>(p.k.data) + 2;
  Options decode = invariant();
  decode.kernel = "decode";
  CHECK_THROWS(core::make_plan(p, l4, decode), UnsupportedError,
               "no kernel can run this: decode: rows of q, k and v are aligned to 2 bytes; "
               "accepted: 16");
  decode.kernel = "none";
  CHECK(core::refusals(p, l4, decode)[0].find("kernel is none; accepted: ") == 0);
}

}  // namespace

int main() {
  one_choice();
  few_rows_with_softcap();
  beyond_limits();
  return test::summary();
}
