// Sizes, strides and enumerations that no caller should give: nothing computed from them overflows.
#include <cstdint>
#include <limits>
#include <string>

#include "check.h"
#include "core/operations/append.h"
#include "core/operations/merge.h"
#include "core/problem/quantized.h"
#include "core/validate/validate.h"
#include "dlattn/attention.h"

using namespace dlattn;

namespace {

// Where tensors would lie, this far apart. Never read: these checks look at addresses only.
char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
constexpr std::int64_t kApart = 1 << 20;
constexpr std::int64_t kHuge = std::int64_t{1} << 62;
constexpr std::int64_t kLargest = std::numeric_limits<std::int64_t>::max();

const std::string kCount = "; accepted: up to 2147483647";
const std::string kLength = "; accepted: up to 1099511627776";
const std::string kProduct = "; accepted: a product of up to 4503599627370496";
const std::string kSpan =
    "; accepted: strides by which the tensor spans up to 1152921504606846976 bytes";
const std::string kNothing = "(nothing thrown)";

template <typename View>
void place(View* view, int n, std::int64_t rows) {
  view->data = reinterpret_cast<decltype(view->data)>(memory + n * kApart);
  view->dtype = DType::kFloat16;
  view->batch_stride = rows * 128, view->row_stride = 128, view->head_stride = 64;
}

AttentionParams attention() {
  AttentionParams p;
  place(&p.q, 0, 3), place(&p.k, 1, 5), place(&p.v, 2, 5), place(&p.out, 3, 3);
  p.batch_size = 2, p.seqlen_q = 3, p.seqlen_k = 5, p.num_heads = 2, p.num_heads_kv = 2;
  p.head_dim = p.head_dim_v = 64;
  p.softmax_scale = 0.125;
  return p;
}
QuantizeParams quantization() {
  QuantizeParams p;
  place(&p.k, 1, 5), place(&p.v, 2, 5);
  p.batch_size = 2, p.seqlen_k = 5, p.num_heads_kv = 2, p.head_dim = p.head_dim_v = 64;
  p.quantized_kv = memory + 4 * kApart;
  return p;
}
MergeParams merging() {
  MergeParams p;
  p.num_states = 2;
  for (int n = 0; n < 2; ++n) {
    place(&p.outs[n], n, 3), place(&p.lses[n], 2 + n, 3);
    p.lses[n].batch_stride = 6, p.lses[n].head_stride = 3, p.lses[n].row_stride = 1;
  }
  place(&p.out, 4, 3), place(&p.lse, 5, 3);
  p.lse.batch_stride = 6, p.lse.head_stride = 3;
  p.batch_size = 2, p.seqlen_q = 3, p.num_heads = 2, p.head_dim_v = 64;
  return p;
}
AppendParams appending() {
  static const std::int32_t lengths[2] = {1, 1};
  AppendParams p;
  place(&p.k, 0, 3), place(&p.v, 1, 3), place(&p.k_cache, 2, 8), place(&p.v_cache, 3, 8);
  p.batch_size = 2, p.seqlen_new = 3, p.num_heads_kv = 2, p.head_dim = p.head_dim_v = 64;
  p.seqused_k = lengths, p.seqlen_k = 8;
  return p;
}

template <typename Params, typename Change>
void refuses(Params p, Change change, const std::string& message) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, message);
}
template <typename Params, typename Change>
void accepts(Params p, Change change) {
  refuses(p, change, kNothing);
}

