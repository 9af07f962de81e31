#include "core/wmma_plan.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <string_view>

#include "core/boxes.h"
#include "core/concat.h"
#include "core/plan.h"
#include "cuda/forward/wmma/boxes.h"
#include "cuda/forward/wmma/packing.h"
#include "cuda/forward/wmma/split_params.h"
#include "cuda/forward/wmma/traits.h"
#include "cuda/tile/span.h"

namespace dlattn::core {
namespace {

// What a tile shape takes, in nanoseconds, measured on an H200 (benchmarks/results: small grids,
// and batches that fill it), a block per SM and as many as fit.
struct Speed {
  double fixed;  // of a block beside its walk: launch, first copies, epilogue
  double alone;  // per key, a block that has its SM to itself: latencies
  double busy;   // per key and block, blocks that fill their SM
};

Speed speed(int head_dim_tile, int variant) {
  switch (variant) {
    case wmma::kWide:
      if (head_dim_tile <= 32) return {3400, 12.5, 9.5};
      if (head_dim_tile <= 64) return {4200, 15.1, 11.9};
      if (head_dim_tile <= 96) return {4500, 22.0, 16.5};
      if (head_dim_tile <= 128) return {5000, 25.1, 20.3};
      if (head_dim_tile <= 192) return {6000, 36.0, 36.0};
      return {6900, 50.6, 50.0};
    case wmma::kNarrow:
      if (head_dim_tile <= 32) return {3000, 9.1, 5.6};
      if (head_dim_tile <= 64) return {3100, 10.1, 6.9};
      if (head_dim_tile <= 96) return {3400, 16.3, 11.5};
      if (head_dim_tile <= 128) return {3500, 18.1, 12.5};
      if (head_dim_tile <= 192) return {4900, 24.0, 18.0};
      return {8300, 33.0, 24.8};
    case wmma::kSplit:
      if (head_dim_tile <= 32) return {2600, 5.2, 3.0};
      if (head_dim_tile <= 64) return {2700, 4.9, 4.1};
      if (head_dim_tile <= 96) return {3200, 10.1, 8.5};
      return {3400, 8.8, 8.3};
    case wmma::kWhole:
      return {2800, 4.0, 4.0};
    case wmma::kBulk:
      // Of a block's diagonal its warps leave out more than the walk below takes them to.
      if (head_dim_tile <= 64) return {2900, 22.1, 22.1};
      if (head_dim_tile <= 96) return {3200, 29.5, 29.5};
      if (head_dim_tile <= 128) return {3300, 37.5, 37.5};
      return head_dim_tile <= 192 ? Speed{4000, 28.0, 28.0} : Speed{4700, 43.2, 43.2};
    default:  // kAhead
      return head_dim_tile <= 192 ? Speed{7300, 31.0, 31.0} : Speed{8400, 43.5, 44.0};
  }
}

constexpr double kH200Rate = 4850.0;

// Products of mma.sync per SM, in operations per nanosecond, by data sheet but for the H200, where
// it was measured. Of devices of one compute capability the rates differ by up to two; on the slow
// ones of 8.6 and later the tensor cores bound every shape, which compare alike then.
double matrix_rate(const DeviceInfo& device) {
  if (device.compute_major == 9) return kH200Rate;
  return device.compute_major == 8 && device.compute_minor == 0 ? 2889.0 : 1700.0;
}

// How many blocks of a tile shape an SM holds.
std::int64_t blocks_per_sm(const TileConfig& config, const DeviceInfo& device, int head_dim_tile,
                           int variant) {
  constexpr std::int64_t kReservedSmem = 1024;  // bytes per block that CUDA takes for itself
  if (config.smem_bytes > device.max_smem_per_block) return 0;
  const std::int64_t by_smem = device.smem_per_sm / (config.smem_bytes + kReservedSmem);
  return std::min<std::int64_t>(by_smem, wmma::blocks_per_sm(head_dim_tile, variant));
}

// Blocks of a problem, and the keys that they walk: on average, and the longest.
struct Walk {
  double blocks, mean, longest;
};

Walk walk(const AttentionParams& p, int block_m, int packed_heads) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const double batch = static_cast<double>(std::max<std::int64_t>(p.batch_size, 1));
  const double queries = varlen ? p.total_q / batch : static_cast<double>(p.seqlen_q);
  const double keys = varlen ? p.total_k / batch : static_cast<double>(p.seqlen_k);
  const double longest = static_cast<double>(p.seqlen_k);
  const double heads = static_cast<double>(p.num_heads / packed_heads);
  const double block_queries = static_cast<double>(block_m) / packed_heads;
  Walk walk;
  walk.blocks = std::ceil(std::max(queries, 1.0) / block_queries) * heads * batch;
  walk.mean = keys, walk.longest = longest;
  const bool causal = p.causal != Causal::kNone;
  if (causal) {
    // The last query sees all keys, the first as many fewer as there are queries; a block walks
    // those of its last one.
    const double first = std::max(keys - queries, 0.0);
    walk.mean = std::min(keys, (first + keys) / 2 + block_queries / 2);
  }
  const std::int64_t right = causal ? 0 : p.window_right;
  if (p.window_left >= 0 && right >= 0) {
    const double span = static_cast<double>(p.window_left + right + 1) + block_queries;
    walk.mean = std::min(walk.mean, span), walk.longest = std::min(walk.longest, span);
  }
  return walk;
}

// Nanoseconds that a problem takes on a tile shape: the busiest SM works its blocks off in rounds
// of as many as it holds. Per key a round takes what a block alone does, or what all of them need
// of the SM. Infinite where the shape does not fit.
double predicted_time(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                      const WmmaChoice& choice) {
  const int variant = choice.variant;
  const TileConfig config = wmma::tile_config(head_dim_tile, variant);
  const double resident =
      static_cast<double>(blocks_per_sm(config, device, head_dim_tile, variant));
  if (resident == 0) return std::numeric_limits<double>::infinity();
  const Speed measured = speed(head_dim_tile, variant);
  // Where tensor cores are slower than an H200's, a block alone waits for them so much longer, and
  // they bound a full SM, on small shapes with somewhat more beside the products.
  const bool wide = variant == wmma::kWide || variant == wmma::kAhead || variant == wmma::kBulk;
  const double tensor_bound = wide ? 1.08 : variant == wmma::kNarrow ? 1.12 : 1.2;
  const double products = 4.0 * head_dim_tile * config.block_m;  // operations per key
  const double tensor = products / matrix_rate(device);
  const double alone = measured.alone + std::max(tensor - products / kH200Rate, 0.0);
  const double busy = std::max(measured.busy, tensor_bound * tensor);
  const auto per_key = [&](double blocks) { return std::max(alone, blocks * busy); };

  const Walk w = walk(p, config.block_m, choice.packed_heads);
  const double sms = device.num_sms > 0 ? device.num_sms : 1;
  const double on_busiest = std::ceil(w.blocks / sms);
  if (on_busiest <= resident) {  // the longest block goes on alone
    return measured.fixed + w.mean * per_key(on_busiest) + (w.longest - w.mean) * alone;
  }
  const double rounds = std::floor(on_busiest / resident);
  const double rest = on_busiest - rounds * resident;
  return std::ceil(on_busiest / resident) * measured.fixed +
         w.mean * (rounds * per_key(resident) + (rest > 0 ? per_key(rest) : 0.0));
}

// What Options::batch_invariant has the plan chosen for: rows enough to fill any device, of heads
// like the problem's. Nothing in its sizes depends on what else is in the batch.
AttentionParams large_batch_of(const AttentionParams& p) {
  AttentionParams large = p;
  large.batch_size = 1024;
  large.seqlen_q = large.seqlen_k = 4096;
  large.num_heads = p.num_heads / p.num_heads_kv;
  large.num_heads_kv = 1;
  large.cu_seqlens_q = large.cu_seqlens_k = large.seqused_k = nullptr;
  return large;
}

// Why the kernels without score terms, whose copies are of 16 bytes, do not serve a problem; empty
// if they do.
std::string fast_refusal(const AttentionParams& p) {
  const auto head_dim_text = [](const char* name, std::int64_t head_dim) {
    return std::string(name) + " is " + std::to_string(head_dim) + "; accepted: multiples of 8";
  };
  if (const char* feature = score_feature(p)) return std::string("does not implement ") + feature;
  if (p.head_dim % 8 != 0) return head_dim_text("head_dim", p.head_dim);
  if (p.head_dim_v % 8 != 0) return head_dim_text("head_dim of v", p.head_dim_v);
  const int bytes = copy_bytes(p);
  if (bytes == 16) return {};
  return "rows of q, k and v are aligned to " + std::to_string(bytes) + " bytes; accepted: 16";
}

// Why the kernels that divide keys among a block's warps do not serve a problem that the fast ones
// serve; empty if they do.
std::string split_refusal(const AttentionParams& p, int head_dim_tile, int variant) {
  if (!wmma::split_offsets_fit(p)) return "q, k or v spans 32 GiB or more; accepted: less";
  if (variant != wmma::kWhole) return {};
  if (p.cu_seqlens_q) return "does not implement cu_seqlens_q";
  const std::int64_t most = wmma::whole_keys(wmma::split_shape(head_dim_tile, true));
  if (p.seqlen_k <= most) return {};
  return "seqlen_k is " + std::to_string(p.seqlen_k) + "; accepted: up to " + std::to_string(most);
}

// Why the copy engine does not bring a problem's tiles on a device; empty if it does.
std::string copy_engine_refusal(const AttentionParams& p, const DeviceInfo& device,
                                int head_dim_tile, int variant) {
  if (device.compute_major < 9) {
    return concat("needs compute capability 9.0 or later; ", device.name, " has ",
                  device.compute_major, ".", device.compute_minor);
  }
  if (!device.copy_engine_unserved.empty()) return device.copy_engine_unserved;
  if (p.cu_seqlens_q) return "does not implement cu_seqlens_q";
  const wmma::TensorBoxes boxes = wmma::tensor_boxes(p, head_dim_tile, variant);
  for (const tile::TensorBox* box : {&boxes.q, &boxes.k, &boxes.v}) {
    const std::string why = misfit(*box);
    if (!why.empty()) return why;
  }
  // Its results do not go through shared memory, and so by 16 bytes alone.
  const int bytes = store_bytes(p);
  if (bytes == 16) return {};
  return concat("rows of out are aligned to ", bytes, " bytes; accepted: 16");
}

// Why the query heads of a KV head cannot be rows of the same tiles; empty if they can.
std::string packing_refusal(const AttentionParams& p, int variant) {
  if (wmma::group_size(p) == 1) return "every query head has a head of k and v to itself";
  if (p.seqlen_q * wmma::group_size(p) > kMaxSeqlen) {
    return "seqlen_q x heads of a group is " + std::to_string(p.seqlen_q * wmma::group_size(p)) +
           "; accepted: up to " + std::to_string(kMaxSeqlen);
  }
  if (!wmma::packs_heads(variant) && !wmma::heads_fold_into_rows(p)) {
    return std::string("variant ") + wmma::kVariantNames[variant] +
           " packs heads of one query (seqlen_q = 1) in problems of fixed length, without sinks "
           "and alibi_slopes";
  }
  return {};
}

// The share of its time that packing must be predicted to save. Where it saves none, as with blocks
// for but a few SMs, it may lose: fewer blocks then share the work of storing results.
constexpr double kPackingGain = 0.02;

// Where tensor cores are slow, they bound every shape and have no idle time to lose.
bool bulk_pays(const DeviceInfo& device) {
  return matrix_rate(device) >= kH200Rate;
}

// Whether warps of a large block hand over better by mbarriers. Before compute capability 9.0 an
// arrival costs a fence and an atomic, which the tensor cores of 8.9 leave time for, by the model.
bool mbarriers_pay(const DeviceInfo& device) {
  return device.compute_major >= 9 || (device.compute_major == 8 && device.compute_minor == 9);
}

}  // namespace

