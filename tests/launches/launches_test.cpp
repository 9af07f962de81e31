// For random problems of every operation, the kernels that a call launches are those that its plan
// lists, launched as it says.
#include <map>
#include <string>
#include <vector>

#include "check.h"
#include "core/plan/family.h"
#include "core/problem/quantized.h"
#include "dlattn/append.h"
#include "dlattn/backward.h"
#include "dlattn/merge.h"
#include "dlattn/quantize.h"
#include "random_problem.h"
#include "recorder.h"

using namespace dlattn;
using namespace test;

namespace {

std::map<std::string, int> launched;  // by operation and family

std::string name_of(const Launch& launch) {
  return std::string(to_string(launch.operation)) + " " + std::string(launch.kernel);
}

// The namespace of a launch's kernels; combine's are those of the attention that it ends.
std::string space_of(const Launch& launch) {
  const bool attention =
      launch.operation == Operation::kForward || launch.operation == Operation::kCombine;
  if (launch.operation == Operation::kBackward)
    return "dlattn::backward_" + std::string(launch.kernel) + "::";
  return (attention ? "dlattn::" : "dlattn::" + std::string(to_string(launch.operation)) + "::") +
         std::string(launch.kernel) + "::";
}

void check_launch(const Launch& planned, const recorder::Launch& launch, void* stream,
                  const std::string& where) {
  const std::string name = recorder::name_of(launch.kernel);
  const std::string what = where + ": " + describe(planned) + ": " + name;
  CHECK_FOR(name.rfind(space_of(planned), 0) == 0, what);
  const bool combines = name.find("::combine_kernel<") != std::string::npos;
  CHECK_FOR(combines == (planned.operation == Operation::kCombine), what);
  CHECK_FOR(launch.grid[0] == planned.grid && launch.grid[1] == 1 && launch.grid[2] == 1, what);
  CHECK_FOR(launch.block[0] == 32u * planned.num_warps && launch.block[1] == 1, what);
  CHECK_FOR(launch.smem_bytes == static_cast<std::size_t>(planned.smem_bytes), what);
  CHECK_FOR(planned.smem_bytes <= recorder::allowed_smem(launch.kernel), what);
  CHECK_FOR(launch.cluster == static_cast<unsigned>(planned.cluster_size), what);
  CHECK_FOR(launch.starts_early && launch.stream == stream, what);
  ++launched[name_of(planned)];
}

// Compares the launches of a call with its plan.
void check_call(const Plan& plan, void* stream, const std::string& where) {
  const auto& launches = recorder::launches();
  CHECK_FOR(launches.size() == static_cast<std::size_t>(plan.num_launches()),
            where + ": " + describe(plan));
  for (int i = 0; i < plan.num_launches() && i < static_cast<int>(launches.size()); ++i)
    check_launch(plan.launch(i), launches[i], stream, where);
}

// Runs a call of which `make_plan` makes the plan. Returns whether it was served.
template <typename MakePlan, typename Call>
bool check(const MakePlan& make_plan, const Call& call, const std::string& where) {
  void* const stream = reinterpret_cast<void*>(std::uintptr_t{0x5700});
  Plan plan;
  std::string refused, refusal;
  try {
    plan = make_plan();
  } catch (const UnsupportedError& error) {
    refused = error.what();
  }
  recorder::clear();
  try {
    call(stream);
  } catch (const UnsupportedError& error) {
    refusal = error.what();
  }
  CHECK_FOR(refused == refusal, where + ": " + refusal + ", but the plan: " + refused);
  if (refused.empty()) check_call(plan, stream, where);
  return refused.empty() && refusal.empty();
}

char* at(int index) {
  return memory + (8 + index) * (kApart / 16);
}

void add_outputs_and_scales(Random& random, AttentionParams* p) {
  if (size_of(p->k.dtype) == 1) p->k_descale.data = p->v_descale.data = numbers;
  if (size_of(p->q.dtype) == 1) p->q_descale.data = numbers;
  if (p->precision != Precision::kInputs && random.chance(30)) p->quantized_kv = at(0);
  if (random.chance(40)) {
    p->lse.data = reinterpret_cast<float*>(at(1)), p->lse.row_stride = 1;
    p->lse.head_stride = p->cu_seqlens_q ? p->total_q : p->seqlen_q;
    p->lse.batch_stride = p->num_heads * p->seqlen_q;
  }
}

// Parts that are left in the workspace are combined by a launch of its own.
void check_parts(const AttentionParams& p, const Options& options, const std::string& where) {
  const Plan plan = dlattn::plan(p, device_info(p.device), options);
  const bool has_parts = plan.kernel == "decode" || plan.kernel == "sm90_latent";
  const bool leaves_parts = has_parts && plan.grid > 0 && plan.workspace_bytes > 0;
  const int last = plan.num_launches() - 1;
  CHECK_FOR((last > 0 && plan.launch(last).operation == Operation::kCombine) == leaves_parts,
            where);
}

void attention() {
  int served = 0, of_several = 0;
  for (unsigned seed = 0; seed < 3000; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    f.options.batch_invariant = random.chance(30);
    f.options.allow_workspace = true;
    const auto& kernels = kernel_names();  // "auto", "cpu", and the families
    f.options.variant = nullptr;
    f.options.kernel =
        random.chance(60)
            ? core::kAuto
            : kernels[2 + random.below(static_cast<std::int64_t>(kernels.size()) - 2)];
    if (!f.options.batch_invariant && random.chance(20))
      f.options.num_splits = 1 + static_cast<int>(random.below(9)), f.options.split_size = 0;
    set_alignment(random, &f.params);
    f.params.device.index = static_cast<int>(random.below(recorder::kNumDevices));
    for (const bool varlen : {false, true}) {
      AttentionParams p = random_problem(random, f, varlen);
      add_outputs_and_scales(random, &p);
      p.workspace = at(2), p.workspace_bytes = std::int64_t{1} << 50;
      const DeviceInfo& device = device_info(p.device);
      const bool ok = check([&] { return dlattn::plan(p, device, f.options); },
                            [&](void* stream) { forward(p, stream, f.options); },
                            "seed " + std::to_string(seed) + ": " + describe_problem(p));
      if (ok) check_parts(p, f.options, "seed " + std::to_string(seed));
      served += ok, of_several += ok && recorder::launches().size() > 1;
    }
  }
  CHECK(served > 2000);
  CHECK(of_several > 200);
}

// Which random problems do not have, as wide heads in multiples of 8.
void latents_in_pages() {
  const struct {
    const char* kernel;
    DType dtype;  // of keys
  } callers[] = {{"auto", DType::kBFloat16},        {"decode", DType::kBFloat16},
                 {"sm90_latent", DType::kBFloat16}, {"auto", DType::kInt8},
                 {"auto", DType::kFloat8E4M3},      {"decode", DType::kFloat8E4M3}};
  for (const auto& [kernel, dtype] : callers) {
    for (const std::int64_t heads : {16, 128}) {
      for (const std::int64_t batch : {1, 8, 66}) {
        for (const int num_splits : {0, 3}) {
          AttentionParams p = latents(batch, 4096, heads);
          p.k.dtype = p.v.dtype = dtype;
          if (size_of(dtype) == 1) p.k_descale.data = p.v_descale.data = numbers;
          p.workspace = at(2), p.workspace_bytes = std::int64_t{1} << 50;
          Options options = force(kernel);
          options.allow_workspace = true, options.num_splits = num_splits;
          const std::string where = std::string("latents by ") + kernel;
          CHECK(check([&] { return dlattn::plan(p, device_info(p.device), options); },
                      [&](void* stream) { forward(p, stream, options); }, where));
          check_parts(p, options, where);
        }
      }
    }
  }
}

void wide_heads() {
  for (const char* kernel : {"auto", "sm90_wide"}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      for (const std::int64_t head_dim : {264, 384, 512}) {
        for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
          AttentionParams p = problem(dtype, head_dim);
          p.causal = causal;
          const Options options = force(kernel);
          CHECK(check([&] { return dlattn::plan(p, device_info(p.device), options); },
                      [&](void* stream) { forward(p, stream, options); },
                      std::string("wide heads by ") + kernel));
        }
      }
    }
  }
}

