// Plans for made-up GPUs, and the registry's tiles. Needs no GPU and no CUDA. wmma and sm90 have
// tests of their own: plan_wmma_test.cpp, plan_sm90_test.cpp.
#include "core/plan/plan.h"

#include <algorithm>
#include <cstdlib>
#include <string>
#include <string_view>

#include "check.h"
#include "core/backend.h"
#include "core/plan/family.h"
#include "cuda/forward/scalar/traits.h"
#include "cuda/forward/wmma/traits.h"
#include "cuda/forward/wmma_halves/traits.h"
#include "cuda/forward/wmma_qk/traits.h"
#include "cuda/forward/wmma_smem/traits.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpu;
using test::gpus;
using test::memory;
using test::problem;

namespace {

// Leaves the choice to the plan, but for devices that sm90 is made for.
Options below_sm90(const DeviceInfo& device) {
  return device.compute_major == 9 ? force("wmma") : Options{};
}

constexpr DType kHalves[] = {DType::kFloat16, DType::kBFloat16};

int wmma_tile(int head_dim) {
  for (const int tile : {32, 64, 96, 128, 192}) {
    if (head_dim <= tile) return tile;
  }
  return 256;
}

void automatic_choice() {
  for (const DeviceInfo& device : gpus()) {
    for (const DType dtype : kHalves) {
      for (const int head_dim : {8, 32, 40, 64, 72, 96, 112, 128, 136, 192, 200, 256}) {
        const AttentionParams p = problem(dtype, head_dim);
        const Plan plan = dlattn::plan(p, device, below_sm90(device));
        CHECK(plan.kernel == "wmma");
        CHECK(plan.dtype == dtype);
        const int tile = wmma_tile(head_dim);
        CHECK_EQ(plan.head_dim_tile, tile);
        const TileConfig config = wmma::tile_config(tile, plan.variant);
        CHECK_EQ(plan.block_m, config.block_m);
        CHECK_EQ(plan.block_n, config.block_n);
        CHECK_EQ(plan.num_warps, config.num_warps);
        CHECK_EQ(plan.num_stages, config.num_stages);
        CHECK_EQ(plan.smem_bytes, config.smem_bytes);
        const std::int64_t items = 2048 / config.block_m * 8 * 2;
        const bool stays = plan.variant == wmma::kPersistent && items > device.num_sms;
        CHECK_EQ(plan.grid, stays ? device.num_sms : items);
        CHECK_EQ(plan.copy_bytes, 16);
        CHECK_EQ(plan.num_splits, 1);
        CHECK_EQ(plan.workspace_bytes, 0);
        CHECK(supported(p, device).ok);
      }
      // The general kernel serves the head dims between.
      for (const int head_dim : {1, 20, 65, 90, 130, 250}) {
        const Plan plan = dlattn::plan(problem(dtype, head_dim), device);
        CHECK(plan.kernel == "wmma");
        CHECK_EQ(plan.variant, wmma::kGeneral);
        const int tile = wmma_tile(head_dim);
        CHECK_EQ(plan.head_dim_tile, tile);
        CHECK_EQ(plan.smem_bytes, wmma::general_smem_bytes(tile, false, 0));
      }
    }
    const Plan fp32 = dlattn::plan(problem(DType::kFloat32, 64), device);
    CHECK(fp32.kernel == "scalar");
    CHECK_EQ(fp32.smem_bytes, scalar::tile_config(4, 64, 2048).smem_bytes);
    // The larger of the two head dims chooses the tile.
    AttentionParams p = problem(DType::kFloat16, 64);
    p.head_dim_v = 112;
    p.out.head_stride = 112, p.out.row_stride = 8 * 112, p.out.batch_stride = 2048 * 8 * 112;
    CHECK_EQ(dlattn::plan(p, device).head_dim_tile, 128);
  }
}

// Every instance fits the 99 KB of the smallest device.
void shared_memory_of_every_instance() {
  for (const int tile : {64, 128, 256}) {
    for (const int bytes : {2, 4}) {
      CHECK(scalar::tile_config(bytes, tile, tile::kMostKeys).smem_bytes <= 101376);
    }
  }
  for (const int tile : {32, 64, 96, 128}) {
    CHECK(wmma_qk::tile_config(tile, tile::kMostKeys).smem_bytes <= 101376);
    CHECK(wmma_smem::tile_config(tile).smem_bytes <= 101376);
  }
  CHECK(wmma_halves::tile_config(512).smem_bytes <= 101376);
  for (const int tile : {32, 64, 96, 128, 192, 256}) {
    for (int variant = 0; variant < wmma::kNumVariants; ++variant) {
      if (!wmma::has_variant(tile, variant)) continue;
      // Whole is for devices with more, of which compute capability 8.0 has least.
      const int most = variant == wmma::kSinglePass    ? 166912
                       : wmma::uses_tma(tile, variant) ? 232448
                                                       : 101376;
      CHECK(wmma::tile_config(tile, variant).smem_bytes <= most);
    }
  }
}

// batch_invariant: what surrounds a sequence changes neither kernel nor tile shape.
void batch_invariance() {
  static const std::int32_t offsets[2] = {};
  Options options;
  options.batch_invariant = true;
  bool matters = false;
  for (const DeviceInfo& device : gpus()) {
    for (const int dim : {32, 64, 96, 128, 192, 256, -64, -96, -128, -256}) {
      const int head_dim = std::abs(dim);
      AttentionParams p = problem(DType::kFloat16, head_dim);
      if (dim < 0) p.causal = Causal::kBottomRight;
      p.num_heads = p.num_heads_kv = 64, p.batch_size = 64, p.seqlen_q = p.seqlen_k = 8192;
      p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = 0;
      const Plan large = core::make_plan(p, device, options);
      for (const std::int64_t batch_size : {1, 3, 64}) {
        for (const std::int64_t seqlen : {1, 100, 512, 8192}) {
          for (const std::int64_t num_heads : {1, 8, 64}) {
            for (const bool varlen : {false, true}) {
              p.batch_size = batch_size, p.seqlen_q = p.seqlen_k = seqlen;
              p.num_heads = p.num_heads_kv = num_heads;
              p.cu_seqlens_q = p.cu_seqlens_k = varlen ? offsets : nullptr;
              p.total_q = p.total_k = varlen ? batch_size * seqlen : 0;
              const Plan plan = core::make_plan(p, device, options);
              CHECK(plan.kernel == large.kernel);
              CHECK_EQ(plan.variant, large.variant);
              CHECK_EQ(plan.block_m, large.block_m);
              CHECK_EQ(plan.num_splits, 1);
              const Plan fastest = core::make_plan(p, device, {});
              matters |= fastest.variant != large.variant || fastest.kernel != large.kernel;
            }
          }
        }
      }
    }
  }
  CHECK(matters);
  // Alignment is that of the rows there are: of neither less nor more.
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 1, p.q.batch_stride = 1;
  CHECK_EQ(core::make_plan(p, gpus()[0], options).variant, wmma::kWide);
  p.q.head_stride = 65;
  CHECK_EQ(core::make_plan(p, gpus()[0], options).variant, wmma::kGeneral);
}

void forced_kernels() {
  for (const DeviceInfo& device : gpus()) {
    for (const char* kernel : {"scalar", "wmma_qk", "wmma_smem", "wmma"}) {
      const Plan plan = dlattn::plan(problem(DType::kFloat16, 64), device, force(kernel));
      CHECK(plan.kernel == kernel);
    }
    const struct {
      std::string_view kernel;
      DType dtype;
      int head_dim;
      const char* why;
    } refused[] = {
        {"wmma_qk", DType::kFloat32, 64, "wmma_qk: dtype is float32; accepted: float16, bfloat16"},
        {"wmma_smem", DType::kFloat64, 64,
         "wmma_smem: dtype is float64; accepted: float16, bfloat16"},
        {"scalar", DType::kFloat64, 64,
         "scalar: dtype is float64; accepted: float16, bfloat16, float32"},
        {"wmma_qk", DType::kFloat16, 20,
         "wmma_qk: head_dim is 20; accepted: multiples of 16 up to 128"},
        {"wmma_smem", DType::kFloat16, 144,
         "wmma_smem: head_dim is 144; accepted: multiples of 16 up to 128"},
        {"wmma", DType::kFloat32, 64, "wmma: dtype is float32; accepted: float16, bfloat16"},
        {"wmma", DType::kFloat16, 257, "wmma: head_dim is 257; accepted: 1 to 256"},
        {"scalar", DType::kFloat16, 257, "scalar: head_dim is 257; accepted: 1 to 256"},
        {"wmma_halves", DType::kFloat32, 512,
         "wmma_halves: dtype is float32; accepted: float16, bfloat16"},
        {"wmma_halves", DType::kFloat16, 513, "wmma_halves: head_dim is 513; accepted: 1 to 512"},
        {"wmma_halves", DType::kFloat16, 256,
         "wmma_halves: head_dim is 256 and head_dim of v 256; accepted: one of them above 256"},
        {"cpu", DType::kFloat16, 64, "cpu: the tensors are on a CUDA device"},
    };
    for (const auto& r : refused) {
      const AttentionParams p = problem(r.dtype, r.head_dim);
      CHECK_THROWS(dlattn::plan(p, device, force(r.kernel)), UnsupportedError,
                   std::string("no kernel can run this: ") + r.why);
      const Support support = supported(p, device, force(r.kernel));
      CHECK(!support.ok && support.reasons.size() == 1 && support.reasons[0] == r.why);
    }
    AttentionParams p = problem(DType::kFloat16, 64);
    p.head_dim_v = 40;  // rows of out may lie apart
    CHECK_THROWS(dlattn::plan(p, device, force("wmma_qk")), UnsupportedError,
                 "no kernel can run this: wmma_qk: head_dim of v is 40; accepted: multiples of 16 "
                 "up to 128");
  }
  DeviceInfo cpu;
  cpu.isa = "portable";
  cpu.num_threads = 1;
  for (const char* kernel : {"scalar", "wmma_qk", "wmma_smem", "wmma"}) {
    CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), cpu, force(kernel)), UnsupportedError,
                 std::string("no kernel can run this: ") + kernel + ": the tensors are on the CPU");
  }
}

