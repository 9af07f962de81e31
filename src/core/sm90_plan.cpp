#include "core/sm90_plan.h"

#include <algorithm>

#include "core/backend.h"
#include "core/boxes.h"
#include "core/concat.h"
#include "core/plan.h"
#include "core/registry.h"
#include "core/wmma_plan.h"
#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/sm90/score_params.h"

namespace dlattn::core {
namespace {

constexpr std::int64_t kPackedRows = 128;  // of one of sm90's tiles

// Queries and keys of a sequence; of packed ones, whose lengths the host does not know, on average.
std::int64_t mean(std::int64_t total, const AttentionParams& p) {
  return (total + p.batch_size - 1) / std::max<std::int64_t>(p.batch_size, 1);
}
std::int64_t mean_seqlen_q(const AttentionParams& p) {
  return p.cu_seqlens_q ? mean(p.total_q, p) : p.seqlen_q;
}
std::int64_t mean_seqlen_k(const AttentionParams& p) {
  return p.cu_seqlens_q ? mean(p.total_k, p) : p.seqlen_k;
}

// The most keys that a block of `rows` queries walks.
std::int64_t longest_walk(const AttentionParams& p, std::int64_t rows) {
  const std::int64_t right = p.causal == Causal::kNone ? p.window_right : 0;
  if (p.window_left < 0 || right < 0) return p.seqlen_k;
  return std::min(p.seqlen_k, p.window_left + right + rows);
}

// Whether the query heads of a KV head have so few rows together that wmma, which packs them,
// leaves less of its tiles empty.
bool better_packed(const AttentionParams& p, const DeviceInfo& device) {
  const std::int64_t group = p.num_heads / p.num_heads_kv;
  if (group == 1 || mean_seqlen_q(p) * group > kPackedRows) return false;
  const int tile = head_dim_tile(Kernel::kWmma, p.dtype, std::max(p.head_dim, p.head_dim_v));
  return tile > 0 && choose_wmma(p, device, tile, {}, false).packed_heads > 1;
}

}  // namespace

bool is_sm90(const DeviceInfo& device) {
  return device.compute_major == 9 && device.compute_minor == 0;
}

std::string sm90_device_refusal(const DeviceInfo& device) {
  if (!is_sm90(device)) {
    return concat("sm90: needs compute capability 9.0; ", device.name, " has ",
                  device.compute_major, ".", device.compute_minor);
  }
  return device.sm90_unserved.empty() ? "" : concat("sm90: ", device.sm90_unserved);
}

std::string sm90_tensor_refusal(const AttentionParams& p) {
  const int tile = static_cast<int>(std::max(p.head_dim, p.head_dim_v));
  const sm90::TensorBoxes boxes = sm90::tensor_boxes(p, tile);
  for (const tile::TensorBox* box :
       {&boxes.q, &boxes.k, &boxes.v, &boxes.out, &boxes.bias, &boxes.mask}) {
    const std::string why = misfit(*box);
    if (!why.empty()) return "sm90: " + why;
  }
  return {};
}

TileConfig sm90_tile_config(const AttentionParams& p, int head_dim_tile) {
  const sm90::Terms terms = sm90::terms_of(p);
  TileConfig config =
      sm90::tile_config(head_dim_tile, sm90::head_dim_v_tile(head_dim_tile, p.head_dim_v), terms);
  if (terms == sm90::Terms::kLoaded) config.smem_bytes += sm90::term_bytes(p, head_dim_tile);
  return config;
}

std::string sm90_score_refusal(const AttentionParams& p) {
  const struct {
    const char* name;
    const void* data;
    std::int64_t col_stride;
  } loaded[] = {{"bias", p.bias, p.bias_col_stride}, {"mask", p.mask, p.mask_col_stride}};
  for (const auto& x : loaded) {
    if (x.data && p.seqlen_k > 1 && x.col_stride != 1) {
      return concat("sm90: ", x.name, " has a column stride of ", x.col_stride,
                    " elements; accepted: 1");
    }
  }
  const double cap = p.softcap / p.softmax_scale;
  if (p.softcap != 0.0 && !(cap >= sm90::kLeastCap && cap <= sm90::kLargestCap)) {
    return concat("sm90: softcap / softmax_scale is ", cap, "; accepted: ", sm90::kLeastCap, " to ",
                  sm90::kLargestCap);
  }
  if (p.alibi_slopes && p.softmax_scale < sm90::kLeastScale) {
    return concat("sm90: softmax_scale is ", p.softmax_scale, "; accepted with alibi_slopes: from ",
                  sm90::kLeastScale);
  }
  return {};
}

bool sm90_preferred(const AttentionParams& params, const DeviceInfo& device,
                    const Options& options) {
  if (!is_sm90(device)) return false;
  // What it does to a sequence depends on that alone; what is faster does not.
  // Bias and mask it takes for batches alone.
  if (options.batch_invariant) return !params.bias && !params.mask;
  if (better_packed(params, device)) return false;
  // Its blocks are large, one on an SM: where they leave SMs idle, or most of their rows, smaller
  // ones are faster. How idle is too idle was measured for each tile, on an H200.
  const int head_dim = static_cast<int>(std::max(params.head_dim, params.head_dim_v));
  const std::int64_t rows = sm90::block_m(sm90::tile_shape(params, head_dim));
  const std::int64_t seqlen_q = mean_seqlen_q(params);
  const std::int64_t m_blocks = (seqlen_q + rows - 1) / rows;
  const std::int64_t items = m_blocks * params.num_heads * params.batch_size;
  // Up to half full they are ahead in the widest tile alone, and while each has an SM to itself.
  const bool narrow = head_dim <= 192;
  if (2 * seqlen_q <= m_blocks * rows && (narrow || items > device.num_sms)) return false;
  // Of a tile of keys or less there is nothing to overlap.
  constexpr std::int64_t kFewKeys = 64;
  const bool causal = params.causal != Causal::kNone;
  if (mean_seqlen_k(params) <= kFewKeys && seqlen_q > rows && head_dim > 64 && (narrow || causal))
    return false;
  // With softcap or ALiBi it is twice as fast as wmma on all grids that were measured.
  const bool computed = sm90::terms_of(params) == sm90::Terms::kComputed;
  int least_percent = head_dim <= 64 ? 75 : head_dim <= 128 ? 40 : head_dim <= 192 ? 20 : 5;
  if (computed) least_percent = std::min(least_percent, 15);
  return 100 * items >= least_percent * device.num_sms;
}

std::int64_t sm90_grid(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                       std::int64_t most) {
  // A block that stays for several works hides the next one's first copies and its own set-up: what
  // counts where works are short. It takes a fixed share, though, which the hardware's order of
  // blocks spreads more evenly: what counts where works are long, few, or, under causality, of
  // different lengths, of which a share of few rounds does not have all.
  constexpr std::int64_t kManyRounds = 7;
  const sm90::TileShape shape = sm90::tile_shape(params, head_dim_tile);
  const std::int64_t num_items = sm90::num_items(params, head_dim_tile);
  if (num_items < kManyRounds * device.num_sms || num_items > most) return num_items;
  // One stage of Q is free for the next work only after results that go by way of it.
  if (shape.query_stages == 1 && sm90::terms_of(params) != sm90::Terms::kNone) return num_items;
  const std::int64_t rows = sm90::block_m(shape);
  const std::int64_t walk = longest_walk(params, rows);
  const std::int64_t few_keys = shape.query_stages > 1 ? 1024 : 512;
  const bool short_walk = walk <= few_keys;
  const bool causal = params.causal != Causal::kNone;
  const bool window = walk < params.seqlen_k;
  // A window makes works alike, and causality does not; packed sequences are not in any case.
  if (params.cu_seqlens_q && (window || !causal)) return short_walk ? device.num_sms : num_items;
  if (window) return walk - rows <= few_keys ? device.num_sms : num_items;
  if (!causal) return walk <= 2048 ? device.num_sms : num_items;
  const std::int64_t works_of_head =
      num_items / std::max<std::int64_t>(params.num_heads * params.batch_size, 1);
  const std::int64_t rounds = (num_items + device.num_sms - 1) / device.num_sms;
  return short_walk && rounds >= 2 * works_of_head ? device.num_sms : num_items;
}

}  // namespace dlattn::core
