// The kernel of sm90_wide.
#define SIMT_SANITIZED_TILE 512

#include "attention_test.h"
#include "cuda/forward/sm90_wide/boxes.h"
#include "cuda/forward/sm90_wide/kernel.cuh"
#include "feature_cases.h"
#include "tensor_maps.h"

namespace {

constexpr std::string_view kFamily = "sm90_wide";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  const dlattn::sm90_wide::TensorBoxes boxes = dlattn::sm90_wide::tensor_boxes(params);
  const dlattn::sm90_wide::KernelArgs args = {simt::encode(boxes.q), simt::encode(boxes.k),
                                              simt::encode(boxes.v)};
  simt::with_instance<kFamily, T>(
      head_dim_tile, [&](auto tile) { dlattn::sm90_wide::kernel<T, tile>(params, shape, args); });
}

// A cluster has 128 rows, a block 64 of them; tiles of keys are 64, by turns each consumer's.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      // One tile, two, odd and even numbers of them; rows of one block alone, of both.
      {1, 31, 512, kFull},
      {65, 130, 512, kCausal},
      {130, 260, 264, kFull},
      {64, 192, 448, kFull, 1, 1, Layout::kBshd, 72},
      // The smaller tiles: all of their columns, and some.
      {65, 130, 320, kCausal},
      {70, 200, 384, kFull, 2, 1},
      {20, 330, 336, kCausal, 1, 1, Layout::kBshd, 328},
      {20, 130, 384, kFull, 1, 1, Layout::kBshd, 64},
      // Tiles that one of the blocks does not see, at either end: the slots go on.
      {128, 300, 512, kCausal},
      {200, 90, 512, kTopLeft},
      simt::with({128, 450, 320, kCausal, 2, 1}, [](Case& c) { c.window_left = 70; }),
      simt::with({130, 330, 512, kFull}, [](Case& c) { c.window_left = 10, c.window_right = 3; }),
      // Rows that see nothing: some, all of a block's; no keys, no queries, an empty batch.
      {150, 40, 320, kCausal},
      {20, 0, 512, kCausal},
      {0, 20, 512, kFull},
      {20, 20, 512, kFull, 1, 1, Layout::kBshd, 0, 0},
      // Heads, and v wider or narrower than q.
      {40, 150, 512, kCausal, 4, 2, Layout::kBshd, 264, 2},
      {20, 70, 40, kFull, 3, 1, Layout::kBhsd, 512, 2},
      // Other strides, and sinks.
      {20, 90, 512, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 320, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
      simt::with({40, 70, 512, kCausal, 2, 1}, [](Case& c) { c.sinks = true; }),
  };
  // Row maxima that rise from tile to tile, and by so much that scores are not scaled beforehand.
  for (const double rise : {0.3, 4.0})
    cases.push_back(simt::with({20, 300, 512, kFull}, [=](Case& c) { c.rise = rise; }));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("sm90_wide", arguments, simt::hopper());
  for (const Case& c : arguments.cases(cases())) {
    tests.run<half>(kFamily, c, run_kernel<half>);
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>);
  }
  return tests.finish();
}