// A feature that a family lacks is refused by name when that family is forced, and goes elsewhere
// when it is not.
void features() {
  const DeviceInfo device = gpus()[0];
  alignas(16) static const float numbers[64] = {};
  alignas(16) static const std::uint8_t bools[64] = {};
  const struct {
    const char* name;
    void (*set)(AttentionParams&);
  } features[] = {
      {"softcap", [](AttentionParams& p) { p.softcap = 30.0; }},
      {"bias", [](AttentionParams& p) { p.bias.data = numbers, p.bias.dtype = DType::kFloat32; }},
      {"mask", [](AttentionParams& p) { p.mask.data = bools; }},
      {"alibi_slopes", [](AttentionParams& p) { p.alibi_slopes.data = numbers; }},
  };
  for (const auto& feature : features) {
    AttentionParams p = problem(DType::kFloat16, 64);
    feature.set(p);
    for (const char* kernel : {"wmma_qk", "wmma_smem"}) {
      CHECK_THROWS(dlattn::plan(p, device, force(kernel)), UnsupportedError,
                   std::string("no kernel can run this: ") + kernel + ": does not implement " +
                       feature.name);
    }
    CHECK(dlattn::plan(p, device).kernel == "wmma");
    CHECK_EQ(dlattn::plan(p, device).variant, wmma::kGeneral);
    // Bias and mask pass through shared memory of their own.
    CHECK_EQ(dlattn::plan(p, device).smem_bytes,
             wmma::general_smem_bytes(64, p.mask.data != nullptr, p.bias.data ? 4 : 0));
  }
}