bool parse_wmma_request(const char* text, WmmaRequest* request) {
  *request = {};
  if (!text) return true;
  const std::string_view all = text;
  const std::size_t plus = all.find('+');
  const std::string_view first = all.substr(0, plus);
  const auto set_packing = [request](std::string_view word) {
    if (word == "packed") request->packing = WmmaRequest::Packing::kPacked;
    if (word == "unpacked") request->packing = WmmaRequest::Packing::kUnpacked;
    return request->packing != WmmaRequest::Packing::kAny;
  };
  for (int i = 0; i < wmma::kNumVariants; ++i) {
    if (first == wmma::kVariantNames[i]) request->variant = i;
  }
  if (request->variant == WmmaRequest::kAnyVariant)
    return plus == std::string_view::npos && set_packing(first);
  return plus == std::string_view::npos || set_packing(all.substr(plus + 1));
}

std::string accepted_wmma_requests() {
  std::string names;
  for (const char* name : wmma::kVariantNames) names += std::string(name) + ", ";
  return names + "packed, unpacked, or one of each as in narrow+packed";
}

// The general kernel takes what the others do not serve, of those the one that is predicted to be
// the fastest, and more keys than that one accepts.
WmmaChoice choose_wmma(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                       const WmmaRequest& request, bool batch_invariant) {
  using Packing = WmmaRequest::Packing;
  const AttentionParams p = batch_invariant ? large_batch_of(params) : params;
  const int group = static_cast<int>(wmma::group_size(params));
  const bool must_pack = request.packing == Packing::kPacked;
  // Lengths must not decide whether heads are packed where bits must not depend on them.
  const auto may_pack = [&](int variant) {
    const bool wanted =
        must_pack || (request.packing == Packing::kAny && group > 1 && !batch_invariant);
    return wanted && packing_refusal(params, variant).empty();
  };
  if (request.variant == wmma::kGeneral || !fast_refusal(params).empty())
    return {wmma::kGeneral, may_pack(wmma::kGeneral) ? group : 1};

  const bool any = request.variant == WmmaRequest::kAnyVariant;
  // The one that needs least shared memory.
  WmmaChoice best = {any ? wmma::kNarrow : request.variant, must_pack ? group : 1};
  double least = std::numeric_limits<double>::infinity();
  for (const int variant :
       {wmma::kBulk, wmma::kAhead, wmma::kWide, wmma::kNarrow, wmma::kSplit, wmma::kWhole}) {
    if (!wmma::has_variant(head_dim_tile, variant) || (!any && variant != request.variant))
      continue;
    if (any && variant == wmma::kAhead && !mbarriers_pay(device)) continue;
    // With batch_invariant a sequence of a pack, which bulk does not serve, gives the bits that it
    // gives alone.
    if (any && variant == wmma::kBulk &&
        (batch_invariant || !bulk_pays(device) ||
         !copy_engine_refusal(params, device, head_dim_tile, variant).empty()))
      continue;
    if (any && wmma::splits_keys(variant) && !split_refusal(params, head_dim_tile, variant).empty())
      continue;
    if (must_pack && !may_pack(variant)) continue;
    const double unpacked = predicted_time(p, device, head_dim_tile, {variant, 1});
    WmmaChoice choice = {variant, 1};
    double time = unpacked;
    if (may_pack(variant)) {
      const double packed = predicted_time(p, device, head_dim_tile, {variant, group});
      if (must_pack || packed < (1.0 - kPackingGain) * unpacked)
        choice.packed_heads = group, time = packed;
    }
    if (time < least) least = time, best = choice;
  }
  const bool packs = may_pack(wmma::kGeneral);
  if (any && params.seqlen_k > wmma_most_keys(params, head_dim_tile, best.variant) &&
      (packs || !must_pack))
    return {wmma::kGeneral, packs ? group : 1};
  return best;
}

