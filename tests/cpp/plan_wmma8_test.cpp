// Plans of wmma8.
#include <string>

#include "check.h"
#include "core/plan/plan.h"
#include "cuda/forward/wmma8/traits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;

namespace {

const DeviceInfo l4 = gpus()[0];

AttentionParams problem(std::int64_t head_dim) {
  AttentionParams p = test::problem(DType::kFloat8E4M3, head_dim);
  p.out.dtype = DType::kBFloat16;
  return p;
}

void served() {
  for (const DeviceInfo& device : gpus()) {
    const int capability = 10 * device.compute_major + device.compute_minor;
    CHECK_EQ(supported(problem(128), device, force("wmma8")).ok, capability >= 89);
  }
  const struct {
    std::int64_t head_dim;
    int tile;
  } dims[] = {{16, 64}, {64, 64}, {80, 128}, {128, 128}, {144, 256}, {256, 256}};
  for (const auto& d : dims) {
    const Plan plan = dlattn::plan(problem(d.head_dim), l4);
    CHECK(plan.kernel == "wmma8");
    CHECK_EQ(plan.head_dim_tile, d.tile);
    const TileConfig config = wmma8::tile_config(d.tile);
    CHECK_EQ(plan.block_m, config.block_m);
    CHECK_EQ(plan.block_n, config.block_n);
    CHECK_EQ(plan.num_warps, config.num_warps);
    CHECK_EQ(plan.smem_bytes, config.smem_bytes);
    CHECK_EQ(plan.grid, 2 * 8 * 2048 / plan.block_m);
    // As many blocks as registers hold fit into an SM's shared memory.
    CHECK((config.smem_bytes + 1024) * wmma8::blocks_per_sm(d.tile, false) <= l4.smem_per_sm);
  }
}

template <typename Change>
void check_refused(std::int64_t head_dim, const DeviceInfo& device, Change change,
                   const std::string& why) {
  AttentionParams p = problem(head_dim);
  change(&p);
  CHECK_THROWS(dlattn::plan(p, device, force("wmma8")), UnsupportedError,
               "no kernel can run this: wmma8: " + why);
}

void refused() {
  const auto nothing = [](AttentionParams*) {};
  check_refused(64, gpus()[2], nothing, "needs compute capability 8.9 or later; A100 has 8.0");
  DeviceInfo of_ptx = gpus()[3];
  of_ptx.code = 80, of_ptx.ptx = true;
  check_refused(64, of_ptx, nothing,
                "needs code for compute capability 8.9 or later; this build has for H200 that for "
                "8.0: build with DLATTN_ARCHS=native or all");
  check_refused(24, l4, nothing, "head_dim is 24; accepted: multiples of 16 up to 256");
  check_refused(272, l4, nothing, "head_dim is 272; accepted: multiples of 16 up to 256");
  check_refused(
      144, l4, [](AttentionParams* p) { p->softcap = 3.0; },
      "does not implement softcap for head dims beyond 128");
  check_refused(
      144, l4, [](AttentionParams* p) { p->k.row_stride += 8; },
      "rows of q, k or v are aligned to 8 bytes; accepted: 16, with head dims beyond 128");
  check_refused(
      64, l4, [](AttentionParams* p) { p->seqlen_k = (1 << 20) + 1; },
      "seqlen_k is 1048577; accepted: up to 1048576");
  check_refused(
      64, l4,
      [](AttentionParams* p) {
        p->q.dtype = p->k.dtype = p->v.dtype = p->out.dtype = DType::kFloat16;
      },
      "dtype is float16; accepted: float8_e4m3fn");
}

AttentionParams int8_problem(std::int64_t head_dim, DType dtype = DType::kFloat16,
                             Precision precision = Precision::kInt8Fp8) {
  AttentionParams p = test::problem(dtype, head_dim);
  p.precision = precision;
  p.quantized_kv = test::memory + 4 * test::kApart;
  return p;
}

// The problems that need the general kernel.
void general() {
  AttentionParams p = problem(128);
  CHECK(!wmma8::is_general(p, 16) && wmma8::is_general(p, 8));
  p.k.row_stride += 1, p.out.row_stride += 1, p.out.batch_stride += 2048;
  p.out.data = test::memory + 3 * test::kApart + 2;
  p.softcap = 3.0;
  CHECK(supported(p, l4, force("wmma8")).ok);
  CHECK(wmma8::is_general(p, 16));
  for (const std::int64_t head_dim : {64, 128, 256}) {
    for (AttentionParams given : {problem(head_dim), int8_problem(head_dim)}) {
      CHECK(!wmma8::is_general(given, 16));
      AttentionParams masked = given;
      masked.mask.data = reinterpret_cast<const std::uint8_t*>(test::memory + 5 * test::kApart);
      CHECK(wmma8::is_general(masked, 16) && supported(masked, l4, force("wmma8")).ok);
      given.bias.data = test::memory + 5 * test::kApart;
      given.bias.dtype = DType::kFloat32;
      CHECK(wmma8::is_general(given, 16) && supported(given, l4, force("wmma8")).ok);
    }
  }
}

// Precision int8_fp8: q of 16 bits, any head_dim and alignment.
void int8() {
  for (const DeviceInfo& device : gpus()) {
    const int capability = 10 * device.compute_major + device.compute_minor;
    CHECK_EQ(supported(int8_problem(128), device, force("wmma8")).ok, capability >= 89);
  }
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const struct {
      std::int64_t head_dim;
      int tile;
    } dims[] = {{1, 64},    {40, 64},   {64, 64},   {65, 128}, {72, 128},
                {128, 128}, {129, 256}, {200, 256}, {256, 256}};
    for (const auto& d : dims) {
      AttentionParams p = int8_problem(d.head_dim, dtype);
      p.q.row_stride += 1, p.out.row_stride += 1, p.out.batch_stride += 2048;
      const Plan plan = dlattn::plan(p, l4);
      CHECK(plan.kernel == "wmma8");
      CHECK(plan.dtype == DType::kInt8);
      CHECK_EQ(plan.head_dim_tile, d.tile);
      CHECK_EQ(plan.block_n, d.tile <= 128 ? 64 : 32);  // keys that share a scale, or half of them
      CHECK_EQ(plan.smem_bytes, wmma8::tile_config(d.tile).smem_bytes);
      CHECK_EQ(plan.grid, 2 * 8 * 2048 / plan.block_m);
      CHECK_EQ(plan.workspace_bytes, 0);
    }
  }
  AttentionParams p = int8_problem(72);
  p.head_dim = 40;
  CHECK_EQ(dlattn::plan(p, l4).head_dim_tile, 128);
  // The caller's k and v are not read.
  p = int8_problem(64);
  p.k.data = p.v.data = nullptr;
  p.mask.data = reinterpret_cast<const std::uint8_t*>(test::memory + 5 * test::kApart);
  CHECK(supported(p, l4, force("wmma8")).ok);
}

