#pragma once

#include <algorithm>

#include "cuda/plan/cost.h"

// The time of products by mma.sync in backward passes, of an H200.
namespace dlattn::cost {

// The share of what mma.sync reaches by itself.
inline double mma_efficiency(int head_dim_tile) {
  if (head_dim_tile <= 64) return 0.36;
  return head_dim_tile <= 128 ? 0.42 : 0.29;
}

// Nanoseconds of `products` matrix products over all pairs of a query and a key that sees it, by
// `blocks` thread blocks of 8 warps, one per SM.
inline double mma_products_ns(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                              double products, double blocks) {
  constexpr double kFixed = 8000.0;  // a launch, and its first copies and last stores
  constexpr int kRows = 8 * 16;
  const Walk w = walk(p, kRows, 1);
  const double pairs = w.blocks * kRows * w.mean;
  const double sms = std::max(static_cast<double>(device.num_sms), 1.0);
  const double keys = w.mean > 0.0 ? w.longest / w.mean : 0.0;  // of the longest block
  const double longest = pairs / std::max(blocks, 1.0) * keys;
  const double most = busiest_share(w, pairs, blocks, longest, sms);
  // Lanes load numbers of a bias and a mask one by one.
  const double loads = (p.bias.data ? 1.0 : 0.0) + (p.mask.data ? 1.0 : 0.0);
  const double operations = 2.0 * products * head_dim_tile * most * (1.0 + loads);
  return kFixed + operations / (tensor_rate(device) * mma_efficiency(head_dim_tile));
}

}  // namespace dlattn::cost
