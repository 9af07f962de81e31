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
#include "cuda/forward/wmma/times.h"
#include "cuda/forward/wmma/traits.h"
#include "cuda/plan/cost.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/plan/tensor_refusal.h"
#include "cuda/tile/accumulation_limits.h"

namespace dlattn::wmma {
namespace {

using core::concat;
using core::refuse;

// Which variants Options::variant admits.
struct Request {
  enum class Packing { kAny, kPacked, kUnpacked };
  static constexpr int kAnyVariant = -1;

  int variant = kAnyVariant;
  Packing packing = Packing::kAny;

  bool names_variant() const { return variant != kAnyVariant; }
};

// A way to run a problem, and the time that it is predicted to take. It is infinite for none.
struct Candidate {
  int variant = 0;
  int packed_heads = 1;
  double ns = std::numeric_limits<double>::infinity();
};

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

std::string accepted_variants() {
  std::string names;
  for (const char* name : kVariantNames) names += std::string(name) + ", ";
  return names + "packed, unpacked, or one of each as in narrow+packed";
}

// Whether a problem is one for the kernels without score modification, whose copies are of 16
// bytes.
bool is_fast(const AttentionParams& p, int copy_bytes, std::string* why) {
  if (const char* feature = core::score_feature(p))
    return refuse(why, "does not implement ", feature);
  if (p.head_dim % 8 != 0)
    return refuse(why, "head_dim is ", p.head_dim, "; accepted: multiples of 8");
  if (p.head_dim_v % 8 != 0)
    return refuse(why, "head_dim of v is ", p.head_dim_v, "; accepted: multiples of 8");
  if (copy_bytes == 16) return true;
  return refuse(why, "rows of q, k and v are aligned to ", copy_bytes, " bytes; accepted: 16");
}

// Whether the kernels that divide keys among a block's warps serve a problem.
bool can_split(const AttentionParams& p, int head_dim_tile, int variant, std::string* why) {
  if (!split_offsets_fit(p)) return refuse(why, "q, k or v spans 32 GiB or more; accepted: less");
  if (variant != kSinglePass) return true;
  if (p.cu_seqlens_q) return refuse(why, "does not implement cu_seqlens_q");
  const std::int64_t most = single_pass_keys(split_shape(head_dim_tile, true));
  return p.seqlen_k <= most || refuse(why, "seqlen_k is ", p.seqlen_k, "; accepted: up to ", most);
}

// Whether TMA loads a problem's tiles on a device.
bool can_use_tma(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile, int variant,
                 std::string* why) {
  if (device.compute_major < 9) {
    return refuse(why, "needs compute capability 9.0 or later; ", device.name, " has ",
                  device.compute_major, ".", device.compute_minor);
  }
  if (device.code < 90)
    return refuse(why, "needs code for 90 or later, which this build does not have");
  if (p.cu_seqlens_q) return refuse(why, "does not implement cu_seqlens_q");
  const TensorBoxes boxes = tensor_boxes(p, head_dim_tile, variant);
  for (const cuda::TensorBox* box : {&boxes.q, &boxes.k, &boxes.v}) {
    const std::string tma_refusal = cuda::tma_refusal(*box);
    if (!tma_refusal.empty()) return refuse(why, tma_refusal);
  }
  // The persistent kernel stores results from registers, 16 bytes at a time alone.
  const int bytes = core::store_bytes(p);
  return bytes == 16 || refuse(why, "rows of out are aligned to ", bytes, " bytes; accepted: 16");
}

// Whether a variant adds up a row's keys accurately (cuda/tile/accumulation_limits.h). For rows of
// more keys general sets accumulators aside, as long as pairs of out's columns are aligned to 4
// bytes.
bool adds_up_keys(const AttentionParams& p, int head_dim_tile, int variant, std::string* why) {
  if (variant == kSinglePass) return true;  // can_split() has refused
  const bool pairs = p.head_dim_v % 2 == 0 && core::store_bytes(p) >= 4;
  if (variant == kGeneral && pairs) return true;
  const std::int64_t groups = variant == kSplit ? split_shape(head_dim_tile, false).key_groups : 1;
  const std::int64_t most = groups * tile::kMostKeys;
  if (p.seqlen_k <= most) return true;
  const char* with =
      variant == kGeneral ? " where pairs of out's columns are not aligned to 4 bytes" : "";
  return refuse(why, "variant ", kVariantNames[variant], ": seqlen_k is ", p.seqlen_k, "; accepted",
                with, ": up to ", most);
}

// The shared memory of a block.
std::int64_t smem_bytes(const AttentionParams& p, int head_dim_tile, int variant) {
  if (variant != kGeneral) return tile_config(head_dim_tile, variant).smem_bytes;
  const int bias_bytes = p.bias.data ? static_cast<int>(size_of(p.bias.dtype)) : 0;
  return general_smem_bytes(head_dim_tile, p.mask.data != nullptr, bias_bytes);
}

// Whether a variant serves a problem of fewer keys, its heads packed or not. `fast`: what is_fast()
// says, whose reason `not_fast` is.
bool serves(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile, int variant,
            bool fast, const std::string& not_fast, std::string* why) {
  const auto refuse_variant = [&](const auto&... reason) {
    return refuse(why, "variant ", kVariantNames[variant], reason...);
  };
  if (is_cache(p) && !reads_caches(head_dim_tile, variant)) {
    return refuse_variant(" does not read keys in a cache: ", core::cache_feature(p), " is given");
  }
  if (!has_variant(head_dim_tile, variant))
    return refuse_variant(" has no instance for this head_dim");
  if (variant != kGeneral && !fast) return refuse_variant(": ", not_fast);
  std::string reason;
  std::string* const text = why ? &reason : nullptr;
  if (splits_keys(variant) && !can_split(p, head_dim_tile, variant, text))
    return refuse_variant(": ", reason);
  if (uses_tma(head_dim_tile, variant) && !can_use_tma(p, device, head_dim_tile, variant, text))
    return refuse_variant(": ", reason);
  return core::has_shared_memory(device, smem_bytes(p, head_dim_tile, variant), why);
}

// Whether the query heads of a KV head can be rows of the same tiles.
bool can_pack(const AttentionParams& p, int variant, std::string* why) {
  if (is_cache(p)) {
    return refuse(why, "packed: does not read keys in a cache: ", core::cache_feature(p),
                  " is given");
  }
  if (group_size(p) == 1)
    return refuse(why, "packed: every query head has a head of k and v to itself");
  if (p.seqlen_q * group_size(p) > core::kMaxSeqlen) {
    return refuse(why, "packed: seqlen_q x heads of a group is ", p.seqlen_q * group_size(p),
                  "; accepted: up to ", core::kMaxSeqlen);
  }
  if (packs_heads(variant) || heads_fold_into_rows(p)) return true;
  return refuse(why, "packed: variant ", kVariantNames[variant],
                " packs heads of one query (seqlen_q = 1) in problems of fixed length, without "
                "sinks and alibi_slopes");
}

// The faster one of a variant that serves a problem, with heads packed or not; none if `request` is
// for packed ones and they cannot be.
Candidate fastest_packing(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                          int variant, const Request& request, bool batch_invariant,
                          std::string* why) {
  using Packing = Request::Packing;
  // The share of the time that packing must be predicted to save. Where it saves none, as with
  // blocks for a few SMs only, it may lose: fewer blocks share the work of storing results. general
  // is slow enough to gain in any case.
  constexpr double kPackingGain = 0.02;
  Candidate best;
  best.variant = variant;
  if (request.packing != Packing::kPacked)
    best.ns = predicted_ns(p, device, head_dim_tile, variant, 1);
  // With batch_invariant bits must not depend on lengths, so lengths must not decide about packing.
  const bool must_pack = request.packing == Packing::kPacked;
  const bool may_pack = must_pack || (request.packing == Packing::kAny && !batch_invariant);
  if (!may_pack || !can_pack(p, variant, must_pack ? why : nullptr)) return best;
  const int group = static_cast<int>(group_size(p));
  const double ns = predicted_ns(p, device, head_dim_tile, variant, group);
  const double gain = variant == kGeneral ? 0.0 : kPackingGain;
  if (ns <= (1.0 - gain) * best.ns) best.packed_heads = group, best.ns = ns;
  return best;
}

// The fastest of all candidates that Options::variant admits; if there is none, `why` says why the
// last one is none.
Candidate fastest(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                  const Request& request, int copy_bytes, bool batch_invariant, std::string* why) {
  std::string not_fast;
  const bool fast = is_fast(p, copy_bytes, why ? &not_fast : nullptr);
  Candidate best;
  const auto consider = [&](int variant) {
    if (!serves(p, device, head_dim_tile, variant, fast, not_fast, why)) return;
    const Candidate candidate =
        fastest_packing(p, device, head_dim_tile, variant, request, batch_invariant, why);
    if (candidate.ns < best.ns) best = candidate;
  };
  if (request.names_variant()) {
    consider(request.variant);
    return best;
  }
  // general serves what the others do not, and is slower than they are.
  if (!fast) {
    consider(kGeneral);
    return best;
  }
  // The last one serves most.
  for (const int variant : {kPersistent, kPipelined, kWide, kSplit, kSinglePass, kNarrow}) {
    // A sequence must give the same bits in a varlen batch, which persistent does not serve.
    if (batch_invariant && variant == kPersistent) continue;
    if (is_cache(p) && !reads_caches(head_dim_tile, variant)) continue;
    consider(variant);
  }
  if (!is_cache(p) && !adds_up_keys(p, head_dim_tile, best.variant, nullptr)) {
    best = Candidate();
    consider(kGeneral);
  }
  return best;
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

bool plan_forward(const AttentionParams& p, const DeviceInfo& device, const Options& options,
                  Plan* plan, std::string* why) {
  const int tile = plan->head_dim_tile;
  Request request;
  if (!parse_request(options.variant, &request))
    return refuse(why, "variant is ", options.variant, "; accepted: ", accepted_variants());
  std::string reason;
  if (is_cache(p) && !is_fast(p, plan->copy_bytes, why ? &reason : nullptr))
    return refuse(why, "with keys in a cache: ", reason);
  if (is_cache(p) && !reads_caches(tile, kNarrow))
    return refuse(why, "has no instance for this head_dim with keys in a cache");

  const Candidate best =
      fastest(p, device, tile, request, plan->copy_bytes, options.batch_invariant, why);
  if (best.ns == std::numeric_limits<double>::infinity()) return false;
  if (!adds_up_keys(p, tile, best.variant, why)) return false;
  TileConfig config = tile_config(tile, best.variant);
  config.smem_bytes = static_cast<int>(smem_bytes(p, tile, best.variant));
  plan->variant = best.variant;
  plan->variant_name = kVariantNames[best.variant];
  plan->packed_heads = best.packed_heads;
  cost::set_tile(p, config, plan);
  plan->grid = grid_of(p, device, tile, best.variant, plan->grid);
  const double ns = best.ns * correction(tile, best.variant);
  plan->predicted_ns = std::max(ns, least_ns(p, device, plan->grid)) * cost::few_rows_of_cache(p);
  return true;
}

}  // namespace

extern const core::ForwardFamily kFamily;
const core::ForwardFamily kFamily = {"wmma",       0,    1,          accepted_variants,
                                     plan_forward, true, request_of, cost::varies_in_caches};

}  // namespace dlattn::wmma