void quantization() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    set_alignment(random, &f.params);
    if (size_of(f.params.q.dtype) != 2 || f.cache) continue;
    constexpr Precision kPrecisions[] = {Precision::kFp8, Precision::kInt8Fp8,
                                         Precision::kInt8Fp16};
    f.params.precision = random.one_of(kPrecisions);
    f.params.head_dim = f.params.head_dim_v = 1 + random.below(128);
    QuantizeParams p = keys_of(random_problem(random, f, random.chance(50)));
    p.device.index = static_cast<int>(random.below(2));
    p.quantized_kv = at(0);
    check([&] { return dlattn::plan(p, device_info(p.device)); },
          [&](void* stream) { quantize_kv(p, stream); }, "quantize, seed " + std::to_string(seed));
  }
}

template <typename View>
void lay_out_heads(int index, DType dtype, std::int64_t rows, std::int64_t heads,
                   std::int64_t head_dim, View* x) {
  x->data = at(index), x->dtype = dtype;
  x->head_stride = head_dim, x->row_stride = heads * head_dim;
  x->batch_stride = rows * x->row_stride;
}

constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32};

void merge() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Random random(seed);
    MergeParams p;
    p.device = {DeviceType::kCuda, static_cast<int>(random.below(recorder::kNumDevices))};
    p.num_states = 1 + static_cast<int>(random.below(5));
    p.batch_size = 1 + random.below(5), p.seqlen_q = 1 + random.below(99);
    p.num_heads = 1 + random.below(9), p.head_dim_v = 1 + random.below(200);
    const DType dtype = random.one_of(kTypes);
    const auto lay_out_lse = [&](int index, auto* lse) {
      lse->data = reinterpret_cast<float*>(at(index)), lse->row_stride = 1;
      lse->head_stride = p.seqlen_q, lse->batch_stride = p.num_heads * p.seqlen_q;
    };
    for (int i = 0; i < p.num_states; ++i) {
      lay_out_heads(i, dtype, p.seqlen_q, p.num_heads, p.head_dim_v, &p.outs[i]);
      lay_out_lse(10 + i, &p.lses[i]);
    }
    lay_out_heads(20, dtype, p.seqlen_q, p.num_heads, p.head_dim_v, &p.out);
    lay_out_lse(21, &p.lse);
    CHECK(check([&] { return dlattn::plan(p, device_info(p.device)); },
                [&](void* stream) { merge_states(p, stream); },
                "merge, seed " + std::to_string(seed)));
  }
}