// The ladder that leads up to wmma serves what wmma does, and is not taken instead.
void never_the_ladder() {
  for (const DeviceInfo& device : gpus()) {
    for (const int head_dim : {16, 64, 96, 128, 250}) {
      for (const std::int64_t seqlen : {1, 5, 70, 333, 2048, 20000}) {
        for (const std::int64_t heads : {1, 8, 128}) {
          for (const bool biased : {false, true}) {
            AttentionParams p = problem(DType::kBFloat16, head_dim);
            p.batch_size = 1, p.num_heads = p.num_heads_kv = heads;
            p.seqlen_q = p.seqlen_k = seqlen;
            p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = heads * head_dim;
            p.q.data = memory + 2;  // which TMA and wide copies cannot take
            if (biased) p.bias.data = memory + 4 * test::kApart, p.bias.dtype = DType::kFloat32;
            const Plan plan = dlattn::plan(p, device);
            CHECK_FOR(plan.kernel == "wmma", device.name + ", " + std::to_string(head_dim));
            CHECK_EQ(plan.variant, wmma::kGeneral);
            p.q.data = memory;
            const Plan aligned = dlattn::plan(p, device);
            CHECK(aligned.kernel == "wmma" || aligned.kernel == "sm90" ||
                  aligned.kernel == "decode");
          }
        }
      }
    }
  }
}

