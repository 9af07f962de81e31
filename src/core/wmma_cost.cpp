#include "core/wmma_cost.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "cuda/tile/config.h"
#include "cuda/wmma/traits.h"

namespace dlattn::core {
namespace {

// A number that grows with the head_dim tile.
struct Linear {
  double base, slope;
  double at(int head_dim_tile) const { return base + slope * head_dim_tile; }
};

// What a block of a variant takes, in microseconds: a fit to the times of grids of 32 to 8192
// blocks on an H200, (1, 8, S, D), (1, 32, S, D) and B S = 16384, S = 128 ... 4096, float16.
struct Costs {
  Linear fixed;   // a block beyond its keys: its start, its first copies, its end
  Linear alone;   // 64 keys of a block that has an SM for itself
  Linear shared;  // 64 keys of a block where blocks enough share an SM
};

Costs costs(int head_dim_tile, int variant) {
  if (variant == wmma::kSplit) return {{2.38, 0.015}, {0.08, 0.0028}, {0.08, 0.0028}};
  if (head_dim_tile > 128) {
    if (variant == wmma::kAhead) return {{-1.3, 0.0344}, {0.0, 0.0111}, {0.0, 0.0111}};
    if (variant == wmma::kWide) return {{-1.3, 0.0297}, {0.0, 0.0127}, {0.0, 0.0127}};
    return {{-1.0, 0.0266}, {0.0, 0.0080}, {0.0, 0.0062}};
  }
  if (variant == wmma::kWide) return {{2.2, 0.0175}, {0.53, 0.0085}, {0.23, 0.0084}};
  return {{1.65, 0.0102}, {0.46, 0.0056}, {0.14, 0.0052}};
}

constexpr double kLaunch = 0.6;  // an empty kernel in a graph on an H200

// Microseconds that the tensor cores of an SM need for 64 keys of a block, at 1.8 GHz.
double tensor_time(const DeviceInfo& device, int block_m, int head_dim_tile) {
  // Floating-point operations per clock, 16-bit with fp32 sums: A100 312 TFLOP/s, L4 and L40S by
  // their datasheets, H200 640 TFLOP/s measured by mma.sync alone.
  const int version = device.compute_major * 10 + device.compute_minor;
  const double rate = version == 80 ? 2048.0 : device.compute_major == 9 ? 2650.0 : 1024.0;
  return 4.0 * block_m * 64 * head_dim_tile / (rate * 1800.0);
}

// The 64 keys' times on a device. Beside the tensor cores the SMs considered are much alike per
// clock; where those are slower, a fifth of what else there is to do is taken not to hide behind
// them: an assumption.
struct BlockTimes {
  double fixed, alone, shared;
  int resident;  // blocks that an SM holds
};

BlockTimes block_times(const DeviceInfo& device, int head_dim_tile, int variant) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  const TileConfig config = wmma::tile_config(head_dim_tile, variant);
  const Costs cost = costs(head_dim_tile, variant);
  DeviceInfo h200;
  h200.compute_major = 9;
  const double tensor = tensor_time(device, config.block_m, head_dim_tile);
  const double tensor_h200 = tensor_time(h200, config.block_m, head_dim_tile);
  const double shared = cost.shared.at(head_dim_tile);
  const int by_registers = variant == wmma::kSplit
                               ? wmma::split_shape(head_dim_tile).blocks_per_sm
                               : wmma::tile_shape(head_dim_tile, variant).blocks_per_sm;
  BlockTimes times;
  times.fixed = cost.fixed.at(head_dim_tile);
  times.alone = cost.alone.at(head_dim_tile) + std::max(tensor - tensor_h200, 0.0);
  times.shared = std::max(shared, tensor + shared / 5);
  times.resident = static_cast<int>(std::min<std::int64_t>(
      by_registers, device.smem_per_sm / (config.smem_bytes + kReservedSmem)));
  if (config.smem_bytes > device.max_smem_per_block) times.resident = 0;
  return times;
}

// How many times 64 keys the blocks of a head see.
class Walks {
 public:
  Walks(const AttentionParams& p, int block_m)
      : rows_(static_cast<double>(p.seqlen_q)),
        keys_(static_cast<double>(p.seqlen_k)),
        block_m_(block_m),
        shift_(p.causal == Causal::kTopLeft ? 0.0 : keys_ - rows_),
        left_(p.window_left < 0 ? keys_ + rows_ : static_cast<double>(p.window_left)),
        right_(p.causal != Causal::kNone ? 0.0
               : p.window_right < 0      ? keys_ + rows_
                                         : static_cast<double>(p.window_right)) {}

  // Of the block at `place`, from 0 for the first rows to 1 for the last.
  double at(double place) const {
    const double first = place * std::max(rows_ - block_m_, 0.0);
    const double last = std::min(first + block_m_, rows_) - 1;
    const double begin = std::max(first + shift_ - left_, 0.0);
    const double end = std::min(last + shift_ + right_ + 1, keys_);
    return std::max(end - begin, 0.0) / 64;
  }
  double average() const {
    constexpr int kSamples = 8;
    double sum = 0.0;
    for (int i = 0; i < kSamples; ++i) sum += at((i + 0.5) / kSamples);
    return sum / kSamples;
  }

 private:
  double rows_, keys_, block_m_, shift_, left_, right_;
};

}  // namespace

double wmma_cost(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                 int variant) {
  const BlockTimes times = block_times(device, head_dim_tile, variant);
  if (times.resident < 1) return std::numeric_limits<double>::infinity();
  const int block_m = wmma::tile_config(head_dim_tile, variant).block_m;
  const std::int64_t m_blocks = (p.seqlen_q + block_m - 1) / block_m;
  const double blocks = static_cast<double>(m_blocks) * static_cast<double>(p.num_heads) *
                        static_cast<double>(p.batch_size);
  const double sms = std::max(device.num_sms, 1);
  const bool longest_first = p.causal != Causal::kNone;
  const Walks walks(p, block_m);
  // 64 keys of each of `count` blocks that run side by side.
  const auto side_by_side = [&](int count) { return std::max(times.alone, count * times.shared); };

  const double busiest = std::ceil(blocks / sms);  // blocks of the busiest SM
  if (busiest <= times.resident) {
    // All of them run from the start, the shorter ones for a part of the time.
    double time = kLaunch + times.fixed;
    const int count = static_cast<int>(busiest);
    const auto walk = [&](int i) {  // of the SM's i-th longest
      return longest_first ? walks.at(1.0 - std::min(i * sms / blocks, 1.0)) : walks.average();
    };
    for (int i = 0; i < count; ++i) {
      const double longer = walk(i) - (i + 1 < count ? walk(i + 1) : 0.0);
      time += std::max(longer, 0.0) * side_by_side(i + 1);
    }
    return time;
  }
  if (longest_first) {  // the short ones at the end fill what is left of every SM
    const double waves = blocks / sms / times.resident;
    return kLaunch +
           std::max(waves * (times.fixed + walks.average() * side_by_side(times.resident)),
                    times.fixed + walks.at(1.0) * times.alone);
  }
  const double waves = std::floor(busiest / times.resident);
  const int rest = static_cast<int>(busiest - waves * times.resident);
  double time = kLaunch + waves * (times.fixed + walks.average() * side_by_side(times.resident));
  if (rest > 0) time += times.fixed + walks.average() * side_by_side(rest);
  return time;
}

}  // namespace dlattn::core
