// sm90's kernels for plain problems in float16, launched from Python. Compiled twice, with the
// softmax of src and with the plain one in front of it; see benchmarks/softmax_forms.py.

#include "cuda/sm90/launch.cuh"

namespace dlattn::sm90 {
namespace {

template <int kTile>
void run(const AttentionParams& params, std::int64_t grid, void* stream) {
  constexpr TileConfig kConfig = tile_config(kTile, kTile);
  Plan plan;
  plan.kernel = Kernel::kSm90;
  plan.dtype = params.dtype;
  plan.head_dim_tile = kTile;
  plan.block_m = kConfig.block_m;
  plan.block_n = kConfig.block_n;
  plan.num_warps = kConfig.num_warps;
  plan.num_stages = kConfig.num_stages;
  plan.smem_bytes = kConfig.smem_bytes;
  plan.grid = grid;
  launch_tile<DType::kFloat16, kTile, kTile, Terms::kNone>(params, plan, stream);
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
  AttentionParams p;
  p.q = q, p.k = k, p.v = v, p.out = out;
  p.device = {DeviceType::kCuda, device};
  p.batch_size = batch_size, p.num_heads = p.num_heads_kv = num_heads;
  p.seqlen_q = p.seqlen_k = seqlen, p.head_dim = p.head_dim_v = head_dim;
  p.q_row_stride = p.k_row_stride = p.v_row_stride = p.out_row_stride = head_dim;
  p.q_head_stride = p.k_head_stride = p.v_head_stride = p.out_head_stride = seqlen * head_dim;
  p.q_batch_stride = p.k_batch_stride = p.v_batch_stride = p.out_batch_stride =
      num_heads * seqlen * head_dim;
  p.softmax_scale = softmax_scale;
  p.causal = causal ? Causal::kBottomRight : Causal::kNone;
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
