// sm90's kernel of one tile, HEAD_DIM, for plain problems in float16, launched from Python.
// Compiled twice, with the softmax of src and with the plain one in front of it; see
// research/softmax_forms.py.

#include "cuda/forward/sm90/launch.cuh"
#include "problem.h"

// q, k, v and out are contiguous, (batch_size, num_heads, seqlen, HEAD_DIM). 0 if it was launched.
extern "C" __attribute__((visibility("default"))) int launch(
    const void* q, const void* k, const void* v, void* out, std::int64_t batch_size,
    std::int64_t num_heads, std::int64_t seqlen, double softmax_scale, int causal,
    std::int64_t grid, int device, void* stream) {
  using namespace dlattn;
  const AttentionParams p = contiguous_problem(q, k, v, out, batch_size, num_heads, seqlen,
                                               HEAD_DIM, softmax_scale, causal, device);
  const Plan plan = plan_of("sm90", p, HEAD_DIM, sm90::tile_config(HEAD_DIM, HEAD_DIM), grid);
  try {
    sm90::launch_tile<DType::kFloat16, HEAD_DIM, HEAD_DIM, sm90::Variant::kTall,
                      sm90::Keys::kFixed>(p, plan, stream);
  } catch (const Error&) {
    return 1;
  }
  return 0;
}
