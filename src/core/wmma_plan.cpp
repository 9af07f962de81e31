#include "core/wmma_plan.h"

#include <limits>

#include "core/plan.h"
#include "core/wmma_cost.h"
#include "cuda/wmma/traits.h"

namespace dlattn::core {
namespace {

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

// The general kernel takes what the others do not serve; of those, the fastest by prediction. On
// devices before compute capability 9.0 an mbarrier's arrival is a fence and an atomic, so kAhead
// is not for them. Of equal ones the first is taken.
int choose_wmma_variant(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                        bool batch_invariant) {
  if (!fast_refusal(params).empty()) return wmma::kGeneral;
  const AttentionParams p = batch_invariant ? large_batch_of(params) : params;
  int best = wmma::kNarrow;
  double least = std::numeric_limits<double>::infinity();
  for (const int variant : {wmma::kWide, wmma::kNarrow, wmma::kSplit, wmma::kAhead}) {
    if (!wmma::has_variant(head_dim_tile, variant)) continue;
    if (variant == wmma::kAhead && device.compute_major < 9) continue;
    const double cost = wmma_cost(p, device, head_dim_tile, variant);
    if (cost < least) best = variant, least = cost;
  }
  return best;
}

std::string wmma_variant_refusal(const AttentionParams& p, int head_dim_tile, int variant) {
  const std::string name = std::string("variant ") + wmma::kVariantNames[variant];
  if (!wmma::has_variant(head_dim_tile, variant))
    return name + " has no instance for this head_dim";
  const std::string why = variant == wmma::kGeneral ? std::string() : fast_refusal(p);
  return why.empty() ? why : name + ": " + why;
}

}  // namespace dlattn::core
