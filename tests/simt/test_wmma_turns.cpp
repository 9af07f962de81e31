#include "attention_test.h"
#include "cuda/wmma/boxes.h"
#include "cuda/wmma/turns.cuh"
#include "feature_cases.h"
#include "tensor_maps.h"

namespace {

using dlattn::Kernel;
using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

template <typename T>
void run_kernel(int head_dim_tile, const dlattn::AttentionParams& params,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<Kernel::kWmma, T>(head_dim_tile, [&](auto tile) {
    if constexpr (dlattn::wmma::has_variant(tile, dlattn::wmma::kTurns)) {
      const dlattn::wmma::TensorBoxes boxes =
          dlattn::wmma::tensor_boxes(params, tile, dlattn::wmma::kTurns);
      const bool whole = dlattn::wmma::whole_segments(params, tile);
      const auto encode = [&](const dlattn::tile::TensorBox& box) {
        return simt::encode(whole ? dlattn::wmma::all_segments(box, tile) : box);
      };
      const dlattn::wmma::TensorMaps maps = {encode(boxes.q), encode(boxes.k), encode(boxes.v),
                                             whole};
      dlattn::wmma::turns_kernel<T, tile>(params, shape, maps);
    }
  });
}

// Tiles are 64 keys by 256 rows at head_dim 128, 32 by 128 at 192, in four stages.
std::vector<Case> cases() {
  std::vector<Case> cases = {
      {1, 1, 128, kFull},
      {33, 300, 112, kCausal},
      {31, 63, 104, kFull},
      {66, 97, 128, kCausal},
      {40, 70, 120, kTopLeft},
      {33, 65, 192, kCausal, 1, 1, Layout::kBshd, 128},
      {31, 70, 168, kFull},
      // Several row blocks; stages used once, twice and three times.
      {270, 320, 128, kCausal},
      {130, 128, 192, kCausal},
      {40, 600, 128, kFull, 2, 1},
      {20, 400, 184, kFull},
      {130, 300, 64, kCausal, 2, 1},
      {300, 300, 64, kFull, 3, 1},
      {100, 200, 256, kCausal, 3, 1},
      {600, 200, 96, kTopLeft, 2, 1},
      // No keys, no queries.
      {20, 0, 128, kCausal},
      {0, 20, 128, kFull},
      // Rows that see nothing: whole warps', a whole tile's.
      {300, 40, 128, kCausal},
      // Edge tiles at both ends of a long walk.
      simt::with({70, 700, 128, kCausal, 2, 1}, [](Case& c) { c.window_left = 400; }),
      simt::with({70, 400, 192, kCausal, 2, 1}, [](Case& c) { c.window_left = 200; }),
  };
  // Each tile's scores outgrow what the one before it has set as the rows' references, or of few
  // rows, so that of two warps that take turns one alone finds them outgrown.
  for (const int head_dim : {128, 192}) {
    cases.push_back(simt::with({20, 600, head_dim, kFull}, [](Case& c) { c.rise = 1.0; }));
    cases.push_back(simt::with({40, 300, head_dim, kCausal}, [](Case& c) { c.rise = 1.0; }));
  }
  simt::append(&cases, simt::feature_cases(128));
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  simt::Tests tests("wmma_turns", arguments, simt::hopper());
  for (const Case& c : arguments.cases(cases())) {
    tests.run<half>(Kernel::kWmma, c, run_kernel<half>, "turns+unpacked");
    tests.run<__nv_bfloat16>(Kernel::kWmma, c, run_kernel<__nv_bfloat16>, "turns+unpacked");
  }
  return tests.finish();
}