void sizes_of_attention() {
  const struct {
    const char* name;
    std::int64_t AttentionParams::* size;
    const std::string& most;
  } sizes[] = {{"batch_size", &AttentionParams::batch_size, kCount},
               {"seqlen_q", &AttentionParams::seqlen_q, kLength},
               {"seqlen_k", &AttentionParams::seqlen_k, kLength},
               {"num_heads", &AttentionParams::num_heads, kCount},
               {"num_heads_kv", &AttentionParams::num_heads_kv, kCount},
               {"head_dim", &AttentionParams::head_dim, kCount},
               {"head_dim of v", &AttentionParams::head_dim_v, kCount}};
  for (const auto& size : sizes) {
    for (const std::int64_t value : {kHuge, kLargest}) {
      refuses(
          attention(), [&](auto& p) { p.*size.size = value; },
          std::string(size.name) + " is " + std::to_string(value) + size.most);
    }
  }
  refuses(
      attention(), [](auto& p) { p.batch_size = 1 << 30, p.seqlen_q = 1 << 22; },
      "batch_size x seqlen_q x num_heads is 1073741824 x 4194304 x 2" + kProduct);
  // Nothing is computed, but the product of the other sizes is one.
  refuses(
      attention(),
      [](auto& p) {
        p.batch_size = 0, p.seqlen_k = 1 << 30, p.num_heads = 1 << 30, p.num_heads_kv = 1 << 30;
      },
      "batch_size x seqlen_k x num_heads_kv is 0 x 1073741824 x 1073741824" + kProduct);
  refuses(
      attention(),
      [](auto& p) {
        p.batch_size = p.num_heads = p.num_heads_kv = 1;
        p.seqlen_k = std::int64_t{1} << 40, p.head_dim = 8192;
        p.k.row_stride = 0;
      },
      "k: batch x seqlen x num_heads x head_dim is 1 x 1099511627776 x 1 x 8192" + kProduct);
  accepts(attention(), [](auto& p) {
    p.batch_size = p.num_heads = p.num_heads_kv = 1;
    p.seqlen_k = std::int64_t{1} << 40;
    p.k.row_stride = p.v.row_stride = 0;
  });
}

AttentionParams cached() {
  AttentionParams p = attention();
  static const std::int32_t pages[2] = {};
  p.device.type = DeviceType::kCuda;  // whose lists nobody reads here
  p.page_table.data = pages, p.page_table.batch_stride = 1;
  p.page_size = 8, p.num_pages = 2;
  return p;
}

void sizes_of_caches() {
  accepts(cached(), [](auto&) {});
  refuses(
      cached(), [](auto& p) { p.page_size = kHuge; }, "page_size is 4611686018427387904" + kLength);
  refuses(
      cached(), [](auto& p) { p.num_pages = kLargest; },
      "num_pages is 9223372036854775807" + kLength);
  refuses(
      cached(), [](auto& p) { p.num_pages = p.page_size = std::int64_t{1} << 40; },
      "k: batch x seqlen x num_heads x head_dim is 1099511627776 x 1099511627776 x 2 x 64" +
          kProduct);
  refuses(
      cached(), [](auto& p) { p.page_table.batch_stride = kHuge; },
      "page_table: the stride of dimension batch, of size 2, is 4611686018427387904" + kSpan);
  refuses(
      cached(),
      [](auto& p) {
        p.page_table = {}, p.cache_batch_idx = reinterpret_cast<const std::int32_t*>(memory);
        p.cache_batch_size = kHuge;
      },
      "cache_batch_size is 4611686018427387904" + kLength);
}

template <typename T>
struct Stride {
  const char* name;
  BasicTensorView<T> AttentionParams::* view;
};