std::int64_t wmma_most_keys(const AttentionParams& p, int head_dim_tile, int variant) {
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  if (variant == wmma::kWhole) return kAny;  // it has refused
  if (variant == wmma::kSplit)
    return wmma::split_shape(head_dim_tile, false).key_groups * tile::kMostKeys;
  const bool pairs = p.head_dim_v % 2 == 0 && store_bytes(p) >= 4;
  return variant == wmma::kGeneral && pairs ? kAny : tile::kMostKeys;
}

// A block that stays for several items hides what is between two of them, most of the time of short
// ones. The hardware's order spreads items of different lengths more evenly than shares do, of
// which under causality each is two items.
std::int64_t wmma_grid(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                       int variant, std::int64_t num_items) {
  // Kernels count items by 32 bits, as grids count blocks.
  if (variant != wmma::kBulk || num_items > std::numeric_limits<std::int32_t>::max())
    return num_items;
  constexpr std::int64_t kShortWalk = 2048;
  const bool causal = p.causal != Causal::kNone;
  if ((causal ? p.seqlen_k / 2 : p.seqlen_k) > kShortWalk) return num_items;
  const TileConfig config = wmma::tile_config(head_dim_tile, variant);
  const std::int64_t blocks =
      blocks_per_sm(config, device, head_dim_tile, variant) * device.num_sms;
  if (blocks == 0 || num_items <= blocks) return num_items;
  if (!causal) return blocks;
  const std::int64_t shares = num_items / 2, rounds = (shares + blocks - 1) / blocks;
  return 10 * shares >= 9 * rounds * blocks ? blocks : num_items;
}