// Head dims above 256: `auto` has one family for them, with all features but keys in a cache.
void large_heads() {
  alignas(16) static const float numbers[64] = {};
  alignas(16) static const std::uint8_t bools[64] = {};
  static const std::int32_t list[2] = {};
  for (const DeviceInfo& device : gpus()) {
    for (const DType dtype : kHalves) {
      for (const int head_dim : {257, 320, 512}) {
        AttentionParams p = problem(dtype, head_dim);
        // By wgmma where that is, in multiples of 8.
        const bool is_wide = device.compute_major == 9 && head_dim % 8 == 0;
        CHECK(dlattn::plan(p, device).kernel == (is_wide ? "sm90_wide" : "wmma_halves"));
        const Plan plain = dlattn::plan(p, device, force("wmma_halves"));
        CHECK_EQ(plain.head_dim_tile, 512);
        CHECK_EQ(plain.grid, 2048 / plain.block_m * 8 * 2);
        CHECK_EQ(plain.num_warps, 8);
        CHECK_EQ(plain.num_launches(), 1);
        CHECK(plain.predicted_ns > 0.0);
        p.causal = Causal::kBottomRight, p.window_left = 300, p.softcap = 30.0;
        p.bias.data = numbers, p.bias.dtype = DType::kFloat32, p.mask.data = bools;
        p.alibi_slopes.data = p.sinks.data = numbers;
        p.cu_seqlens_q = p.cu_seqlens_k = list, p.total_q = p.total_k = 4096;
        p.q.data = memory + 2;
        CHECK(dlattn::plan(p, device).kernel == "wmma_halves");
        CHECK(dlattn::plan(p, device).predicted_ns < plain.predicted_ns);
      }
    }
    // One of the two head dims is enough.
    for (const bool of_v : {false, true}) {
      AttentionParams p = problem(DType::kFloat16, 320);
      (of_v ? p.head_dim : p.head_dim_v) = 64;
      CHECK(dlattn::plan(p, device).kernel ==
            (device.compute_major == 9 ? "sm90_wide" : "wmma_halves"));
    }
    // Rows of many keys leave pairs of columns in out.
    AttentionParams p = problem(DType::kFloat16, 512);
    p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = 0;
    p.seqlen_k = 1 << 20;
    CHECK(dlattn::plan(p, device).kernel == "wmma_halves");
    p.out.data = static_cast<char*>(p.out.data) + 2;
    CHECK_THROWS(
        dlattn::plan(p, device, force("wmma_halves")), UnsupportedError,
        "no kernel can run this: wmma_halves: seqlen_k is 1048576; accepted where pairs of "
        "out's columns are not aligned to 4 bytes: up to 131072");
    p.seqlen_k = 131072;
    CHECK(dlattn::plan(p, device).kernel == "wmma_halves");  // by pairs of columns of out
    AttentionParams cached = problem(DType::kFloat16, 512);
    cached.seqused_k = list;
    CHECK_THROWS(dlattn::plan(cached, device, force("wmma_halves")), UnsupportedError,
                 "no kernel can run this: wmma_halves: does not read keys in a cache: seqused_k is "
                 "given");
  }
}