void append() {
  for (unsigned seed = 0; seed < 200; ++seed) {
    Random random(seed);
    AppendParams p;
    p.device = {DeviceType::kCuda, static_cast<int>(random.below(recorder::kNumDevices))};
    p.batch_size = 1 + random.below(5), p.seqlen_new = 1 + random.below(9), p.seqlen_k = 512;
    p.num_heads_kv = 1 + random.below(9), p.num_heads = 2 * p.num_heads_kv;
    p.head_dim = p.head_dim_v = 1 + random.below(200);
    p.seqused_k = list;
    const DType dtype = random.one_of(kTypes);
    lay_out_heads(0, dtype, p.seqlen_new, p.num_heads_kv, p.head_dim, &p.k);
    lay_out_heads(1, dtype, p.seqlen_new, p.num_heads_kv, p.head_dim, &p.v);
    lay_out_heads(2, dtype, p.seqlen_k, p.num_heads_kv, p.head_dim, &p.k_cache);
    lay_out_heads(3, dtype, p.seqlen_k, p.num_heads_kv, p.head_dim, &p.v_cache);
    CHECK(check([&] { return dlattn::plan(p, device_info(p.device)); },
                [&](void* stream) { append_kv(p, stream); },
                "append, seed " + std::to_string(seed)));
  }
}

