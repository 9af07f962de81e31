#define SIMT_SANITIZED_TILE 128

#include <initializer_list>
#include <vector>

#include "attention_test.h"
#include "cuda/forward/sm90_fp8/boxes.h"
#include "cuda/forward/sm90_fp8/kernel.cuh"
#include "feature_cases.h"
#include "float8_cases.h"
#include "length_cases.h"
#include "tensor_maps.h"
#include "value_cases.h"

namespace {

constexpr std::string_view kFamily = "sm90_fp8";
using Element = __nv_fp8_e4m3;

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, Element>(head_dim_tile, [&](auto tile) {
    const dlattn::sm90_fp8::TensorBoxes boxes = dlattn::sm90_fp8::tensor_boxes(params, tile);
    const dlattn::sm90_fp8::KernelArgsOf<false> args{
        {simt::encode(boxes.q), simt::encode(boxes.k), simt::encode(boxes.v),
         static_cast<unsigned>(dlattn::sm90_fp8::num_work_tiles(params, tile))}};
    if (dlattn::sm90_fp8::has_given_scores(params)) {
      const dlattn::sm90_fp8::KernelArgsOf<true> given{args, {}};
      dlattn::sm90_fp8::kernel<tile, false, true, true>(params, shape, given);
    } else if (params.cu_seqlens_q) {
      dlattn::sm90_fp8::kernel<tile, true, false, false>(params, shape, args);
    } else {
      dlattn::sm90_fp8::kernel<tile, false, false, false>(params, shape, args);
    }
  });
}

void descales(Case& c) {
  c.descales = true;
}

// The caller's bias and mask, in all that tells rows, keys and layouts apart.
std::vector<Case> given_cases(int head_dim) {
  const int rows = dlattn::sm90_fp8::block_m(dlattn::sm90_fp8::tile_shape(head_dim));
  const auto both = [](Case& c) { c.bias = simt::Bias::kFloat32, c.mask = true; };
  return {
      simt::with({rows + 2, 300, head_dim, kCausal, 2, 1, Layout::kBshd, 0, 2},
                 [](Case& c) {
                   c.bias = simt::Bias::kFloat32;
                   c.descales = c.sinks = true;
                 }),
      simt::with({70, 300, head_dim, kFull, 2, 1},
                 [](Case& c) { c.mask = true, c.score_layout = simt::ScoreLayout::kColumns; }),
      simt::with({40, 200, head_dim, kFull, 1, 1},
                 [=](Case& c) { both(c), c.score_layout = simt::ScoreLayout::kOneRow; }),
      simt::with({130, 70, head_dim, kCausal, 1, 1}, both),
      simt::with({20, 300, head_dim, kFull},
                 [](Case& c) { c.bias = simt::Bias::kFloat32, c.bias_rise = 1e6; }),
  };
}

// Each tile's scores outgrow what the one before it has set as the row max, and do not: by so much
// that probabilities are scaled down, and by more than fp32 holds. Within the walk's first 1024
// keys, whose maxima come first, and beyond them.
std::vector<Case> rising_cases(int head_dim, int seqlen_k, double rise,
                               std::initializer_list<float> k_descales) {
  std::vector<Case> cases;
  for (const float k_descale : k_descales) {
    cases.push_back(simt::with({20, seqlen_k, head_dim, kFull}, [=](Case& c) {
      c.rise = rise, c.descales = true, c.k_descale = k_descale;
    }));
  }
  return cases;
}

