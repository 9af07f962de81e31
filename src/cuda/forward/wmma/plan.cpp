#include "core/plan/plan.h"

#include <algorithm>
#include <limits>
#include <string>
#include <string_view>

#include "core/plan/family.h"
#include "core/problem/alignment.h"
#include "core/problem/limits.h"
#include "core/util/concat.h"
#include "cuda/forward/wmma/boxes.h"
#include "cuda/forward/wmma/packing.h"
#include "cuda/forward/wmma/split_params.h"
#include "cuda/forward/wmma/traits.h"
#include "cuda/plan/cost.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::wmma {
namespace {

using core::concat;
using core::refuse;
using cost::Speed;

// The choices that Options::variant asks for.
struct Request {
  enum class Packing { kAny, kPacked, kUnpacked };
  static constexpr int kAnyVariant = -1;

  int variant = kAnyVariant;
  Packing packing = Packing::kAny;
};

struct Choice {
  int variant;
  int packed_heads;
  double ns = 0.0;  // predicted
};

// All speeds were measured on an H200: the general kernel's in research/steps/h200-choices.json,
// the others' on small grids and on batches that fill it.
Speed general_speed(const AttentionParams& p, int head_dim_tile) {
  if (p.softcap != 0.0) {
    if (head_dim_tile <= 32) return {6000, 38.0, 20.0};
    if (head_dim_tile <= 64) return {6300, 45.3, 28.4};
    if (head_dim_tile <= 96) return {6800, 48.8, 32.5};
    if (head_dim_tile <= 128) return {7000, 57.0, 39.6};
    return head_dim_tile <= 192 ? Speed{6700, 54.5, 54.5} : Speed{8200, 65.9, 65.9};
  }
  const double bias = p.bias.data ? 1800.0 : 0.0;
  if (head_dim_tile <= 32) return {5800 + bias, 24.0, 12.0};
  if (head_dim_tile <= 64) return {6200 + bias, 27.5, 18.0};
  if (head_dim_tile <= 96) return {6600 + bias, 40.0, 24.5};
  if (head_dim_tile <= 128) return {6900 + bias, 45.0, 29.5};
  return head_dim_tile <= 192 ? Speed{7000 + bias, 45.5, 45.5} : Speed{8000 + bias, 56.0, 56.0};
}

Speed speed(const AttentionParams& p, int head_dim_tile, int variant) {
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
      return head_dim_tile <= 192 ? Speed{4000, 28.0, 28.0} : Speed{4700, 43.2, 43.2};
    case kGeneral:
      return general_speed(p, head_dim_tile);
    default:  // kPipelined
      return head_dim_tile <= 192 ? Speed{7300, 31.0, 31.0} : Speed{8400, 43.5, 44.0};
  }
}

// The factor of the time of a key that lies in a cache; an estimate by the instructions.
constexpr double kLookUps = 1.08;

// How many blocks of a tile shape an SM holds.
std::int64_t resident_blocks(const TileConfig& config, const DeviceInfo& device, int head_dim_tile,
                             int variant) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  if (config.smem_bytes > device.max_smem_per_block) return 0;
  const std::int64_t by_smem = device.smem_per_sm / (config.smem_bytes + kReservedSmem);
  return std::min<std::int64_t>(by_smem, blocks_per_sm(head_dim_tile, variant));
}

// Nanoseconds that a problem takes on a tile shape; infinite where the shape does not fit.
double predicted_ns(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                    const Choice& choice) {
  const int variant = choice.variant;
  const TileConfig config = tile_config(head_dim_tile, variant);
  const double resident =
      static_cast<double>(resident_blocks(config, device, head_dim_tile, variant));
  if (resident == 0) return std::numeric_limits<double>::infinity();
  const Speed measured = speed(p, head_dim_tile, variant);
  // Where tensor cores are slower than an H200's, a block that is alone on its SM waits for them so
  // much longer, and they bound a full SM. Small shapes have somewhat more work beside the
  // products.
  const bool wide = variant != kNarrow && !splits_keys(variant);
  const double tensor_bound = wide ? 1.08 : variant == kNarrow ? 1.12 : 1.2;
  const double products = 4.0 * head_dim_tile * config.block_m;  // operations per key
  // To look up rows takes instructions, which an H200's tensor cores wait for.
  const double look_ups = is_cache(p) ? kLookUps : 1.0;
  const double tensor = products / cost::tensor_rate(device);
  const double alone =
      look_ups * measured.alone + std::max(tensor - products / cost::kH200Rate, 0.0);
  const double busy = std::max(look_ups * measured.busy, tensor_bound * tensor);
  const cost::Walk walk = cost::walk(p, config.block_m, choice.packed_heads);
  return cost::rounds_ns(walk, {measured.fixed, alone, busy}, device.num_sms, resident);
}

