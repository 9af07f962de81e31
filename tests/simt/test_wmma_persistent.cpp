#include "cuda/forward/wmma/boxes.h"
#include "cuda/forward/wmma/persistent.cuh"
#include "feature_cases.h"
#include "tensor_maps.h"
#include "wmma_test.h"

namespace {

constexpr std::string_view kFamily = "wmma";

using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, T>(head_dim_tile, [&](auto tile) {
    if constexpr (dlattn::wmma::has_variant(tile, dlattn::wmma::kPersistent)) {
      const dlattn::wmma::TensorBoxes boxes =
          dlattn::wmma::tensor_boxes(params, tile, dlattn::wmma::kPersistent);
      const bool whole = dlattn::wmma::full_segments(params, tile);
      const auto encode = [&](const dlattn::cuda::TensorBox& box) {
        return simt::encode(whole ? dlattn::wmma::all_segments(box, tile) : box);
      };
      const dlattn::wmma::TensorMaps maps = {encode(boxes.q), encode(boxes.k), encode(boxes.v),
                                             whole};
      dlattn::wmma::persistent_kernel<T, tile>(params, shape, maps);
    }
  });
}

// Tiles are 64 keys by 256 rows up to head_dim 128, 32 by 128 above, in four stages, at 64 in
// eight.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 64, kFull},
      {33, 300, 40, kCausal},
      {31, 63, 56, kFull},
      {66, 97, 256, kCausal},
      {40, 70, 200, kTopLeft},
      {33, 65, 256, kCausal, 1, 1, Layout::kBshd, 128},
      {31, 70, 16, kFull, 1, 1, Layout::kBshd, 64},
      {33, 300, 112, kCausal},
      {31, 63, 104, kFull},
      {40, 70, 96, kTopLeft},
      {33, 65, 192, kCausal, 1, 1, Layout::kBshd, 128},
      // Several items for a block; stages and the place of Q used once, twice and three times.
      {270, 320, 64, kCausal, 2, 1},
      {130, 128, 256, kCausal, 3, 1},
      {270, 320, 128, kCausal, 3, 1},
      {150, 200, 192, kFull, 3, 1},
      {270, 130, 88, kCausal, 3, 1},
      {40, 600, 64, kFull, 2, 1},
      {150, 200, 256, kFull, 2, 2, Layout::kBhsd, 0, 2},
      {150, 100, 48, kFull, 2, 2, Layout::kPacked, 0, 2},
      // No keys, no queries.
      {20, 0, 64, kCausal, 2, 1},
      {0, 20, 64, kFull},
      // Rows that see nothing: whole warps', a whole tile's, a whole item's.
      {300, 40, 64, kCausal, 2, 1},
      {300, 40, 256, kCausal, 2, 1},
      // Edge tiles at both ends of a long walk.
      simt::with({70, 700, 64, kCausal, 2, 1}, [](Case& c) { c.window_left = 400; }),
      simt::with({70, 400, 256, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
  };
  // Each tile's scores outgrow what the one before it has set as the rows' references, or of few
  // rows.
  for (const int head_dim : {64, 128, 256}) {
    cases.push_back(simt::with({20, 600, head_dim, kFull}, [](Case& c) { c.rise = 1.0; }));
    cases.push_back(simt::with({40, 300, head_dim, kCausal}, [](Case& c) { c.rise = 1.0; }));
  }
  simt::append(&cases, simt::feature_cases(64));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::WmmaTests tests("wmma_persistent", arguments, simt::hopper());
  for (const Case& c : arguments.cases(cases())) {
    tests.limit_blocks(2);  // the plan has a block for each item of so small problems
    tests.run<half>(kFamily, c, run_kernel<half>, "persistent+unpacked");
    tests.limit_blocks(INT64_MAX);
    tests.run<__nv_bfloat16>(kFamily, c, run_kernel<__nv_bfloat16>, "persistent+unpacked");
  }
  return tests.finish();
}
