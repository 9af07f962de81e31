// sm90_fp8 on 16-bit inputs that were quantised: tiles of k and v have scales of their own.
#define SIMT_SANITIZED_TILE 128

#include <cmath>

#include "cuda/forward/sm90_fp8/kernel.cuh"
#include "feature_cases.h"
#include "length_cases.h"
#include "quantized_case.h"
#include "tensor_maps.h"
#include "value_cases.h"

namespace {

constexpr std::string_view kFamily = "sm90_fp8";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

void run_kernel(const dlattn::AttentionParams& params, const dlattn::Plan& plan) {
  namespace family = dlattn::sm90_fp8;
  family::KernelArgsOf<true> args{};
  args.scales = family::block_scales(params);
  const dlattn::AttentionParams inner = family::quantized_problem(params, args.scales);
  const dlattn::LaunchShape shape = dlattn::make_launch_shape(inner, plan);
  simt::with_instance<kFamily, __nv_fp8_e4m3>(plan.head_dim_tile, [&](auto tile) {
    if constexpr (dlattn::is_quantized_width(tile)) {
      const family::TensorBoxes boxes = family::tensor_boxes(inner, tile);
      args.q = simt::encode(boxes.q), args.k = simt::encode(boxes.k);
      args.v = simt::encode(boxes.v);
      args.num_work_tiles = static_cast<unsigned>(family::num_work_tiles(inner, tile));
      if (family::has_given_scores(inner)) {
        family::kernel<tile, false, true, true>(inner, shape, args);
      } else if (inner.cu_seqlens_q) {
        family::kernel<tile, true, true, false>(inner, shape, args);
      } else {
        family::kernel<tile, false, true, false>(inner, shape, args);
      }
    }
  });
}

std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 128, kFull},
      {17, 31, 112, kCausal},
      {130, 200, 128, kCausal, 2, 1, Layout::kBshd, 0, 2},
      {129, 300, 128, kFull},
      {300, 70, 128, kCausal},
      {20, 0, 128, kCausal, 2, 1},
      {40, 70, 128, kCausal, 4, 2, Layout::kPacked, 16},
      {20, 70, 16, kFull, 3, 1, Layout::kBhsd, 112, 2},
      {200, 300, 64, kCausal, 2, 2, Layout::kBshd, 0, 2},
      {97, 193, 48, kFull, 2, 1, Layout::kAlign8},
      // The scales of q end with the workspace, and the last consumers' rows are beyond q.
      {65, 10, 64, kFull, 32, 1},
      {129, 10, 128, kFull, 64, 1},
      // Consumers whose rows see no key, as a block's first work tile and as a later one.
      {400, 65, 64, kCausal, 1, 1, Layout::kBshd, 0, 2},
      simt::with({256, 128, 64, kFull, 2, 2}, [](Case& c) { c.window_right = 7; }),
      simt::with({70, 500, 128, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
      simt::with({40, 140, 128, kCausal, 2, 1}, [](Case& c) { c.sinks = true; }),
      simt::with({300, 140, 64, kCausal, 2, 1}, [](Case& c) { c.sinks = true; }),
      simt::with({20, 600, 128, kFull}, [](Case& c) { c.rise = 0.25; }),
      simt::with({20, 600, 128, kFull}, [](Case& c) { c.rise = 8.0; }),
      simt::with({20, 600, 64, kFull}, [](Case& c) { c.rise = 200.0; }),
      // Row maxima beyond what is kept in powers of two, in tiles of different scales.
      simt::with({20, 600, 128, kFull}, [](Case& c) { c.rise = 1e6; }),
      simt::with({20, 600, 64, kFull}, [](Case& c) { c.rise = 1e6; }),
      simt::with({20, 600, 128, kFull}, [](Case& c) { c.rise = 1e7; }),
      // The same, of a key that outweighs those of the tile after it, whose scale is another one.
      simt::with({20, 300, 64, kFull}, [](Case& c) { c.rise = -1e9; }),
      // Rounded in base 2, such row maxima would be off by what takes a probability beyond 448.
      simt::with({20, 300, 64, kFull}, [](Case& c) { c.rise = -1e5; }),
      simt::with({20, 300, 64, kFull}, [](Case& c) { c.rise = -1e7; }),
      simt::with({20, 300, 128, kFull}, [](Case& c) { c.rise = -1e7; }),
      // Tiles whose keys are all 0, after such a row max.
      simt::with({20, 300, 64, kFull}, [](Case& c) { c.pair = 1e6; }),
      simt::with({90, 300, 128, kCausal}, [](Case& c) { c.pair = 1e8; }),
      // Scores of tiles whose row maxima no longer come first, computed again.
      simt::with({20, 2000, 128, kFull}, [](Case& c) { c.rise = 1.0; }),
  };
  // The largest tile, which is not pipelined.
  simt::append(&cases, {{1, 1, 256, kFull},
                        {130, 200, 256, kCausal, 2, 1, Layout::kBshd, 0, 2},
                        {70, 300, 136, kFull, 1, 1, Layout::kBshd, 200},
                        {20, 150, 144, kCausal, 2, 1},
                        simt::with({40, 140, 256, kCausal, 2, 1}, [](Case& c) { c.sinks = true; }),
                        simt::with({20, 600, 256, kFull}, [](Case& c) { c.rise = 8.0; }),
                        simt::with({20, 600, 256, kFull}, [](Case& c) { c.rise = 1e6; }),
                        simt::varlen({1, 1, 256, kCausal, 2, 1}, {130, 0, 64}, {200, 17, 65})});
  for (const int head_dim : {64, 128, 256}) {
    simt::append(&cases,
                 {simt::with({140, 300, head_dim, kCausal, 2, 1},
                             [](Case& c) { c.bias = simt::Bias::kOwnDType, c.sinks = true; }),
                  simt::with({70, 300, head_dim, kFull, 2, 1},
                             [](Case& c) { c.bias = simt::Bias::kFloat32, c.mask = true; })});
  }
  simt::append(&cases, simt::extreme_bias_cases({20, 300, 64, kFull, 2, 1}));
  const Case packed = {1, 1, 128, kCausal, 2, 1};
  cases.push_back(simt::varlen(packed, {130, 0, 64, 1, 300, 3}, {200, 17, 0, 65, 63, 128}));
  cases.push_back(simt::with(simt::varlen({1, 1, 64, kFull, 2, 2}, {70, 129, 5}, {140, 128, 300}),
                             [](Case& c) { c.seqused_k = {129, 128, 70}, c.sinks = true; }));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  simt::Tests tests("sm90_fp8", "");
  constexpr int kBlocks = 2;  // so few that they compute several tiles one after the other
  int number = 0;
  for (const Case& c : cases()) {
    const bool beyond_half = std::abs(c.rise) > 1e3 || c.pair != 0.0;
    if (number++ % 2 == 0 && !beyond_half) {
      simt::run_quantized<half>(&tests, kFamily, c, dlattn::Precision::kFp8, simt::hopper(), filter,
                                kBlocks, run_kernel);
    } else {
      simt::run_quantized<__nv_bfloat16>(&tests, kFamily, c, dlattn::Precision::kFp8,
                                         simt::hopper(), filter, kBlocks, run_kernel);
    }
  }
  return tests.finish();
}