// Why the kernels without score modification, whose copies are of 16 bytes, do not serve a problem;
// empty if they do.
std::string fast_refusal(const AttentionParams& p) {
  const auto head_dim_text = [](const char* name, std::int64_t head_dim) {
    return std::string(name) + " is " + std::to_string(head_dim) + "; accepted: multiples of 8";
  };
  if (const char* feature = core::score_feature(p))
    return std::string("does not implement ") + feature;
  if (p.head_dim % 8 != 0) return head_dim_text("head_dim", p.head_dim);
  if (p.head_dim_v % 8 != 0) return head_dim_text("head_dim of v", p.head_dim_v);
  const int bytes = core::copy_bytes(p);
  if (bytes == 16) return {};
  return "rows of q, k and v are aligned to " + std::to_string(bytes) + " bytes; accepted: 16";
}

// Why the kernels that divide keys among a block's warps do not serve a problem that the fast ones
// serve; empty if they do.
std::string split_refusal(const AttentionParams& p, int head_dim_tile, int variant) {
  if (!split_offsets_fit(p)) return "q, k or v spans 32 GiB or more; accepted: less";
  if (variant != kSinglePass) return {};
  if (p.cu_seqlens_q) return "does not implement cu_seqlens_q";
  const std::int64_t most = single_pass_keys(split_shape(head_dim_tile, true));
  if (p.seqlen_k <= most) return {};
  return "seqlen_k is " + std::to_string(p.seqlen_k) + "; accepted: up to " + std::to_string(most);
}

// Why the variant asked for, or every one, does not serve a problem whose keys lie in a cache;
// empty if one does.
std::string cache_refusal(const AttentionParams& p, int head_dim_tile, const Request& request) {
  if (!is_cache(p)) return {};
  const std::string why = fast_refusal(p);
  if (!why.empty()) return "with keys in a cache: " + why;
  if (!reads_caches(head_dim_tile, kNarrow))
    return "has no instance for this head_dim with keys in a cache";
  const bool any = request.variant == Request::kAnyVariant;
  const char* const feature = core::cache_feature(p);
  if (!any && !reads_caches(head_dim_tile, request.variant)) {
    return concat("variant ", kVariantNames[request.variant],
                  " does not read keys in a cache: ", feature, " is given");
  }
  if (request.packing != Request::Packing::kPacked) return {};
  return concat("packed: does not read keys in a cache: ", feature, " is given");
}

// Why TMA does not load a problem's tiles on a device; empty if it does.
std::string tma_refusal(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                        int variant) {
  if (device.compute_major < 9) {
    return concat("needs compute capability 9.0 or later; ", device.name, " has ",
                  device.compute_major, ".", device.compute_minor);
  }
  if (device.code < 90) return "needs code for 90 or later, which this build does not have";
  if (p.cu_seqlens_q) return "does not implement cu_seqlens_q";
  const TensorBoxes boxes = tensor_boxes(p, head_dim_tile, variant);
  for (const cuda::TensorBox* box : {&boxes.q, &boxes.k, &boxes.v}) {
    const std::string why = cuda::tma_refusal(*box);
    if (!why.empty()) return why;
  }
  // The persistent kernel stores results from registers, 16 bytes at a time alone.
  const int bytes = core::store_bytes(p);
  if (bytes == 16) return {};
  return concat("rows of out are aligned to ", bytes, " bytes; accepted: 16");
}

// Why the query heads of a KV head cannot be rows of the same tiles; empty if they can.
std::string packing_refusal(const AttentionParams& p, int variant) {
  if (group_size(p) == 1) return "every query head has a head of k and v to itself";
  if (p.seqlen_q * group_size(p) > core::kMaxSeqlen) {
    return "seqlen_q x heads of a group is " + std::to_string(p.seqlen_q * group_size(p)) +
           "; accepted: up to " + std::to_string(core::kMaxSeqlen);
  }
  if (!packs_heads(variant) && !heads_fold_into_rows(p)) {
    return std::string("variant ") + kVariantNames[variant] +
           " packs heads of one query (seqlen_q = 1) in problems of fixed length, without sinks "
           "and alibi_slopes";
  }
  return {};
}

// The share of the time that packing must be predicted to save. Where it saves none, as with blocks
// for a few SMs only, it may lose: fewer blocks share the work of storing results.
constexpr double kPackingGain = 0.02;

// Where tensor cores are slow, they bound every shape and have no idle time to lose.
bool persistent_pays(const DeviceInfo& device) {
  return cost::tensor_rate(device) >= cost::kH200Rate;
}

// Whether warps of a large block hand over better by mbarriers. Before compute capability 9.0 an
// arrival costs a fence and an atomic, which the tensor cores of 8.9 leave time for, by the model.
bool mbarriers_pay(const DeviceInfo& device) {
  return device.compute_major >= 9 || (device.compute_major == 8 && device.compute_minor == 9);
}

