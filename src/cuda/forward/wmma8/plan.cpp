#include "core/plan/plan.h"

#include "core/plan/code.h"
#include "core/plan/family.h"
#include "core/problem/quantized.h"
#include "cuda/forward/wmma8/traits.h"
#include "cuda/plan/cost.h"

namespace dlattn::wmma8 {
namespace {

// Nobody has measured it on the GPUs that it is for. Per key of a block, what its products take at
// three quarters of the tensor cores' rate by data sheet; compute capability 9.0 has no such
// instruction of e4m3, and takes twice as long as for float16; but it has that of 8-bit integers.
cost::Speed speed(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile) {
  const TileConfig config = tile_config(head_dim_tile);
  const double operations = 2.0 * config.block_m * head_dim_tile;  // of each of the two products
  const double int8_rate = 2 * cost::tensor_rate(device);
  const double rate = device.compute_major == 9 ? cost::kH200Rate / 2 : int8_rate;
  const double qk_rate = multiplies_integers(p.precision) ? int8_rate : rate;
  const double pv_rate = p.precision == Precision::kInt8Fp16 ? int8_rate / 2 : rate;
  const double busy =
      (operations / qk_rate + operations / pv_rate) / 0.75 * (p.softcap != 0.0 ? 1.5 : 1.0);
  return {7000.0, 2.0 * busy, busy};
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options&, Plan* plan,
                  std::string* why) {
  const bool int8 = multiplies_integers(p.precision);
  const bool half_values = p.precision == Precision::kInt8Fp16;
  if (p.precision != Precision::kInputs && !int8)
    return core::refuse(why, "does not implement precision ", to_string(p.precision));
  if (!core::has_code(device, half_values ? kMinCapabilityOfIntegers : kMinCapability, why))
    return false;
  if (p.seqlen_k > kMostKeys)
    return core::refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", kMostKeys);
  const int tile = plan->head_dim_tile;
  const bool general = is_general(p, plan->copy_bytes);
  if (general && !has_general(tile, value_bytes(p.precision))) {
    return core::refuse(why, "does not implement ", core::score_feature(p), " with precision ",
                        to_string(p.precision), " for head dims beyond 128");
  }
  if (!int8 && !has_softcap(tile) && p.softcap != 0.0)
    return core::refuse(why, "does not implement softcap for head dims beyond 128");
  if (!int8 && !has_softcap(tile) && plan->copy_bytes < 16) {
    return core::refuse(why, "rows of q, k or v are aligned to ", plan->copy_bytes,
                        " bytes; accepted: 16, with head dims beyond 128");
  }
  const int bytes = value_bytes(p.precision);
  const TileConfig config = tile_config(tile, bytes);
  cost::set_tile(p, config, plan);
  plan->predicted_ns = cost::rounds_ns(cost::walk(p, config.block_m, 1), speed(p, device, tile),
                                       device.num_sms, blocks_per_sm(tile, general, bytes));
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma8", 0, 16, nullptr, plan_forward};

}  // namespace dlattn::wmma8