// Nor where a window hides most keys, which memory then does not bound, nor where memory bounds
// all.
void never_the_ladder_of_few_keys() {
  for (const DeviceInfo& device : gpus()) {
    for (const int head_dim : {64, 128, 256}) {
      for (const std::int64_t seqlen_q : {1, 16, 200, 1024}) {
        for (const std::int64_t window : {-1, 64, 1024}) {
          for (const std::int64_t batch_size : {1, 8, 64}) {
            AttentionParams p = problem(DType::kBFloat16, head_dim);
            p.batch_size = batch_size, p.causal = Causal::kBottomRight;
            p.seqlen_q = seqlen_q, p.seqlen_k = 65536, p.window_left = window;
            const Plan plan = dlattn::plan(p, device);
            CHECK_FOR(plan.kernel == "wmma" || plan.kernel == "sm90" || plan.kernel == "decode",
                      device.name + " window " + std::to_string(window) + ": " +
                          std::string(plan.kernel));
            if (window < 0) continue;
            for (const char* kernel : {"wmma", "decode", "scalar"}) {
              AttentionParams all = p;
              all.window_left = -1;
              CHECK(dlattn::plan(p, device, force(kernel)).predicted_ns <
                    dlattn::plan(all, device, force(kernel)).predicted_ns / 3);
            }
          }
        }
      }
    }
  }
  // Causal from the first key on, queries see no more keys than they are.
  AttentionParams p = problem(DType::kBFloat16, 128);
  p.causal = Causal::kTopLeft, p.seqlen_q = 100, p.seqlen_k = 65536;
  AttentionParams square = p;
  square.seqlen_k = 100;
  for (const DeviceInfo& device : gpus()) {
    CHECK(dlattn::plan(p, device, force("wmma")).predicted_ns ==
          dlattn::plan(square, device, force("wmma")).predicted_ns);
  }
}

// With no kernel left, the message names every family's reason.
void all_reasons() {
  const Support support = supported(problem(DType::kFloat16, 520), gpus()[0]);
  CHECK_EQ(support.reasons.size(), 7u);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat64, 64), gpus()[0]), UnsupportedError,
               "no kernel can run this: wmma: dtype is float64; accepted: float16, bfloat16; "
               "decode: dtype is float64; accepted: float16, bfloat16; "
               "wmma8: dtype is float64; accepted: float8_e4m3fn; "
               "wmma_halves: dtype is float64; accepted: float16, bfloat16; "
               "wmma_smem: dtype is float64; accepted: float16, bfloat16; "
               "wmma_qk: dtype is float64; accepted: float16, bfloat16; "
               "scalar: dtype is float64; accepted: float16, bfloat16, float32");
}

void copy_bytes() {
  const DeviceInfo device = gpus()[0];
  const auto bytes = [&](auto change) {
    AttentionParams p = problem(DType::kFloat16, 64);
    change(p);
    return dlattn::plan(p, device).copy_bytes;
  };
  CHECK_EQ(bytes([](auto&) {}), 16);
  CHECK_EQ(bytes([](auto& p) { p.q.data = memory + 8; }), 8);
  CHECK_EQ(bytes([](auto& p) { p.k.data = memory + 4; }), 4);
  CHECK_EQ(bytes([](auto& p) { p.v.data = memory + 2; }), 2);
  CHECK_EQ(bytes([](auto& p) { p.k.row_stride += 4; }), 8);
  CHECK_EQ(bytes([](auto& p) { p.v.head_stride += 2; }), 4);
  CHECK_EQ(bytes([](auto& p) { p.q.batch_stride += 1; }), 2);
  CHECK_EQ(bytes([](auto& p) { p.q.batch_stride += 1, p.batch_size = 1; }),
           16);  // a stride that is never taken
  CHECK_EQ(bytes([](auto& p) { p.k.row_stride = 0; }), 16);
  CHECK_EQ(dlattn::plan(problem(DType::kFloat16, 20), device).copy_bytes, 8);  // rows of 40 bytes
  // The length of a row counts, however well the rows are spaced.
  CHECK_EQ(bytes([](auto& p) { p.head_dim = 20; }), 8);
  CHECK_EQ(bytes([](auto& p) { p.head_dim_v = 18; }), 4);
  CHECK_EQ(dlattn::plan(problem(DType::kFloat16, 7), device).copy_bytes, 2);
  CHECK_EQ(dlattn::plan(problem(DType::kFloat32, 7), device).copy_bytes, 4);
}

