// sm90's kernels for plain problems in float16, launched from Python. Compiled twice, with the
// softmax of src and with the plain one in front of it; see benchmarks/softmax_forms.py.

#include "cuda/sm90/launch.cuh"
#include "problem.h"

namespace dlattn::sm90 {
namespace {

template <int kTile>
void run(const AttentionParams& params, std::int64_t grid, void* stream) {
  constexpr TileConfig kConfig = tile_config(kTile, kTile);
  Plan plan = plan_of(Kernel::kSm90, params, kTile, kConfig);
  plan.grid = grid;
  launch_tile<DType::kFloat16, kTile, kTile, Terms::kNone, false>(params, plan, stream);
}

}  // namespace
}  // namespace dlattn::sm90

// q, k, v and out are contiguous, (batch_size, num_heads, seqlen, head_dim). 0 if it was launched,
// 1 if there is no such kernel here, 2 if the launch failed.
extern "C" __attribute__((visibility("default"))) int launch(
    const void* q, const void* k, const void* v, void* out, std::int64_t batch_size,
    std::int64_t num_heads, std::int64_t seqlen, std::int64_t head_dim, double softmax_scale,
    int causal, std::int64_t grid, int device, void* stream) {
  using namespace dlattn;
  const AttentionParams p = contiguous_problem(q, k, v, out, batch_size, num_heads, seqlen,
                                               head_dim, softmax_scale, causal, device);
  try {
    if (head_dim == 64) {
      sm90::run<64>(p, grid, stream);
    } else if (head_dim == 128) {
      sm90::run<128>(p, grid, stream);
    } else if (head_dim == 256) {
      sm90::run<256>(p, grid, stream);
    } else {
      return 1;
    }
  } catch (const Error&) {
    return 2;
  }
  return 0;
}