std::string wmma_refusal(const AttentionParams& p, const DeviceInfo& device, int head_dim_tile,
                         const WmmaRequest& request) {
  if (request.packing == WmmaRequest::Packing::kPacked) {
    const bool general = request.variant == wmma::kGeneral || !fast_refusal(p).empty();
    const int variant = general                                       ? wmma::kGeneral
                        : request.variant == WmmaRequest::kAnyVariant ? wmma::kNarrow
                                                                      : request.variant;
    const std::string why = packing_refusal(p, variant);
    if (!why.empty()) return "packed: " + why;
  }
  if (request.variant == WmmaRequest::kAnyVariant) return {};
  const std::string name = std::string("variant ") + wmma::kVariantNames[request.variant];
  if (!wmma::has_variant(head_dim_tile, request.variant))
    return name + " has no instance for this head_dim";
  std::string why = request.variant == wmma::kGeneral ? std::string() : fast_refusal(p);
  if (why.empty() && wmma::splits_keys(request.variant))
    why = split_refusal(p, head_dim_tile, request.variant);
  if (why.empty() && wmma::uses_copy_engine(head_dim_tile, request.variant))
    why = copy_engine_refusal(p, device, head_dim_tile, request.variant);
  return why.empty() ? why : name + ": " + why;
}

}  // namespace dlattn::core
