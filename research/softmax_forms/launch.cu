// wmma's kernel of one tile, HEAD_DIM, and shape, VARIANT, for plain problems in float16, launched
// from Python. Compiled twice, with the softmax of src and with the plain one in front of it; see
// research/softmax_forms.py.

#include "cuda/forward/wmma/launch.cuh"
#include "problem.h"

// q, k, v and out are contiguous, (batch_size, num_heads, seqlen, HEAD_DIM). 0 if it was launched.
extern "C" __attribute__((visibility("default"))) int launch(
    const void* q, const void* k, const void* v, void* out, std::int64_t batch_size,
    std::int64_t num_heads, std::int64_t seqlen, double softmax_scale, int causal,
    std::int64_t grid, int device, void* stream) {
  using namespace dlattn;
  constexpr int kVariant = wmma::VARIANT;
  const AttentionParams p = contiguous_problem(q, k, v, out, batch_size, num_heads, seqlen,
                                               HEAD_DIM, softmax_scale, causal, device);
  Plan plan = plan_of("wmma", p, HEAD_DIM, wmma::tile_config(HEAD_DIM, kVariant), grid);
  plan.variant = kVariant;
  plan.copy_bytes = 16;
  try {
    wmma::launch_variant<DType::kFloat16, HEAD_DIM, kVariant>(p, make_launch_shape(p, plan), plan,
                                                              stream);
  } catch (const Error&) {
    return 1;
  }
  return 0;
}