// q.batch_stride = 2^62 of float32 is 2^64 bytes; and sums of strides that fit alone do not.
void strides() {
  const auto refused = [](const char* name, const char* dim, int size, std::int64_t stride) {
    return std::string(name) + ": the stride of dimension " + dim + ", of size " +
           std::to_string(size) + ", is " + std::to_string(stride) + kSpan;
  };
  const std::int64_t large = std::int64_t{1} << 58;
  for (const auto& t : {Stride<const void>{"q", &AttentionParams::q},
                        {"k", &AttentionParams::k},
                        {"v", &AttentionParams::v}}) {
    const int rows = t.view == &AttentionParams::q ? 3 : 5;
    for (const std::int64_t stride : {kHuge, kLargest}) {
      refuses(
          attention(), [&](auto& p) { (p.*t.view).batch_stride = stride; },
          refused(t.name, "batch", 2, stride));
      refuses(
          attention(), [&](auto& p) { (p.*t.view).row_stride = stride; },
          refused(t.name, "seqlen", rows, stride));
      refuses(
          attention(), [&](auto& p) { (p.*t.view).head_stride = stride; },
          refused(t.name, "num_heads", 2, stride));
    }
    refuses(
        attention(),
        [&](auto& p) { (p.*t.view).batch_stride = large, (p.*t.view).head_stride = large; },
        refused(t.name, "num_heads", 2, large));
    accepts(attention(), [&](auto& p) { (p.*t.view).batch_stride = large; });
    // The stride of one element is never used.
    accepts(attention(), [&](auto& p) { p.batch_size = 1, (p.*t.view).batch_stride = kLargest; });
  }
  refuses(
      attention(), [](auto& p) { p.out.batch_stride = kHuge; }, refused("out", "batch", 2, kHuge));
  refuses(
      attention(),
      [](auto& p) { place(&p.lse, 4, 3), p.lse.batch_stride = kHuge, p.lse.head_stride = 3; },
      refused("lse", "batch", 2, kHuge));
  refuses(
      attention(), [](auto& p) { place(&p.bias, 4, 3), p.bias.row_stride = kHuge; },
      refused("bias", "seqlen_q", 3, kHuge));
  refuses(
      attention(), [](auto& p) { place(&p.bias, 4, 3), p.bias.col_stride = kLargest; },
      refused("bias", "seqlen_k", 5, kLargest));
  refuses(
      attention(), [](auto& p) { place(&p.mask, 4, 3), p.mask.batch_stride = kHuge; },
      refused("mask", "batch", 2, kHuge));
  refuses(
      attention(),
      [](auto& p) { place(&p.alibi_slopes, 4, 3), p.alibi_slopes.head_stride = kHuge; },
      refused("alibi_slopes", "num_heads", 2, kHuge));
  refuses(
      attention(), [](auto& p) { place(&p.sinks, 4, 3), p.sinks.head_stride = kHuge; },
      refused("sinks", "num_heads", 2, kHuge));
  refuses(
      attention(),
      [](auto& p) {
        p.q.dtype = p.k.dtype = p.v.dtype = DType::kFloat8E4M3, p.out.dtype = DType::kBFloat16;
        place(&p.q_descale, 4, 3), p.q_descale.batch_stride = kHuge;
      },
      refused("q_descale", "batch", 2, kHuge));
}

void quantized() {
  for (const bool varlen : {false, true}) {
    static const std::int32_t offsets[1] = {};
    const auto bytes = [&](auto change) {
      QuantizeParams p = quantization();
      if (varlen) p.cu_seqlens_k = offsets;
      change(p);
      return quantized_kv_bytes(p);
    };
    CHECK_THROWS(bytes([](auto& p) { p.batch_size = kHuge; }), UnsupportedError,
                 "batch_size is 4611686018427387904" + kCount);
    CHECK_THROWS(bytes([](auto& p) { p.seqlen_k = kLargest; }), UnsupportedError,
                 "seqlen_k is 9223372036854775807" + kLength);
    CHECK_THROWS(bytes([](auto& p) { p.total_k = kLargest; }), UnsupportedError,
                 "total_k is 9223372036854775807" + kCount);
    CHECK_THROWS(bytes([](auto& p) { p.num_heads_kv = p.seqlen_k = std::int64_t{1} << 30; }),
                 UnsupportedError,
                 "batch_size x seqlen_k x num_heads_kv is 2 x 1073741824 x 1073741824" + kProduct);
    CHECK_THROWS(bytes([](auto& p) { p.num_heads_kv = p.total_k = (std::int64_t{1} << 31) - 1; }),
                 UnsupportedError, "total_k x num_heads_kv is 2147483647 x 2147483647" + kProduct);
    // The most that is accepted: as an exact number, and no part of it wraps.
    for (const Precision precision : {Precision::kInt8Fp8, Precision::kInt8Fp16, Precision::kFp8}) {
      const std::int64_t count = bytes([&](auto& p) {
        p.precision = precision, p.batch_size = 1, p.head_dim = p.head_dim_v = 128;
        p.num_heads_kv = 1 << 21, p.seqlen_k = p.total_k = std::int64_t{1} << 30;
      });
      CHECK(count > (std::int64_t{1} << 58) && count < (std::int64_t{1} << 61));
    }
  }
  refuses(
      quantization(), [](auto& p) { p.k.row_stride = kHuge; },
      "k: the stride of dimension seqlen, of size 5, is 4611686018427387904" + kSpan);
  accepts(quantization(), [](auto&) {});
}

