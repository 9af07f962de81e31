#include "attention_test.h"
#include "cached_test.h"
#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/cached_kernel.cuh"
#include "cuda/forward/sm90/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"
#include "tensor_maps.h"

namespace {

constexpr std::string_view kFamily = "sm90";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

using dlattn::sm90::Variant;

dlattn::sm90::KernelArgs kernel_args(const dlattn::AttentionParams& params, int tile,
                                     Variant variant) {
  const dlattn::sm90::TensorBoxes boxes = dlattn::sm90::tensor_boxes(params, tile, variant);
  // So few heads together that some cases have full groups and others heads that are left.
  const std::int64_t heads = params.num_heads * params.batch_size;
  return {simt::encode(boxes.q),
          simt::encode(boxes.k),
          simt::encode(boxes.v),
          simt::encode(boxes.out),
          static_cast<unsigned>(dlattn::sm90::num_work_tiles(params, tile, variant)),
          dlattn::sm90::score_params(params, tile),
          simt::encode(boxes.bias),
          simt::encode(boxes.mask),
          boxes.k_page_rows,
          boxes.v_page_rows,
          dlattn::make_head_groups(heads, 4)};
}

// `kPlain`: the variant for plain scores.
template <typename T, Variant kPlain = Variant::kTall>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  const Variant variant = kPlain == Variant::kTall ? dlattn::sm90::variant_of(params) : kPlain;
  simt::with_instance<kFamily, T>(head_dim_tile, [&](auto tile) {
    const dlattn::sm90::KernelArgs args = kernel_args(params, tile, variant);
    dlattn::sm90::with_head_dim_v_tile<tile>(params.head_dim_v, [&](auto tile_v) {
      const bool is_varlen = params.cu_seqlens_q != nullptr;
      dlattn::sm90::with_kernel<tile>(variant, is_varlen, [&](auto constant, auto varlen) {
        dlattn::sm90::kernel<T, tile, tile_v, constant, varlen>(params, shape, args);
      });
    });
  });
}

template <typename T>
void run_cached(simt::Tests& tests, Variant variant, std::int64_t most_blocks,
                const simt::CachedCase& c, const char* filter) {
  const auto run = [variant](int head_dim_tile, const dlattn::AttentionParams& params,
                             const dlattn::LaunchShape& shape) {
    simt::with_instance<kFamily, T>(head_dim_tile, [&](auto tile) {
      const dlattn::sm90::KernelArgs args = kernel_args(params, tile, variant);
      dlattn::sm90::with_cached_kernel<tile>(variant, [&](auto constant) {
        dlattn::sm90::cached_kernel<T, tile, tile, constant>(params, shape, args);
      });
    });
  };
  simt::run_cached<T>(tests, kFamily, dlattn::sm90::name_of(variant), simt::hopper(), most_blocks,
                      c, filter, run);
}

