// wmma's kernels for plain problems in float16, launched from Python. Compiled twice, with the
// softmax of src and with the plain one in front of it; see benchmarks/softmax_forms.py.

#include "cuda/wmma/launch.cuh"
#include "problem.h"

namespace dlattn::wmma {
namespace {

template <int kTile, int kVariant>
void run(const AttentionParams& params, void* stream) {
  constexpr TileConfig kConfig = tile_config(kTile, kVariant);
  Plan plan = plan_of(Kernel::kWmma, params, kTile, kConfig);
  plan.variant = kVariant;
  plan.copy_bytes = 16;
  plan.grid =
      (params.seqlen_q + plan.block_m - 1) / plan.block_m * params.num_heads * params.batch_size;
  launch_variant<DType::kFloat16, kTile, kVariant>(params, make_launch_shape(params, plan), plan,
                                                   stream);
}

}  // namespace
}  // namespace dlattn::wmma

// q, k, v and out are contiguous, (batch_size, num_heads, seqlen, head_dim). `variant` is the
// place of a name in kVariantNames. 0 if it was launched, 1 if there is no such kernel here, 2 if
// the launch failed.
extern "C" __attribute__((visibility("default"))) int launch(
    const void* q, const void* k, const void* v, void* out, std::int64_t batch_size,
    std::int64_t num_heads, std::int64_t seqlen, std::int64_t head_dim, double softmax_scale,
    int causal, std::int64_t variant, int device, void* stream) {
  using namespace dlattn;
  const AttentionParams p = contiguous_problem(q, k, v, out, batch_size, num_heads, seqlen,
                                               head_dim, softmax_scale, causal, device);
  try {
    if (head_dim == 64 && variant == wmma::kWide) {
      wmma::run<64, wmma::kWide>(p, stream);
    } else if (head_dim == 64 && variant == wmma::kNarrow) {
      wmma::run<64, wmma::kNarrow>(p, stream);
    } else if (head_dim == 128 && variant == wmma::kWide) {
      wmma::run<128, wmma::kWide>(p, stream);
    } else if (head_dim == 128 && variant == wmma::kNarrow) {
      wmma::run<128, wmma::kNarrow>(p, stream);
    } else {
      return 1;
    }
  } catch (const Error&) {
    return 2;
  }
  return 0;
}