// Parses Options::variant; null asks for nothing. Returns whether `text` is a request.
bool parse_request(const char* text, Request* request) {
  *request = {};
  if (!text) return true;
  const std::string_view all = text;
  const std::size_t plus = all.find('+');
  const std::string_view first = all.substr(0, plus);
  const auto set_packing = [request](std::string_view word) {
    if (word == "packed") request->packing = Request::Packing::kPacked;
    if (word == "unpacked") request->packing = Request::Packing::kUnpacked;
    return request->packing != Request::Packing::kAny;
  };
  for (int i = 0; i < kNumVariants; ++i) {
    if (first == kVariantNames[i]) request->variant = i;
  }
  if (request->variant == Request::kAnyVariant)
    return plus == std::string_view::npos && set_packing(first);
  return plus == std::string_view::npos || set_packing(all.substr(plus + 1));
}

std::string request_of(const Plan& plan) {
  return concat(plan.variant_name, plan.packed_heads > 1 ? "+packed" : "+unpacked");
}

// The most keys that a variant adds up accurately (cuda/tile/accumulation_limits.h). For rows of
// more keys general sets accumulators aside, as long as pairs of out's columns are aligned to 4
// bytes.
std::int64_t most_keys(const AttentionParams& p, int head_dim_tile, int variant) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  if (variant == kSinglePass) return kAny;  // split_refusal() has refused
  if (variant == kSplit) return split_shape(head_dim_tile, false).key_groups * tile::kMostKeys;
  const bool pairs = p.head_dim_v % 2 == 0 && core::store_bytes(p) >= 4;
  return variant == kGeneral && pairs ? kAny : tile::kMostKeys;
}

// Chooses the variant that is predicted to be the fastest; the general kernel for problems that the
// others do not serve, or that have more keys than the chosen one accepts.
Choice choose(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
              const Request& request, bool batch_invariant) {
  using Packing = Request::Packing;
  const int group = static_cast<int>(group_size(p));
  const bool must_pack = request.packing == Packing::kPacked;
  // With batch_invariant bits must not depend on lengths, so lengths must not decide about packing.
  const auto may_pack = [&](int variant) {
    const bool wanted = must_pack || (request.packing == Packing::kAny && group > 1 &&
                                      !batch_invariant && !is_cache(p));
    return wanted && packing_refusal(p, variant).empty();
  };
  const auto general = [&] {
    Choice choice = {kGeneral, may_pack(kGeneral) ? group : 1};
    choice.ns = predicted_ns(p, device, head_dim_tile, choice);
    return choice;
  };
  if (request.variant == kGeneral || !fast_refusal(p).empty()) return general();

  const bool any = request.variant == Request::kAnyVariant;
  // If no variant has a time, the one that needs least shared memory.
  Choice best = {any ? kNarrow : request.variant, must_pack ? group : 1,
                 std::numeric_limits<double>::infinity()};
  for (const int variant : {kPersistent, kPipelined, kWide, kNarrow, kSplit, kSinglePass}) {
    if (!has_variant(head_dim_tile, variant) || (!any && variant != request.variant)) continue;
    if (is_cache(p) && !reads_caches(head_dim_tile, variant)) continue;
    if (any && variant == kPipelined && !mbarriers_pay(device)) continue;
    // With batch_invariant a sequence must give the same bits alone and in a varlen batch, which
    // persistent does not serve.
    if (any && variant == kPersistent &&
        (batch_invariant || !persistent_pays(device) ||
         !tma_refusal(p, device, head_dim_tile, variant).empty()))
      continue;
    if (any && splits_keys(variant) && !split_refusal(p, head_dim_tile, variant).empty()) continue;
    if (must_pack && !may_pack(variant)) continue;
    Choice choice = {variant, 1};
    choice.ns = predicted_ns(p, device, head_dim_tile, choice);
    if (may_pack(variant)) {
      Choice packed = {variant, group};
      packed.ns = predicted_ns(p, device, head_dim_tile, packed);
      if (must_pack || packed.ns < (1.0 - kPackingGain) * choice.ns) choice = packed;
    }
    if (choice.ns < best.ns) best = choice;
  }
  const bool too_many_keys = !is_cache(p) && p.seqlen_k > most_keys(p, head_dim_tile, best.variant);
  return any && too_many_keys && (may_pack(kGeneral) || !must_pack) ? general() : best;
}

