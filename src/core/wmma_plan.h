#pragma once

#include <cstdint>
#include <string>

#include "dlattn/attention.h"

namespace dlattn::core {

// What of wmma's choices Options::variant asks for.
struct WmmaRequest {
  enum class Packing { kAny, kPacked, kUnpacked };
  static constexpr int kAnyVariant = -1;

  int variant = kAnyVariant;  // src/cuda/forward/wmma/traits.h
  Packing packing = Packing::kAny;
};

// Null asks for nothing. Whether `text` is a request.
bool parse_wmma_request(const char* text, WmmaRequest* request);
// What requests may say, for messages.
std::string accepted_wmma_requests();

// Why wmma cannot run a problem as asked, without the family's name; empty if it can.
std::string wmma_refusal(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                         const WmmaRequest& request);

struct WmmaChoice {
  int variant;
  int packed_heads;
};

// Which of wmma's tile shapes a problem runs on that the family accepts as asked, and whether query
// heads are packed. `head_dim_tile` is the instance's. For `batch_invariant` see Options.
WmmaChoice choose_wmma(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                       const WmmaRequest& request, bool batch_invariant);

// The most keys that a variant adds up right: general sets aside what rows of more have accumulated
// (cuda/tile/span.h), as long as pairs of out's columns are aligned to 4 bytes.
std::int64_t wmma_most_keys(const AttentionParams& params, int head_dim_tile, int variant);

// Thread blocks of a tile shape for so many work items.
std::int64_t wmma_grid(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                       int variant, std::int64_t num_items);

}  // namespace dlattn::core
