// wmma's kernels for plain problems in float16, launched from Python. Compiled twice, with the
// softmax of src and with the plain one in front of it; see benchmarks/softmax_forms.py.

#include "cuda/wmma/launch.cuh"

namespace dlattn::wmma {
namespace {

template <int kTile, int kVariant>
void run(const AttentionParams& params, void* stream) {
  constexpr TileConfig kConfig = tile_config(kTile, kVariant);
  Plan plan;
  plan.kernel = Kernel::kWmma;
  plan.dtype = params.dtype;
  plan.head_dim_tile = kTile;
  plan.variant = kVariant;
  plan.block_m = kConfig.block_m;
  plan.block_n = kConfig.block_n;
  plan.num_warps = kConfig.num_warps;
  plan.num_stages = kConfig.num_stages;
  plan.smem_bytes = kConfig.smem_bytes;
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