// A backward pass of a problem with some of the gradients.
BackwardParams random_backward(Random& random, const AttentionParams& forward) {
  BackwardParams b;
  AttentionParams& p = b.forward;
  p = forward;
  const std::int64_t rows_q = p.cu_seqlens_q ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = p.cu_seqlens_q ? p.total_k : p.seqlen_k;
  p.lse.data = reinterpret_cast<float*>(at(1)), p.lse.row_stride = 1;
  p.lse.head_stride = rows_q, p.lse.batch_stride = p.num_heads * rows_q;
  p.workspace = at(2), p.workspace_bytes = std::int64_t{1} << 50;
  const DType dtype = p.q.dtype;
  if (random.chance(90)) lay_out_heads(3, dtype, rows_q, p.num_heads, p.head_dim_v, &b.dout);
  if (random.chance(40) || !b.dout.data)
    b.dlse.data = p.lse.data, b.dlse.head_stride = rows_q, b.dlse.batch_stride = p.lse.batch_stride,
    b.dlse.row_stride = 1;
  if (random.chance(70)) lay_out_heads(4, dtype, rows_q, p.num_heads, p.head_dim, &b.dq);
  if (random.chance(70)) lay_out_heads(5, dtype, rows_k, p.num_heads_kv, p.head_dim, &b.dk);
  if (random.chance(70)) lay_out_heads(6, dtype, rows_k, p.num_heads_kv, p.head_dim_v, &b.dv);
  if (p.bias.data && random.chance(70)) {
    b.dbias.data = at(7), b.dbias.dtype = p.bias.dtype;
    if (random.chance(50)) b.dbias.row_stride = p.seqlen_k;
    if (random.chance(50)) b.dbias.head_stride = p.seqlen_q * p.seqlen_k;
    if (random.chance(50)) b.dbias.batch_stride = p.num_heads * p.seqlen_q * p.seqlen_k;
  }
  if (p.alibi_slopes.data && random.chance(70)) {
    b.dalibi_slopes.data = reinterpret_cast<float*>(at(8)), b.dalibi_slopes.head_stride = 1;
    if (random.chance(50)) b.dalibi_slopes.batch_stride = p.num_heads;
  }
  if (p.sinks.data && random.chance(70))
    b.dsinks.data = reinterpret_cast<float*>(at(9)), b.dsinks.head_stride = 1;
  b.deterministic = random.chance(50);
  return b;
}

void backward_passes() {
  int of_several = 0;
  for (unsigned seed = 0; seed < 800; ++seed) {
    Random random(seed);
    Features f = random_features(random);
    if (size_of(f.params.q.dtype) == 1 || f.cache) continue;
    f.params.precision = Precision::kInputs;
    set_alignment(random, &f.params);
    f.params.device.index = static_cast<int>(random.below(recorder::kNumDevices));
    const BackwardParams b = random_backward(random, random_problem(random, f, random.chance(50)));
    const DeviceInfo& device = device_info(b.forward.device);
    std::vector<std::string_view> kernels = {core::kAuto};
    for (const auto& family : core::families<BackwardParams>())
      kernels.push_back(family.record->name);
    for (const std::string_view kernel : kernels) {
      Options options;
      options.kernel = kernel;
      const bool ok = check([&] { return dlattn::plan(b, device, options); },
                            [&](void* stream) { backward(b, stream, options); },
                            "backward, seed " + std::to_string(seed));
      of_several += ok && recorder::launches().size() > 3;
    }
  }
  CHECK(of_several > 100);
}

template <typename Params>
void check_families(const char* operation) {
  for (const auto& family : core::families<Params>()) {
    const std::string name = std::string(operation) + " " + family.record->name;
    CHECK_FOR(launched[name] > 0, name);
  }
}

}  // namespace

int main() {
  attention();
  latents_in_pages();
  wide_heads();
  quantization();
  merge();
  append();
  backward_passes();
  check_families<AttentionParams>("forward");
  check_families<MergeParams>("merge");
  check_families<QuantizeTask>("quantize");
  check_families<AppendParams>("append");
  check_families<BackwardParams>("backward");
  CHECK(launched["combine decode"] > 0 && launched["combine sm90_latent"] > 0);
  CHECK(launched["delta row_blocks"] > 0 && launched["reduce partial_sums"] > 0);
  for (const auto& [name, count] : launched) std::printf("%s: %d launches\n", name.c_str(), count);
  return test::summary();
}