// The grid of a plan. Blocks of the persistent kernel take several work tiles each, which hides
// what is between two of them: most of the time of short ones. Blocks with one work tile each, in
// the hardware's order, spread work tiles of different lengths more evenly than equal shares do.
// Under causality a share is a pair of work tiles.
std::int64_t grid_of(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                     int variant, std::int64_t num_tiles) {
  // Kernels count work tiles in 32 bits, as grids count blocks.
  if (variant != kPersistent || num_tiles > core::kMaxGrid) return num_tiles;
  constexpr std::int64_t kShortWalk = 2048;
  const bool causal = p.causal != Causal::kNone;
  if ((causal ? p.seqlen_k / 2 : p.seqlen_k) > kShortWalk) return num_tiles;
  const TileConfig config = tile_config(head_dim_tile, variant);
  const std::int64_t blocks =
      resident_blocks(config, device, head_dim_tile, variant) * device.num_sms;
  if (blocks == 0 || num_tiles <= blocks) return num_tiles;
  if (!causal) return blocks;
  const std::int64_t shares = num_tiles / 2, rounds = (shares + blocks - 1) / blocks;
  return 10 * shares >= 9 * rounds * blocks ? blocks : num_tiles;
}

std::string request_refusal(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                            const Request& request) {
  if (request.packing == Request::Packing::kPacked) {
    const bool general = request.variant == kGeneral || !fast_refusal(p).empty();
    const int variant = general                                   ? kGeneral
                        : request.variant == Request::kAnyVariant ? kNarrow
                                                                  : request.variant;
    const std::string why = packing_refusal(p, variant);
    if (!why.empty()) return "packed: " + why;
  }
  if (request.variant == Request::kAnyVariant) return {};
  const std::string name = std::string("variant ") + kVariantNames[request.variant];
  if (!has_variant(head_dim_tile, request.variant))
    return name + " has no instance for this head_dim";
  std::string why = request.variant == kGeneral ? std::string() : fast_refusal(p);
  if (why.empty() && splits_keys(request.variant))
    why = split_refusal(p, head_dim_tile, request.variant);
  if (why.empty() && uses_tma(head_dim_tile, request.variant))
    why = tma_refusal(p, device, head_dim_tile, request.variant);
  return why.empty() ? why : name + ": " + why;
}

std::string accepted_variants() {
  std::string names;
  for (const char* name : kVariantNames) names += std::string(name) + ", ";
  return names + "packed, unpacked, or one of each as in narrow+packed";
}

// Whether a variant adds up a row's keys accurately.
bool accepts_keys(const AttentionParams& p, const Plan& plan, std::string* why) {
  const std::int64_t most = most_keys(p, plan.head_dim_tile, plan.variant);
  const char* with =
      plan.variant == kGeneral ? " where pairs of out's columns are not aligned to 4 bytes" : "";
  if (p.seqlen_k <= most) return true;
  return refuse(why, "variant ", plan.variant_name, ": seqlen_k is ", p.seqlen_k, "; accepted",
                with, ": up to ", most);
}

// Measured over predicted times, medians of h200-choices.json. They count between families alone:
// the choice between variants was measured with Speed as it is.
double correction(int head_dim_tile, int variant) {
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
double least_ns(const AttentionParams& p, const DeviceInfo& device, std::int64_t grid) {
  constexpr double kMemory = 1.06, kBlockRate = 41.0;  // bytes a nanosecond
  const double bytes = cost::keys_ns(p, device) * cost::memory_rate(device);
  const double blocks = std::max(static_cast<double>(grid), 1.0);
  return std::max(kMemory * cost::keys_ns(p, device), bytes / (kBlockRate * blocks));
}

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile;
  Request request;
  if (!parse_request(options.variant, &request))
    return refuse(why, "variant is ", options.variant, "; accepted: ", accepted_variants());
  if (const char* const feature = cost::feature_of_invariant_cache(p, options))
    return refuse(why, "does not read keys in a cache with batch_invariant: ", feature,
                  " is given");
  std::string refusal = cache_refusal(p, tile, request);
  if (refusal.empty()) refusal = request_refusal(p, device, tile, request);
  if (!refusal.empty()) return refuse(why, refusal);

  const Choice choice = choose(p, device, tile, request, options.batch_invariant);
  TileConfig config = tile_config(tile, choice.variant);
  if (choice.variant == kGeneral) {
    const int bias_bytes = p.bias.data ? static_cast<int>(size_of(p.bias.dtype)) : 0;
    config.smem_bytes = general_smem_bytes(tile, p.mask.data != nullptr, bias_bytes);
  }
  plan->variant = choice.variant;
  plan->variant_name = kVariantNames[choice.variant];
  plan->packed_heads = choice.packed_heads;
  plan->predicted_ns = choice.ns * correction(tile, choice.variant);
  cost::set_tile(p, config, plan);
  plan->grid = grid_of(p, device, tile, choice.variant, plan->grid);
  plan->predicted_ns =
      std::max(plan->predicted_ns, least_ns(p, device, plan->grid)) * cost::few_rows_of_cache(p);
  return accepts_keys(p, *plan, why);
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma",       0,    1,         accepted_variants,
                                     plan_forward, true, request_of};

}  // namespace dlattn::wmma