void too_little_shared_memory() {
  // As much as the smallest instance of wmma_smem needs, which is less than any real device has.
  const int most = wmma_smem::tile_config(32).smem_bytes;
  const DeviceInfo small = gpu("a small GPU", 8, 6, 10, most);
  const auto needs = [](const char* kernel, int bytes) {
    return std::string(kernel) + ": needs " + std::to_string(bytes) +
           " bytes of shared memory per block; a small GPU has " + std::to_string(most);
  };
  const int fp32_bytes = scalar::tile_config(4, 256, 2048).smem_bytes;
  CHECK(fp32_bytes > most);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat32, 256), small, force("scalar")),
               UnsupportedError, "no kernel can run this: " + needs("scalar", fp32_bytes));
  const int smem_bytes = wmma_smem::tile_config(128).smem_bytes;
  CHECK(smem_bytes > most);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 128), small, force("wmma_smem")),
               UnsupportedError, "no kernel can run this: " + needs("wmma_smem", smem_bytes));
  CHECK(dlattn::plan(problem(DType::kFloat16, 32), small).variant == wmma::kNarrow);
  // At exactly what it needs it runs, one byte less it does not.
  const AttentionParams p = problem(DType::kFloat16, 64);
  const int exact = wmma_smem::tile_config(64).smem_bytes;
  CHECK(supported(p, gpu("x", 8, 9, 1, exact), force("wmma_smem")).ok);
  CHECK(!supported(p, gpu("x", 8, 9, 1, exact - 1), force("wmma_smem")).ok);
}

// Grids are one-dimensional, so 65,535 is no limit; 2^31 - 1 is.
void grids() {
  AttentionParams p = problem(DType::kFloat16, 64);
  p.batch_size = 70000;
  p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = 0;
  p.seqlen_q = p.seqlen_k = 64;
  CHECK_EQ(dlattn::plan(p, gpus()[0]).grid, 70000 * 8);
  p.batch_size = 300000000;
  CHECK_THROWS(dlattn::plan(p, gpus()[0], force("wmma_smem")), UnsupportedError,
               "no kernel can run this: wmma_smem: needs 2400000000 thread blocks; accepted: up to "
               "2147483647");
  p.batch_size = 1;
  p.seqlen_k = 131073;
  CHECK_THROWS(dlattn::plan(p, gpus()[0], force("wmma_smem")), UnsupportedError,
               "no kernel can run this: wmma_smem: seqlen_k is 131073; accepted: up to 131072");
  p.batch_size = 0;
  CHECK_EQ(dlattn::plan(p, gpus()[0]).grid, 0);
}

void unserved_devices() {
  DeviceInfo turing = gpu("Tesla T4", 7, 5, 40, 65536);
  turing.unserved = "Tesla T4 has compute capability 7.5; this build serves 8.0 and later";
  const Support support = supported(problem(DType::kFloat16, 64), turing);
  CHECK(!support.ok);
  CHECK_EQ(support.reasons.size(), 7u);
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), turing, force("scalar")),
               UnsupportedError,
               "no kernel can run this: scalar: Tesla T4 has compute capability 7.5; this build "
               "serves 8.0 and later");
}

// A build with CUDA can launch every instance of the families that it says it has.
void launchers() {
  const std::vector<std::string> kernels = build_info().kernels;
  for (const auto& family : core::families<AttentionParams>()) {
    const std::string name = family.record->name;
    const bool built = std::find(kernels.begin(), kernels.end(), name) != kernels.end();
    for (const core::Instance& instance : family.instances) {
      const bool found =
          cuda::find_launcher<AttentionParams>(name, instance.dtype, instance.head_dim_tile);
      CHECK_FOR(found == built, name);
    }
  }
  CHECK_EQ(kernels.size() > 1, cuda::compiled());
  const std::size_t missing = build_info().missing_kernels.size();
  CHECK_EQ(kernels.size() + missing + 1, cuda::compiled() ? kernel_names().size() : 2u);
  CHECK(!cuda::find_launcher<AttentionParams>("wmma", DType::kFloat32, 64));
  CHECK(!cuda::find_launcher<AttentionParams>("none", DType::kFloat16, 64));
}

