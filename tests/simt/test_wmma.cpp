#include "cached_test.h"
#include "cuda/forward/wmma/cached.cuh"
#include "cuda/forward/wmma/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"
#include "wmma_test.h"

namespace {

constexpr std::string_view kFamily = "wmma";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T, int kVariant, bool kPacked = false>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(head_dim_tile, [&](auto tile) {
    if constexpr (dlattn::wmma::has_variant(tile, kVariant))
      dlattn::wmma::kernel<T, tile, kVariant, kPacked>(params, shape);
  });
}

template <typename T>
void run_cached(simt::Tests& tests, const simt::CachedCase& c, const char* filter) {
  const auto run = [](int head_dim_tile, const dlattn::AttentionParams& params,
                      const dlattn::LaunchShape& shape) {
    simt::with_instance<kFamily, T>(head_dim_tile, [&](auto tile) {
      if constexpr (dlattn::wmma::reads_caches(tile, dlattn::wmma::kNarrow))
        dlattn::wmma::cached_kernel<T, tile, dlattn::wmma::kNarrow>(params, shape);
    });
  };
  simt::run_cached<T>(tests, kFamily, "narrow", simt::ada(), INT64_MAX, c, filter, run);
}

// Tiles are 64 or 32 keys by 64 or 128 rows, 16 or 32 rows a warp.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 8, kFull},
      {17, 31, 24, kCausal},
      {33, 65, 64, kFull},
      {130, 200, 64, kCausal},
      {15, 64, 72, kTopLeft},
      {31, 63, 104, kFull},
      {66, 97, 128, kCausal},
      {40, 70, 96, kTopLeft},
      {33, 65, 192, kCausal, 1, 1, Layout::kBshd, 128},
      {66, 97, 256, kCausal},
      {31, 70, 168, kFull},
      // Whole tiles from the first on.
      {20, 128, 32, kFull},
      {33, 192, 64, kFull},
      {130, 128, 128, kFull},
      {20, 128, 256, kFull},
      // Rows that see nothing: some of a warp's, whole warps', a whole tile's.
      {150, 40, 32, kCausal},
      // Masked tiles at both ends of a long walk.
      simt::with({70, 400, 64, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
  };
  // Each tile's scores outgrow what the one before it has set as the rows' references, by so much
  // that probabilities are scaled down, and by more than fp32 holds, a tile's last key alone among
  // them; and do not.
  for (const int head_dim : {64, 128, 256}) {
    for (const double rise : {1.0, 8.0})
      cases.push_back(simt::with({20, 600, head_dim, kFull}, [=](Case& c) { c.rise = rise; }));
    for (const double rise : {1.0, -200.0})
      cases.push_back(simt::with({20, 256, head_dim, kFull}, [=](Case& c) { c.rise = rise; }));
  }
  simt::append(&cases, simt::shape_cases());
  simt::append(&cases, simt::feature_cases(40));
  simt::append(&cases, simt::length_cases(64));
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {15, 15, 64, kFull},
      {128, 128, 64, kCausal},
      {129, 127, 64, kTopLeft},
      {64, 64, 128, kCausal},
      {65, 33, 128, kFull},
      {1, 300, 64, kCausal},
      {200, 1, 64, kFull},
      {3, 300, 128, kFull},
      {100, 173, 64, kCausal, 4, 2},
      {173, 100, 64, kCausal, 2, 1},
      {173, 100, 128, kTopLeft, 2, 1},
      {100, 173, 96, kFull, 4, 1},
      {50, 90, 128, kCausal, 2, 1, Layout::kBshd, 16},
      {50, 90, 16, kCausal, 2, 1, Layout::kBshd, 128},
      {70, 90, 64, kCausal, 2, 2, Layout::kPacked, 0, 2},
      {70, 90, 120, kCausal, 2, 2, Layout::kBhsd, 0, 2, false},
      simt::with({70, 300, 128, kFull, 2, 1},
                 [](Case& c) { c.window_left = 100, c.window_right = 40; }),
  };
  simt::append(&cases, more);
  simt::append(&cases, simt::length_cases(200));
  return cases;
}

template <typename T, int kVariant = 0>
void run_variants(simt::Tests& tests, const Case& c) {
  if constexpr (kVariant < dlattn::wmma::kNumVariants) {
    // test_wmma_split.cpp, test_wmma_general.cpp, test_wmma_persistent.cpp
    if constexpr (!dlattn::wmma::splits_keys(kVariant) && kVariant != dlattn::wmma::kGeneral &&
                  kVariant != dlattn::wmma::kPersistent) {
      tests.run<T>(kFamily, c, run_kernel<T, kVariant>,
                   (std::string(dlattn::wmma::kVariantNames[kVariant]) + "+unpacked").c_str());
    }
    run_variants<T, kVariant + 1>(tests, c);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::WmmaTests tests("wmma", arguments);
  for (const Case& c : arguments.cases(cases())) {
    run_variants<half>(tests, c);
    run_variants<__nv_bfloat16>(tests, c);
  }
  for (const int head_dim : {64, 104, 200}) {
    if ((simt::kThreadSanitizer || arguments.values()) && head_dim != 64) continue;
    std::vector<Case> cases = simt::packed_cases(head_dim);
    if (head_dim == 64) {
      simt::append(&cases, simt::slice_cases({1, 1, head_dim, kCausal, 4, 1}));
      simt::append(&cases, simt::hostile_length_cases({1, 1, head_dim, kFull, 3, 1}));
    }
    for (const Case& c : arguments.cases(cases)) {
      using dlattn::wmma::kNarrow;
      tests.run<half>(kFamily, c, run_kernel<half, kNarrow, true>, "narrow+packed");
      tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16, kNarrow, true>,
                               "narrow+packed");
    }
  }
  for (const simt::CachedCase& c : simt::many_query_cases(true)) {
    run_cached<half>(tests, c, arguments.filter());
    run_cached<__nv_bfloat16>(tests, c, arguments.filter());
  }
  return tests.finish();
}
