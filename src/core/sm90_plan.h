#pragma once

#include <cstdint>
#include <string>

#include "cuda/tile/config.h"
#include "dlattn/attention.h"

// What the plan asks about sm90, the family for compute capability 9.0.
namespace dlattn::core {

// Whether the device is one that the family is made for.
bool is_sm90(const DeviceInfo& device);

// Why the family does not run on a CUDA device; empty if it does.
std::string sm90_device_refusal(const DeviceInfo& device);

// Why the copy engine cannot be told of a problem's tensors; empty if it can.
std::string sm90_tensor_refusal(const AttentionParams& params);

// The tile of the instance of `head_dim_tile`.
TileConfig sm90_tile_config(const AttentionParams& params, int head_dim_tile);

// Why the kernels for score terms cannot take a problem's; empty if they can.
std::string sm90_score_refusal(const AttentionParams& params);

// Whether it is the fastest family for a problem that it accepts.
bool sm90_preferred(const AttentionParams& params, const DeviceInfo& device,
                    const Options& options);

// Thread blocks for a problem; as many as it has work items where those are more than `most`.
std::int64_t sm90_grid(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                       std::int64_t most);

}  // namespace dlattn::core