// Precision int8_fp16: from compute capability 8.0 on, with more shared memory.
void int8_fp16() {
  for (const DeviceInfo& device : gpus()) {
    const int capability = 10 * device.compute_major + device.compute_minor;
    const AttentionParams p = int8_problem(128, DType::kBFloat16, Precision::kInt8Fp16);
    CHECK_EQ(supported(p, device, force("wmma8")).ok, capability >= 80);
  }
  const AttentionParams p = int8_problem(128, DType::kFloat16, Precision::kInt8Fp16);
  const Plan plan = dlattn::plan(p, l4);
  CHECK(plan.kernel == "wmma8" && plan.dtype == DType::kInt8);
  CHECK_EQ(plan.block_n, 64);
  CHECK_EQ(plan.smem_bytes, 2 * 64 * 128 * (1 + 2) + 4 * 8);
  CHECK(plan.predicted_ns > dlattn::plan(int8_problem(128), l4).predicted_ns);
}

void int8_refused() {
  const auto check_refused = [](const AttentionParams& p, const DeviceInfo& device,
                                const std::string& why) {
    CHECK_THROWS(dlattn::plan(p, device, force("wmma8")), UnsupportedError,
                 "no kernel can run this: wmma8: " + why);
  };
  check_refused(int8_problem(64), gpus()[2], "needs compute capability 8.9 or later; A100 has 8.0");
  AttentionParams p = int8_problem(64);
  p.seqlen_k = (1 << 20) + 1;
  check_refused(p, l4, "seqlen_k is 1048577; accepted: up to 1048576");
  p = int8_problem(64);
  p.precision = Precision::kFp8;
  check_refused(p, l4, "does not implement precision fp8");
  p = int8_problem(129, DType::kFloat16, Precision::kInt8Fp16);
  p.bias.data = test::memory + 5 * test::kApart;
  p.bias.dtype = DType::kFloat32;
  check_refused(p, l4, "does not implement bias with precision int8_fp16 for head dims beyond 128");
}

}  // namespace

int main() {
  served();
  refused();
  general();
  int8();
  int8_fp16();
  int8_refused();
  return test::summary();
}