// Tiles are 64, 96 or 128 keys by 128 or 256 rows, 64 rows a warpgroup.
std::vector<Case> cases() {
  const auto bias = [](Case& c) { c.bias = simt::Bias::kOwnDType; };
  const auto wide_bias = [](Case& c) { c.bias = simt::Bias::kFloat32; };
  const auto mask = [](Case& c) { c.mask = true; };
  const auto everything = [](Case& c) {
    c.bias = simt::Bias::kOwnDType, c.mask = c.alibi = c.sinks = true, c.softcap = 8.0;
  };
  std::vector<Case> cases = {
      {1, 1, 64, kFull},
      {17, 31, 24, kCausal},
      {130, 200, 64, kCausal},
      {300, 300, 64, kCausal},
      {15, 64, 72, kTopLeft},
      {129, 100, 96, kCausal},
      {66, 97, 192, kCausal},
      {129, 300, 128, kCausal},
      {66, 97, 256, kCausal},
      {65, 129, 192, kFull, 1, 1, Layout::kBshd, 128},
      // Rows that see nothing: some of a warp's, whole warpgroups', a whole tile's.
      {300, 40, 64, kCausal},
      {300, 70, 128, kCausal},
      // No keys, no queries, an empty batch.
      {20, 0, 64, kCausal, 2, 1},
      {0, 20, 64, kFull},
      {20, 20, 64, kFull, 1, 1, Layout::kBshd, 0, 0},
      // Heads, and v wider or narrower than q.
      {40, 70, 32, kCausal, 4, 2, Layout::kBshd, 8},
      {20, 70, 16, kFull, 3, 1, Layout::kBhsd, 112, 2},
      // Other strides.
      {20, 150, 32, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
      // Masked tiles at both ends of a long walk.
      simt::with({70, 400, 64, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
      simt::with({200, 400, 128, kFull}, [](Case& c) { c.window_left = 10, c.window_right = 3; }),
      simt::with({40, 70, 64, kCausal, 2, 1}, [](Case& c) { c.sinks = true; }),
      // Softcap of small scores and of large ones, slopes on either side of a row.
      simt::with({150, 200, 64, kCausal, 2, 1}, [](Case& c) { c.softcap = 30.0; }),
      simt::with({100, 300, 128, kFull, 2, 1}, [](Case& c) { c.softcap = 3.0, c.sinks = true; }),
      simt::with({66, 150, 256, kTopLeft}, [](Case& c) { c.softcap = 0.5, c.alibi = true; }),
      simt::with({200, 290, 64, kFull, 2, 1}, [](Case& c) { c.alibi = true; }),
      // Keys after their rows in tiles that are not the walk's first.
      simt::with({300, 200, 64, kFull}, [](Case& c) { c.alibi = true; }),
      simt::with({200, 200, 256, kFull}, [](Case& c) { c.alibi = true; }),
      simt::with({150, 150, 128, kCausal, 2, 2, Layout::kBhsd, 0, 2},
                 [](Case& c) { c.alibi = true, c.softcap = 10.0; }),
      simt::with({130, 330, 256, kTopLeft}, [](Case& c) { c.alibi = true, c.sinks = true; }),
      simt::with({200, 400, 64, kFull},
                 [](Case& c) { c.alibi = true, c.window_left = 100, c.window_right = 70; }),
      simt::with({300, 40, 64, kCausal}, [](Case& c) { c.alibi = true, c.softcap = 5.0; }),
      // Scores that leave softcap's first polynomial for the second, and for the exact form.
      simt::with({20, 600, 64, kFull}, [](Case& c) { c.rise = 0.05, c.softcap = 64.0; }),
      simt::with({20, 600, 64, kFull}, [](Case& c) { c.rise = 1.0, c.softcap = 300.0; }),
      simt::with({20, 600, 128, kFull}, [](Case& c) { c.rise = 1.0, c.alibi = true; }),
      // Bias and mask: of whole tiles and of ragged ones, over rows that see nothing, alone and
      // all.
      simt::with({150, 272, 64, kCausal, 2, 1}, mask),
      simt::with({100, 160, 128, kFull, 2, 1}, bias),
      simt::with({100, 136, 64, kTopLeft, 2, 1, Layout::kBhsd, 0, 2}, bias),
      simt::with({66, 152, 256, kFull}, wide_bias),
      simt::with({130, 132, 64, kCausal}, wide_bias),
      simt::with({150, 160, 128, kCausal, 2, 1, Layout::kBshd, 0, 2},
                 [&](Case& c) { everything(c), c.bias = simt::Bias::kFloat32; }),
      simt::with({70, 96, 256, kCausal}, [&](Case& c) { everything(c), c.window_left = 40; }),
      simt::with({300, 48, 64, kCausal}, everything),
      simt::with({20, 600, 128, kFull}, [&](Case& c) { bias(c), c.rise = 1.0; }),
      simt::with({20, 608, 64, kFull}, [&](Case& c) { mask(c), c.rise = 1.0; }),
      simt::with({50, 160, 128, kFull, 2, 1, Layout::kBshd, 0, 2},
                 [&](Case& c) { everything(c), c.score_layout = simt::ScoreLayout::kOneRow; }),
  };
  // Packed sequences, empty ones among them, that begin and end amid tiles and boxes.
  const Case packed = {1, 1, 64, kCausal, 2, 1};
  cases.push_back(simt::varlen(packed, {130, 0, 64, 1, 300, 3}, {200, 17, 0, 65, 63, 128}));
  cases.push_back(simt::with(
      simt::varlen({1, 1, 128, kFull, 2, 2, Layout::kPacked, 64}, {70, 129, 5}, {140, 128, 300}),
      [](Case& c) { c.seqused_k = {129, 128, 70}, c.sinks = true; }));
  cases.push_back(
      simt::with(simt::varlen({1, 1, 256, kTopLeft, 1, 1, Layout::kBhsd}, {40, 150}, {70, 200}),
                 [](Case& c) { c.seqused_k = {0, 150}, c.window_left = 60; }));
  cases.push_back(simt::with(simt::varlen({1, 1, 64, kCausal, 2, 1}, {70, 0, 200}, {130, 9, 200}),
                             [](Case& c) { c.softcap = 3.0, c.alibi = true; }));
  // Without keys, so that nothing but their own order keeps the work tiles apart.
  cases.push_back(simt::varlen({1, 1, 128, kFull, 2, 2}, {130, 70, 5, 200, 60}, {0, 0, 0, 17, 0}));
  // So many that they are searched for in several rounds, and heads in groups.
  std::vector<int> seqlens_q, seqlens_k;
  for (int i = 0; i < 13; ++i) {
    seqlens_q.push_back(i * 5 % 7 * 9), seqlens_k.push_back(i * 3 % 11 * 8);
  }
  cases.push_back(simt::varlen({1, 1, 16, kCausal, 9, 3}, seqlens_q, seqlens_k));
  simt::append(&cases, simt::length_cases(64));
  simt::append(&cases, simt::slice_cases(simt::with({1, 1, 128, kCausal, 9, 3}, [](Case& c) {
    c.alibi = true, c.softcap = 5.0;
  })));
  // More than eight heads, of several row blocks each.
  cases.push_back({260, 70, 64, kTopLeft, 9, 3});
  // Works enough for blocks that stay for several of them.
  cases.push_back({20, 130, 64, kCausal, 9, 3, Layout::kBshd, 0, 2});
  cases.push_back({130, 150, 128, kFull, 4, 2, Layout::kBshd, 0, 2});
  // Each tile's scores outgrow what the one before it has set as the rows' references, and do not:
  // by so much that probabilities are scaled down, and by more than fp32 holds.
  for (const int head_dim : {64, 96, 128, 192, 256}) {
    for (const double rise : {0.4, 2.0})
      cases.push_back(simt::with({20, 600, head_dim, kFull}, [=](Case& c) { c.rise = rise; }));
  }
  cases.push_back(
      simt::with({20, 600, 192, kCausal, 1, 1, Layout::kBshd, 128}, [](Case& c) { c.rise = 0.4; }));
  // Row maxima too large to be scaled, in groups of keys that share rows too.
  for (const double rise : {1e9, -1e9})
    cases.push_back(simt::with({20, 300, 64, kFull}, [=](Case& c) { c.rise = rise; }));
  // Blocks in pairs, of several work tiles; v narrower than q.
  cases.push_back({200, 150, 256, kFull, 2, 1, Layout::kBshd, 0, 2});
  cases.push_back({140, 130, 200, kFull, 2, 1, Layout::kBshd, 72});
  cases.push_back(simt::with({140, 300, 256, kFull}, [](Case& c) { c.rise = 0.4; }));
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {64, 64, 64, kFull},
      {256, 128, 64, kCausal},
      {257, 127, 64, kTopLeft},
      {128, 128, 128, kCausal},
      {129, 129, 128, kFull},
      {65, 33, 128, kFull},
      {1, 600, 64, kCausal},
      {200, 1, 64, kFull},
      {3, 700, 128, kFull},
      {300, 173, 128, kTopLeft, 2, 1},
      {100, 373, 96, kFull, 4, 1},
      {128, 128, 96, kFull},
      {300, 257, 88, kTopLeft},
      {130, 192, 192, kFull},
      {128, 193, 160, kCausal, 2, 1},
      {130, 256, 192, kCausal, 2, 1, Layout::kBshd, 128},
      // V's tile is narrower than Q's, or as wide; some of its blocks are not copied.
      {70, 150, 192, kFull, 1, 1, Layout::kBshd, 56},
      {70, 150, 192, kFull, 1, 1, Layout::kBshd, 136},
      {70, 150, 152, kCausal, 2, 1, Layout::kBhsd, 184, 2},
      {70, 150, 64, kFull, 1, 1, Layout::kBshd, 96},
      {70, 150, 96, kFull, 1, 1, Layout::kBshd, 24},
      {70, 150, 256, kFull, 1, 1, Layout::kBshd, 72},
      {50, 90, 128, kCausal, 2, 1, Layout::kBshd, 16},
      {50, 90, 16, kCausal, 2, 1, Layout::kBshd, 128},
      {150, 290, 64, kCausal, 2, 2, Layout::kPacked, 0, 2},
      {70, 90, 120, kCausal, 2, 2, Layout::kBhsd, 0, 2, false},
      {130, 190, 248, kTopLeft, 2, 2, Layout::kBhsd, 0, 2},
      simt::with({70, 500, 128, kFull, 2, 1},
                 [](Case& c) { c.window_left = 100, c.window_right = 140; }),
      simt::with({150, 500, 64, kFull, 2, 1},
                 [](Case& c) { c.window_left = 30, c.window_right = 20; }),
  };
  simt::append(&cases, more);
  simt::append(&cases, simt::length_cases(256));
  simt::append(&cases, simt::hostile_length_cases(simt::with({1, 1, 128, kFull, 3, 1}, [](Case& c) {
    c.alibi = true, c.softcap = 5.0;
  })));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("sm90", arguments, simt::hopper());
  constexpr int kBlocks = 2;  // so few that they compute several tiles one after the other
  tests.limit_blocks(kBlocks);
  for (const Case& c : arguments.cases(cases())) {
    const bool fits_half = std::abs(c.rise) <= 1000.0;
    if (fits_half) tests.run<half>(kFamily, c, run_kernel<half>, "tall");
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>, "tall");
    // Problems that it does not refuse.
    if (fits_half) tests.run<half>(kFamily, c, run_kernel<half, Variant::kShort>, "short");
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16, Variant::kShort>, "short");
    if (fits_half) tests.run<half>(kFamily, c, run_kernel<half, Variant::kPairs>, "pairs");
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16, Variant::kPairs>, "pairs");
  }
  for (const simt::CachedCase& c : simt::many_query_cases(false)) {
    for (const Variant variant : {Variant::kTall, Variant::kShort}) {
      run_cached<half>(tests, variant, kBlocks, c, arguments.filter());
      run_cached<__nv_bfloat16>(tests, variant, kBlocks, c, arguments.filter());
    }
  }
  return tests.finish();
}