void merges() {
  accepts(merging(), [](auto&) {});
  refuses(
      merging(), [](auto& p) { p.batch_size = kHuge; },
      "batch_size is 4611686018427387904" + kCount);
  refuses(
      merging(), [](auto& p) { p.seqlen_q = kLargest; },
      "seqlen_q is 9223372036854775807" + kLength);
  refuses(
      merging(), [](auto& p) { p.seqlen_q = p.num_heads = 1 << 30; },
      "outs: batch x seqlen x num_heads x head_dim is 2 x 1073741824 x 1073741824 x 64" + kProduct);
  const std::string start = ": the stride of dimension batch, of size 2, is 4611686018427387904";
  refuses(merging(), [](auto& p) { p.outs[1].batch_stride = kHuge; }, "outs" + start + kSpan);
  refuses(merging(), [](auto& p) { p.lses[1].batch_stride = kHuge; }, "lses" + start + kSpan);
  refuses(merging(), [](auto& p) { p.out.batch_stride = kHuge; }, "out" + start + kSpan);
  refuses(merging(), [](auto& p) { p.lse.batch_stride = kHuge; }, "lse" + start + kSpan);
}

void appends() {
  accepts(appending(), [](auto&) {});
  refuses(
      appending(), [](auto& p) { p.batch_size = kHuge; },
      "batch_size is 4611686018427387904" + kCount);
  refuses(
      appending(), [](auto& p) { p.seqlen_new = kLargest; },
      "seqlen_new is 9223372036854775807" + kLength);
  refuses(
      appending(), [](auto& p) { p.seqlen_k = kLargest; },
      "seqlen_k is 9223372036854775807" + kLength);
  refuses(
      appending(), [](auto& p) { p.batch_size = 1 << 30, p.seqlen_new = 1 << 30; },
      "batch_size x seqlen_new is 1073741824 x 1073741824" + kProduct);
  const auto with_slots = [](auto& p) {
    p.slots = memory + 5 * kApart, p.page_size = p.num_pages = 8;
  };
  refuses(
      appending(), [&](auto& p) { with_slots(p), p.page_size = kHuge; },
      "page_size is 4611686018427387904" + kLength);
  refuses(
      appending(), [&](auto& p) { with_slots(p), p.page_size = p.num_pages = 1 << 30; },
      "num_pages x page_size is 1073741824 x 1073741824" + kProduct);
  refuses(
      appending(),
      [](auto& p) {
        p.page_table.data = reinterpret_cast<const std::int32_t*>(memory);
        p.page_table.batch_stride = kHuge, p.page_size = p.num_pages = 8;
      },
      "page_table: the stride of dimension batch, of size 2, is 4611686018427387904" + kSpan);
  const std::string start = ": the stride of dimension seqlen, of size ";
  refuses(
      appending(), [](auto& p) { p.k.row_stride = kHuge; },
      "k" + start + "3, is 4611686018427387904" + kSpan);
  refuses(
      appending(), [](auto& p) { p.v_cache.row_stride = kHuge; },
      "v_cache" + start + "8, is 4611686018427387904" + kSpan);
}

// As many parts as a caller asks for, of as many tiles as there are.
void parts_of_tiles() {
  AttentionParams p = attention();
  p.batch_size = p.num_heads_kv = 1, p.num_heads = 1 << 10;
  p.seqlen_q = std::int64_t{1} << 34, p.seqlen_k = std::int64_t{1} << 40;
  p.head_dim_v = 8;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = 0;
  p.q.data = memory + (std::int64_t{1} << 52);
  p.k.data = p.v.data = memory + (std::int64_t{1} << 53);
  p.out.head_stride = 8, p.out.row_stride = 8 << 10;
  Options options;
  options.num_splits = std::numeric_limits<int>::max();
  DeviceInfo cpu = device_info({});
  cpu.num_threads = 2;
  std::string got = kNothing;
  try {
    plan(p, cpu, options);
  } catch (const UnsupportedError& error) {
    got = error.what();
  }
  CHECK_FOR(got.find("num_splits is 2147483647 for ") == 0 &&
                got.find("tiles of queries; accepted: as many as take up to") != got.npos,
            got);
  const Support refused = supported(p, cpu, options);
  CHECK(!refused.ok && refused.reasons.size() == 1 && refused.reasons[0] == got);
  options.num_splits = 1;
  CHECK(plan(p, cpu, options).grid > 0);
  CHECK(supported(p, cpu, options).ok);
  options.num_threads = -1;
  const Support threads = supported(p, cpu, options);
  CHECK(!threads.ok && threads.reasons.size() == 1 &&
        threads.reasons[0] == "num_threads is -1; accepted: 1 to 4096, or 0 for the default");
}