void unknown_names() {
  CHECK_THROWS(dlattn::plan(problem(DType::kFloat16, 64), gpus()[0], force("flash")),
               UnsupportedError,
               "no kernel can run this: kernel is flash; accepted: auto, cpu, wmma, sm90, decode, "
               "sm90_latent, sm90_wide, sm90_fp8, wmma8, wmma_halves, wmma_smem, wmma_qk, scalar");
}

void registry() {
  const auto head_dim_tile = [](std::string_view name, DType dtype, std::int64_t head_dim) {
    for (const auto& family : core::families<AttentionParams>()) {
      if (family.record->name != name) continue;
      const core::Instance* instance = family.instance(dtype, head_dim);
      return instance ? instance->head_dim_tile : 0;
    }
    return -1;
  };
  CHECK_EQ(head_dim_tile("scalar", DType::kFloat16, 1), 64);
  CHECK_EQ(head_dim_tile("scalar", DType::kFloat32, 64), 64);
  CHECK_EQ(head_dim_tile("scalar", DType::kBFloat16, 65), 128);
  CHECK_EQ(head_dim_tile("scalar", DType::kFloat16, 256), 256);
  CHECK_EQ(head_dim_tile("scalar", DType::kFloat16, 257), 0);
  CHECK_EQ(head_dim_tile("scalar", DType::kFloat64, 64), 0);
  for (const char* kernel : {"wmma_qk", "wmma_smem"}) {
    for (const DType dtype : kHalves) {
      CHECK_EQ(head_dim_tile(kernel, dtype, 16), 32);
      CHECK_EQ(head_dim_tile(kernel, dtype, 33), 64);
      CHECK_EQ(head_dim_tile(kernel, dtype, 96), 96);
      CHECK_EQ(head_dim_tile(kernel, dtype, 128), 128);
      CHECK_EQ(head_dim_tile(kernel, dtype, 129), 0);
    }
    CHECK_EQ(head_dim_tile(kernel, DType::kFloat32, 64), 0);
  }
  CHECK_EQ(head_dim_tile("cpu", DType::kFloat32, 64), -1);
}

void descriptions() {
  const std::string text = describe(dlattn::plan(problem(DType::kFloat16, 64), gpus()[0]));
  for (const char* part : {"kernel: wmma:narrow\n", "dtype: float16\n",
                           "tile: ", "grid: ", "shared memory: ", "splits: 1"}) {
    CHECK_FOR(text.find(part) != std::string::npos, part);
  }
  AttentionParams p = problem(DType::kFloat64, 64);
  p.device = {};
  DeviceInfo cpu;
  cpu.isa = "portable";
  cpu.num_threads = 3;
  const std::string cpu_text = describe(dlattn::plan(p, cpu));
  for (const char* part : {"kernel: cpu\n", "dtype: float64\n", "threads: 3, portable, "}) {
    CHECK_FOR(cpu_text.find(part) != std::string::npos, part);
  }
}

void names() {
  CHECK_EQ(std::string(to_string(DType::kBFloat16)) == "bfloat16", true);
  CHECK_EQ(std::string(to_string(DeviceType::kCuda)) == "cuda", true);
  const std::vector<std::string_view> kernels = {
      "auto",     "cpu",   "wmma",        "sm90",      "decode",  "sm90_latent", "sm90_wide",
      "sm90_fp8", "wmma8", "wmma_halves", "wmma_smem", "wmma_qk", "scalar"};
  CHECK(kernel_names() == kernels);
  CHECK_EQ(size_of(DType::kFloat16), 2);
  CHECK_EQ(size_of(DType::kBFloat16), 2);
  CHECK_EQ(size_of(DType::kFloat32), 4);
  CHECK_EQ(size_of(DType::kFloat64), 8);
}

}  // namespace

int main() {
  automatic_choice();
  shared_memory_of_every_instance();
  batch_invariance();
  forced_kernels();
  features();
  large_heads();
  all_reasons();
  never_the_ladder();
  never_the_ladder_of_few_keys();
  copy_bytes();
  too_little_shared_memory();
  grids();
  unserved_devices();
  registry();
  launchers();
  unknown_names();
  descriptions();
  names();
  return test::summary();
}
