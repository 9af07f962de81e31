#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cuda/forward/wmma/traits.h"
#include "cuda/plan/cost.h"
#include "dlattn/attention.h"

// The model of the times of wmma's variants, as plain host code for its plan.
namespace dlattn::wmma {

// All speeds were measured on an H200: the general kernel's in research/steps/h200-choices.json,
// the others' on small grids and on batches that fill it.
inline cost::Speed general_speed(const AttentionParams& p, int head_dim_tile) {
  if (p.softcap != 0.0) {
    if (head_dim_tile <= 32) return {6000, 38.0, 20.0};
    if (head_dim_tile <= 64) return {6300, 45.3, 28.4};
    if (head_dim_tile <= 96) return {6800, 48.8, 32.5};
    if (head_dim_tile <= 128) return {7000, 57.0, 39.6};
    return head_dim_tile <= 192 ? cost::Speed{6700, 54.5, 54.5} : cost::Speed{8200, 65.9, 65.9};
  }
  const double bias = p.bias.data ? 1800.0 : 0.0;
  if (head_dim_tile <= 32) return {5800 + bias, 24.0, 12.0};
  if (head_dim_tile <= 64) return {6200 + bias, 27.5, 18.0};
  if (head_dim_tile <= 96) return {6600 + bias, 40.0, 24.5};
  if (head_dim_tile <= 128) return {6900 + bias, 45.0, 29.5};
  return head_dim_tile <= 192 ? cost::Speed{7000 + bias, 45.5, 45.5}
                              : cost::Speed{8000 + bias, 56.0, 56.0};
}

inline cost::Speed speed(const AttentionParams& p, int head_dim_tile, int variant) {
  switch (variant) {
    case kWide:
      if (head_dim_tile <= 32) return {3400, 12.5, 9.5};
      if (head_dim_tile <= 64) return {4200, 15.1, 11.9};
      if (head_dim_tile <= 96) return {4500, 22.0, 16.5};
      if (head_dim_tile <= 128) return {5000, 25.1, 20.3};
      if (head_dim_tile <= 192) return {6000, 36.0, 36.0};
      return {6900, 50.6, 50.0};
    case kNarrow:
      if (head_dim_tile <= 32) return {3000, 9.1, 5.6};
      if (head_dim_tile <= 64) return {3100, 10.1, 6.9};
      if (head_dim_tile <= 96) return {3400, 16.3, 11.5};
      if (head_dim_tile <= 128) return {3500, 18.1, 12.5};
      if (head_dim_tile <= 192) return {4900, 24.0, 18.0};
      return {8300, 33.0, 24.8};
    case kSplit:
      if (head_dim_tile <= 32) return {2600, 5.2, 3.0};
      if (head_dim_tile <= 64) return {2700, 4.9, 4.1};
      if (head_dim_tile <= 96) return {3200, 10.1, 8.5};
      return {3400, 8.8, 8.3};
    case kSinglePass:
      return {2800, 4.0, 4.0};
    case kPersistent:
      // On the diagonal the warps of a block leave out more keys than cost::walk() assumes.
      if (head_dim_tile <= 64) return {2900, 22.1, 22.1};
      if (head_dim_tile <= 96) return {3200, 29.5, 29.5};
      if (head_dim_tile <= 128) return {3300, 37.5, 37.5};
      return head_dim_tile <= 192 ? cost::Speed{4000, 28.0, 28.0} : cost::Speed{4700, 43.2, 43.2};
    case kGeneral:
      return general_speed(p, head_dim_tile);
    default:  // kPipelined
      return head_dim_tile <= 192 ? cost::Speed{7300, 31.0, 31.0} : cost::Speed{8400, 43.5, 44.0};
  }
}

// The factor of the time of a key that lies in a cache; an estimate by the instructions.
constexpr double kLookUps = 1.08;

// How many blocks of a tile shape an SM holds.
inline std::int64_t resident_blocks(const TileConfig& config, const DeviceInfo& device,
                                    int head_dim_tile, int variant) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  if (config.smem_bytes > device.max_smem_per_block) return 0;
  const std::int64_t by_smem = device.smem_per_sm / (config.smem_bytes + kReservedSmem);
  return std::min<std::int64_t>(by_smem, blocks_per_sm(head_dim_tile, variant));
}

