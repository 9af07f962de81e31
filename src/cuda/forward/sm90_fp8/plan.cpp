#include "core/plan/plan.h"

#include <algorithm>
#include <cmath>

#include "core/plan/family.h"
#include "cuda/forward/sm90_fp8/boxes.h"
#include "cuda/plan/cost.h"
#include "cuda/plan/persistent_grid.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/plan/tensor_refusal.h"

namespace dlattn::sm90_fp8 {
namespace {

using core::refuse;

// Whether TMA can be told of a problem's tensors.
bool accepts_tensors(const AttentionParams& p, int head_dim_tile, std::string* why) {
  const TensorBoxes boxes = tensor_boxes(p, head_dim_tile);
  for (const cuda::TensorBox* box : {&boxes.q, &boxes.k, &boxes.v}) {
    const std::string tma_refusal = cuda::tma_refusal(*box);
    if (!tma_refusal.empty()) return refuse(why, tma_refusal);
  }
  return true;
}

// On an H200, estimated: that of head_dim 128, by the rows and columns of the tile. Exponentials
// take as long as the products of 128 columns.
constexpr cost::OnePerSmSpeed speed(int head_dim_tile) {
  const double rows = tile_shape(head_dim_tile).num_consumers / 2.0;
  const double columns = std::max(head_dim_tile, 128) / 128.0;
  return {4600, 5100, 7.8 * rows * columns, 6.2 * columns};
}

double predicted_ns(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile) {
  const TileShape shape = tile_shape(head_dim_tile);
  const cost::OnePerSmSpeed s = speed(head_dim_tile);
  const double per_key = s.of_key(cost::mean_seqlen_q(p), block_m(shape), kWarpgroupRows);
  constexpr double kTail = 0.25;
  return cost::one_block_per_sm_ns(p, cost::walk(p, block_m(shape), 1), device, s, per_key, kTail);
}

// Whether persistent blocks, which take work tiles by twos, have about equal shares of short walks.
// At head_dim 64 it loses.
bool fills_by_twos(const AttentionParams& p, const DeviceInfo& device, std::int64_t tiles,
                   int head_dim_tile) {
  constexpr std::int64_t kFewKeys = 1024;
  const int rows = block_m(tile_shape(head_dim_tile));
  if (p.causal == Causal::kNone || p.cu_seqlens_q || p.window_left >= 0) return false;
  // With one tile a head none is longer than others.
  if (head_dim_tile != 128 || p.seqlen_q <= rows) return false;
  if (tiles <= device.num_sms || tiles > kMostByTwos * device.num_sms) return false;
  if (cuda::longest_walk(p, rows) > kFewKeys) return false;
  const std::int64_t twos = (tiles + 1) / 2, rounds = (twos + device.num_sms - 1) / device.num_sms;
  return 8 * rounds * device.num_sms <= 9 * twos;  // at most an eighth stands idle
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string* why) {
  // Quantised rows have as many columns as they are stored with.
  if (p.precision != Precision::kInputs)
    plan->head_dim_tile = quantized_columns(p.head_dim, p.head_dim_v);
  const int tile = plan->head_dim_tile;
  if (!device.arch_specific_code)
    return refuse(why, "needs code for 90a, which this build does not have");
  if (p.softcap != 0.0 || p.alibi_slopes.data)
    return refuse(why, "does not implement ", core::score_feature(p));
  if (has_given_scores(p) && p.cu_seqlens_q)
    return refuse(why, "does not implement ", core::score_feature(p), " with variable length");
  if (p.precision == Precision::kInputs && !accepts_tensors(p, tile, why)) return false;
  if (p.seqlen_k > kMostKeys)
    return refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", kMostKeys);
  cost::set_tile(p, tile_config(tile), plan);
  const TileShape shape = tile_shape(tile);
  plan->grid = cuda::num_blocks(p, device, num_work_tiles(p, tile), block_m(shape),
                                shape.query_stages > 1 ? 1024 : 512);
  if (fills_by_twos(p, device, num_work_tiles(p, tile), tile)) plan->grid = device.num_sms;
  plan->predicted_ns = predicted_ns(p, device, tile);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"sm90_fp8", 90, 16, nullptr, plan_forward};

}  // namespace dlattn::sm90_fp8