void enumerations() {
  refuses(
      attention(), [](auto& p) { p.causal = static_cast<Causal>(99); },
      "causal is 99; accepted: 0 to 2 (Causal::kNone, kBottomRight, kTopLeft)");
  refuses(
      attention(), [](auto& p) { p.causal = static_cast<Causal>(-1); },
      "causal is -1; accepted: 0 to 2 (Causal::kNone, kBottomRight, kTopLeft)");
  const std::string precisions =
      "precision is 4; accepted: 0 to 3 (Precision::kInputs, kInt8Fp8, kFp8, kInt8Fp16)";
  refuses(attention(), [](auto& p) { p.precision = static_cast<Precision>(4); }, precisions);
  refuses(quantization(), [](auto& p) { p.precision = static_cast<Precision>(4); }, precisions);
  const std::string types = "device type is 2; accepted: 0 to 1 (DeviceType::kCpu, kCuda)";
  const auto set_type = [](auto& p) { p.device.type = static_cast<DeviceType>(2); };
  refuses(attention(), set_type, types);
  refuses(quantization(), set_type, types);
  refuses(merging(), set_type, types);
  refuses(appending(), set_type, types);
  CHECK_THROWS(device_info({static_cast<DeviceType>(2), 0}), UnsupportedError, types);
  CHECK_THROWS(wait_for_stream({static_cast<DeviceType>(2), 0}, nullptr, nullptr), UnsupportedError,
               types);
  const std::string dtypes =
      ": dtype is 6; accepted: 0 to 5 (DType::kFloat16, kBFloat16, kFloat32, kFloat64, "
      "kFloat8E4M3, kInt8)";
  constexpr DType kUnknown = static_cast<DType>(6);
  refuses(
      attention(), [](auto& p) { p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = kUnknown; },
      "q" + dtypes);
  refuses(attention(), [](auto& p) { p.k.dtype = kUnknown; }, "k" + dtypes);
  refuses(attention(), [](auto& p) { p.v.dtype = kUnknown; }, "v" + dtypes);
  refuses(attention(), [](auto& p) { p.out.dtype = kUnknown; }, "out" + dtypes);
  refuses(
      attention(), [](auto& p) { place(&p.bias, 4, 3), p.bias.dtype = kUnknown; }, "bias" + dtypes);
  refuses(
      merging(), [](auto& p) { p.out.dtype = p.outs[0].dtype = p.outs[1].dtype = kUnknown; },
      "out" + dtypes);
  refuses(
      merging(), [](auto& p) { p.out.dtype = p.outs[0].dtype = p.outs[1].dtype = DType::kInt8; },
      "out: dtype is int8; accepted: float16, bfloat16, float32, float64");
  refuses(
      appending(),
      [](auto& p) { p.k.dtype = p.v.dtype = p.k_cache.dtype = p.v_cache.dtype = kUnknown; },
      "k" + dtypes);
  refuses(appending(), [](auto& p) { p.k_cache.dtype = kUnknown; }, "k_cache" + dtypes);
  for (const char* text :
       {to_string(static_cast<DeviceType>(2)), to_string(kUnknown),
        to_string(static_cast<Precision>(4)), to_string(static_cast<Operation>(8))}) {
    CHECK_FOR(std::string(text) == "unknown", text);
  }
}

}  // namespace

int main() {
  sizes_of_attention();
  sizes_of_caches();
  strides();
  quantized();
  merges();
  appends();
  parts_of_tiles();
  enumerations();
  return test::summary();
}