// The factor by which a variant is slower on a device, beside what tensor cores take, than on those
// that it is for. Its size is a guess.
inline double handicap(const DeviceInfo& device, int variant) {
  constexpr double kHandicap = 2.0;
  // Before compute capability 9.0 an arrival at an mbarrier costs a fence and an atomic, which the
  // tensor cores of 8.9 leave time for, by the model.
  const bool mbarriers_cost = device.compute_major < 9 && device.compute_minor != 9;
  // Where tensor cores are slow, they bound every shape and have no idle time to lose.
  const bool slow_tensor_cores = cost::tensor_rate(device) < cost::kH200Rate;
  if (variant == kPipelined) return mbarriers_cost ? kHandicap : 1.0;
  return variant == kPersistent && slow_tensor_cores ? kHandicap : 1.0;
}

// Nanoseconds that a problem takes on a tile shape; infinite where the shape does not fit.
inline double predicted_ns(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                           int variant, int packed_heads) {
  const TileConfig config = tile_config(head_dim_tile, variant);
  const double resident =
      static_cast<double>(resident_blocks(config, device, head_dim_tile, variant));
  if (resident == 0) return std::numeric_limits<double>::infinity();
  const cost::Speed measured = speed(p, head_dim_tile, variant);
  // Where tensor cores are slower than an H200's, a block that is alone on its SM waits for them so
  // much longer, and they bound a full SM. Small shapes have somewhat more work beside the
  // products: by the model of Ada (research/ADA.md).
  const bool wide = variant != kNarrow && !splits_keys(variant);
  const double of_narrow = head_dim_tile <= 64 ? 1.095 : 1.12;
  const double tensor_bound = wide ? 1.08 : variant == kNarrow ? of_narrow : 1.2;
  const double products = 4.0 * head_dim_tile * config.block_m;  // operations per key
  // To look up rows takes instructions, which an H200's tensor cores wait for.
  const double look_ups = is_cache(p) ? kLookUps : 1.0;
  const double tensor = products / cost::tensor_rate(device);
  const double alone =
      look_ups * measured.alone + std::max(tensor - products / cost::kH200Rate, 0.0);
  const double busy = std::max(look_ups * measured.busy, tensor_bound * tensor);
  const cost::Walk walk = cost::walk(p, config.block_m, packed_heads);
  const cost::Speed speed_here = {measured.fixed, alone, busy};
  return handicap(device, variant) * cost::rounds_ns(walk, speed_here, device.num_sms, resident);
}

// Measured over predicted times, medians of h200-choices.json. They count between families alone:
// the choice between variants was measured with Speed as it is.
inline double correction(int head_dim_tile, int variant) {
  switch (variant) {
    case kGeneral:
      return 1.0;
    case kSplit:
      return head_dim_tile <= 64 ? 1.12 : head_dim_tile <= 96 ? 0.8 : 0.97;
    case kSinglePass:
      return 0.95;
    case kPersistent:
      return head_dim_tile <= 64 ? 1.08 : head_dim_tile <= 192 ? 1.13 : 1.03;
    default:
      if (head_dim_tile <= 96) return 1.14;
      return head_dim_tile <= 128 ? 1.28 : head_dim_tile <= 192 ? 1.08 : 1.0;
  }
}

// Where memory bounds, as with few queries: keys come at nearly its rate, if there are blocks
// enough, and else as fast as a block has them on their way, measured on an H200 with cold keys.
inline double least_ns(const AttentionParams& p, const DeviceInfo& device, std::int64_t grid) {
  constexpr double kBlockRate = 41.0;  // bytes a nanosecond
  const double bytes = cost::keys_ns(p, device) * cost::memory_rate(device);
  const double blocks = std::max(static_cast<double>(grid), 1.0);
  return std::max(cost::kBehindMemory * cost::keys_ns(p, device), bytes / (kBlockRate * blocks));
}

}  // namespace dlattn::wmma