// Cases of the tiles of other head dims.
std::vector<Case> tile_cases(int head_dim) {
  const dlattn::sm90_fp8::TileShape shape = dlattn::sm90_fp8::tile_shape(head_dim);
  const int rows = dlattn::sm90_fp8::block_m(shape), keys = shape.block_n;
  std::vector<Case> cases = {
      {1, 1, head_dim, kFull},
      {rows + 2, 2 * keys + 9, head_dim, kCausal},
      {rows - 1, keys + 1, head_dim - 16, kTopLeft},
      // Rows that see nothing: some of a warp's, whole warpgroups', a whole tile's.
      {2 * rows + 30, 70, head_dim, kCausal},
      {20, 0, head_dim, kCausal, 2, 1},
      // Heads, and v narrower or wider than q.
      simt::with({40, keys - 26, head_dim, kCausal, 4, 2, Layout::kBshd, 16}, descales),
      {20, keys + 30, 48, kFull, 3, 1, Layout::kBhsd, head_dim, 2},
      {20, keys + 22, head_dim - 32, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      // Masked tiles at both ends of a long walk.
      simt::with({70, 500, head_dim, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
      simt::with({200, 400, head_dim, kFull},
                 [](Case& c) { c.window_left = 10, c.window_right = 3; }),
      simt::with({40, keys + 12, head_dim, kCausal, 2, 1},
                 [](Case& c) { c.sinks = c.descales = true; }),
      // All scores are 0, where a row sees all keys, some, or none.
      simt::with({140, 130, head_dim, kCausal},
                 [](Case& c) { c.descales = true, c.k_descale = 0.0f; }),
      // Work enough for blocks that stay for several tiles.
      simt::with({rows + 2, keys + 22, head_dim, kFull, 2, 1, Layout::kBshd, 0, 2}, descales),
      simt::with(simt::varlen({1, 1, head_dim, kCausal, 2, 1}, {rows + 2, 0, 64, 1, 30},
                              {200, 17, 0, keys - 31, keys}),
                 descales),
      simt::with(simt::varlen({1, 1, head_dim - 16, kFull, 1, 1, Layout::kPacked, head_dim},
                              {70, 129, 5}, {140, keys, 300}),
                 [=](Case& c) { c.seqused_k = {129, keys, 70}, c.sinks = true; }),
  };
  simt::append(&cases, rising_cases(head_dim, 2000, 0.07, {1.0f, 32.0f}));
  simt::append(&cases, rising_cases(head_dim, 1300, -100.0, {4.0f}));  // one key, far above
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {rows, keys, head_dim, kCausal},
      {65, 33, head_dim, kFull},
      {1, 600, head_dim, kCausal},
      {rows + 70, 1, head_dim, kFull},
      simt::with({70, 500, head_dim, kFull, 2, 1},
                 [](Case& c) { c.window_left = 100, c.window_right = 140; }),
  };
  simt::append(&cases, more);
  return cases;
}

// The tile of head_dim 128, 128 keys by 128 rows, and what does not depend on the tile.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 128, kFull},
      {17, 31, 112, kCausal},
      {130, 200, 128, kCausal},
      {129, 300, 128, kFull},
      // Rows that see nothing: some of a warp's, whole warpgroups', a whole tile's.
      {300, 70, 128, kCausal},
      // No keys, no queries, an empty batch.
      {20, 0, 128, kCausal, 2, 1},
      {0, 20, 128, kFull},
      {20, 20, 128, kFull, 1, 1, Layout::kBshd, 0, 0},
      // Heads, and v wider or narrower than q.
      simt::with({40, 70, 128, kCausal, 4, 2, Layout::kBshd, 16}, descales),
      {20, 70, 16, kFull, 3, 1, Layout::kBhsd, 112, 2},
      // Other strides.
      {20, 150, 128, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 96, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
      // Masked tiles at both ends of a long walk.
      simt::with({70, 500, 128, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
      simt::with({200, 400, 128, kFull}, [](Case& c) { c.window_left = 10, c.window_right = 3; }),
      simt::with({40, 140, 128, kCausal, 2, 1}, [](Case& c) { c.sinks = c.descales = true; }),
      simt::with({66, 140, 128, kFull, 4, 2, Layout::kBshd, 0, 2},
                 [](Case& c) { c.descales = c.q_descale_by_kv_head = true; }),
      // All scores are 0, where a row sees all keys, some, or none.
      simt::with({140, 130, 128, kCausal, 2, 1},
                 [](Case& c) { c.descales = true, c.k_descale = 0.0f; }),
      // Work enough for blocks that stay for several tiles.
      simt::with({130, 150, 128, kFull, 4, 2, Layout::kBshd, 0, 2}, descales),
      // The same by twos, of which some have tiles of two heads.
      simt::with({300, 310, 128, kCausal, 2, 1}, descales),
  };
  // Packed sequences, empty ones among them, that begin and end amid tiles and boxes.
  const Case packed = simt::with({1, 1, 128, kCausal, 2, 1}, descales);
  cases.push_back(simt::varlen(packed, {130, 0, 64, 1, 300, 3}, {200, 17, 0, 65, 63, 128}));
  cases.push_back(simt::with(
      simt::varlen({1, 1, 128, kFull, 2, 2, Layout::kPacked, 64}, {70, 129, 5}, {140, 128, 300}),
      [](Case& c) { c.seqused_k = {129, 128, 70}, c.sinks = true; }));
  simt::append(&cases, simt::length_cases(128));
  simt::append(&cases, rising_cases(128, 600, 0.25, {0.125f, 1.0f, 8.0f}));
  simt::append(&cases, rising_cases(128, 2000, 0.07, {0.125f, 1.0f, 32.0f}));
  simt::append(&cases, rising_cases(128, 2004, 1.0, {32.0f}));  // too fast to be scaled down
  simt::append(&cases, rising_cases(128, 1300, -100.0, {4.0f}));
  for (const int head_dim : {64, 192, 256}) simt::append(&cases, tile_cases(head_dim));
  for (const int head_dim : {64, 128, 192, 256}) simt::append(&cases, given_cases(head_dim));
  simt::append(&cases, simt::extreme_bias_cases({20, 300, 64, kFull, 2, 1}));
  if (simt::kThreadSanitizer) return cases;
  const std::vector<Case> more = {
      {128, 128, 128, kCausal},
      {257, 127, 80, kTopLeft},
      {65, 33, 128, kFull},
      {1, 600, 128, kCausal},
      {200, 1, 128, kFull},
      {300, 173, 128, kTopLeft, 2, 1},
      simt::with({100, 373, 128, kFull, 4, 1}, descales),
      {70, 150, 64, kFull, 1, 1, Layout::kBshd, 96},
      simt::with({70, 500, 128, kFull, 2, 1},
                 [](Case& c) { c.window_left = 100, c.window_right = 140; }),
  };
  simt::append(&cases, more);
  simt::append(&cases, simt::hostile_length_cases(simt::with({1, 1, 128, kFull, 3, 1}, descales)));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("sm90_fp8", arguments, simt::hopper());
  constexpr int kBlocks = 2;  // so few that they compute several tiles one after the other
  tests.limit_blocks(kBlocks);
  simt::run_float8(&tests, arguments.cases(cases()), kFamily, run_kernel);
  return tests.finish();
}
