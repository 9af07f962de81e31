#include "core/wmma_plan.h"

#include "core/plan.h"
#include "cuda/wmma/traits.h"

namespace dlattn::core {
namespace {

std::int64_t num_blocks(const AttentionParams& p, int block_m) {
  const std::int64_t m_blocks = (p.seqlen_q + block_m - 1) / block_m;
  return m_blocks * p.num_heads * p.batch_size;
}

// Whether `count` blocks of a tile shape fit an SM's shared memory.
bool blocks_fit(const TileConfig& config, const DeviceInfo& device, int count) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  return config.smem_bytes <= device.max_smem_per_block &&
         count * (config.smem_bytes + kReservedSmem) <= device.smem_per_sm;
}

// What Options::batch_invariant has the plan chosen for: rows enough to fill any device, of heads
// like the problem's. Nothing in its sizes depends on what else is in the batch.
AttentionParams large_batch_of(const AttentionParams& p) {
  AttentionParams large = p;
  large.batch_size = 1024;
  large.seqlen_q = large.seqlen_k = 4096;
  large.num_heads = p.num_heads / p.num_heads_kv;
  large.num_heads_kv = 1;
  large.cu_seqlens_q = large.cu_seqlens_k = large.seqused_k = nullptr;
  return large;
}

// Why the kernels without score terms, whose copies are of 16 bytes, do not serve a problem; empty
// if they do.
std::string fast_refusal(const AttentionParams& p) {
  const auto head_dim_text = [](const char* name, std::int64_t head_dim) {
    return std::string(name) + " is " + std::to_string(head_dim) + "; accepted: multiples of 8";
  };
  if (const char* feature = score_feature(p)) return std::string("does not implement ") + feature;
  if (p.head_dim % 8 != 0) return head_dim_text("head_dim", p.head_dim);
  if (p.head_dim_v % 8 != 0) return head_dim_text("head_dim of v", p.head_dim_v);
  const int bytes = copy_bytes(p);
  if (bytes == 16) return {};
  return "rows of q, k and v are aligned to " + std::to_string(bytes) + " bytes; accepted: 16";
}

}  // namespace

// The general kernel takes what the others do not serve. Of those, wide shapes do more with each
// byte that they read from shared memory, and need 8 warps on an SM to hide their latencies; where
// those do not fit, or where so few blocks come of it that SMs would idle, the narrow ones are
// faster.
int choose_wmma_variant(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                        bool batch_invariant) {
  if (!fast_refusal(params).empty()) return wmma::kGeneral;
  const AttentionParams p = batch_invariant ? large_batch_of(params) : params;
  constexpr double kNarrowCost = 1.2;  // time per row on narrow tiles, relative to wide ones
  const TileConfig wide = wmma::tile_config(head_dim_tile, wmma::kWide);
  const TileConfig narrow = wmma::tile_config(head_dim_tile, wmma::kNarrow);
  if (!blocks_fit(wide, device, 8 / wide.num_warps)) return wmma::kNarrow;
  const auto busiest_sm_rows = [&](const TileConfig& config) {
    const std::int64_t sms = device.num_sms > 0 ? device.num_sms : 1;
    return static_cast<double>((num_blocks(p, config.block_m) + sms - 1) / sms * config.block_m);
  };
  return kNarrowCost * busiest_sm_rows(narrow) < busiest_sm_rows(wide) ? wmma::kNarrow
                                                                       : wmma::kWide;
}

std::string wmma_variant_refusal(const AttentionParams& p, int head_dim_tile, int variant) {
  const std::string name = std::string("variant ") + wmma::kVariantNames[variant];
  if (!wmma::has_variant(head_dim_tile, variant))
    return name + " has no instance for this head_dim";
  const std::string why = variant == wmma::kGeneral ? std::string() : fast_refusal(p);
  return why.empty() ? why : name + ": " + why;
}

}  // namespace dlattn::core
