// append_kv(): every message of what it refuses, the CPU backend's refusals of values, plans for
// GPUs, and queries that are rotated in place.
#include "dlattn/append.h"

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "check.h"
#include "core/backend.h"
#include "core/operations/append.h"
#include "core/plan/plan.h"
#include "core/validate/validate.h"
#include "devices.h"
#include "dlattn/attention.h"

using namespace dlattn;

namespace {

// Where tensors would lie, this far apart. Never read: validation looks at addresses only.
char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
constexpr std::int64_t kApart = 1 << 20;
float* const floats = reinterpret_cast<float*>(memory + 10 * kApart);
std::int32_t* const ints = reinterpret_cast<std::int32_t*>(memory + 12 * kApart);

const std::string kShared =
    "; accepted: memory of its own, or a slice of the same buffer whose strides show that it has "
    "no element in common";

// 2 sequences of 3 new rows, room for 9 keys each; 2 heads of k and v, 4 of q.
AppendParams good() {
  AppendParams p;
  p.k = {memory, 3 * 16, 16, 8, 1, DType::kFloat32};
  p.v = {memory + kApart, 3 * 16, 16, 8, 1, DType::kFloat32};
  p.k_cache = {memory + 2 * kApart, 9 * 16, 16, 8, 1, DType::kFloat32};
  p.v_cache = {memory + 3 * kApart, 9 * 16, 16, 8, 1, DType::kFloat32};
  p.batch_size = 2, p.seqlen_new = 3, p.num_heads = 4, p.num_heads_kv = 2;
  p.head_dim = p.head_dim_v = 8;
  p.seqlen_k = 9, p.seqused_k = ints;
  return p;
}
AppendParams good_rotary() {
  AppendParams p = good();
  p.rotary_cos = {floats, 0, 4, 0, 1, DType::kFloat32};
  p.rotary_sin = {floats + 1000, 0, 4, 0, 1, DType::kFloat32};
  p.rotary_positions = 9, p.rotary_dim = 8;
  p.q = {memory + 4 * kApart, 3 * 32, 32, 8, 1, DType::kFloat32};
  p.q_out = {memory + 5 * kApart, 3 * 32, 32, 8, 1, DType::kFloat32};
  return p;
}
AppendParams good_paged() {
  AppendParams p = good();
  p.page_table = {ints + 100, 3, 0, 0};
  p.page_size = 3, p.num_pages = 7;
  p.k_cache.batch_stride = p.v_cache.batch_stride = 3 * 16;
  return p;
}
AppendParams good_slots() {
  AppendParams p = good_paged();
  p.page_table = {};
  p.slots = ints + 200, p.seqlen_k = 0, p.seqused_k = nullptr;
  return p;
}
AppendParams good_8_bit() {
  AppendParams p = good();
  p.k_cache.dtype = p.v_cache.dtype = DType::kInt8;
  p.k_descale = {floats, 2, 0, 1}, p.v_descale = {floats + 10, 2, 0, 1};
  return p;
}

template <typename Change>
void refuses(Change change, const std::string& message, AppendParams p = good()) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, message);
  CHECK_THROWS(append_kv(p), UnsupportedError, message);
}

void accepted() {
  for (const AppendParams& p : {good(), good_rotary(), good_paged(), good_slots(), good_8_bit()}) {
    CHECK_THROWS(core::validate(p), UnsupportedError, "(nothing thrown)");
  }
}

void sizes() {
  refuses([](auto& p) { p.batch_size = -1; }, "batch_size is -1; accepted: at least 0");
  refuses([](auto& p) { p.seqlen_new = -2; }, "seqlen_new is -2; accepted: at least 0");
  refuses([](auto& p) { p.num_heads_kv = 0; }, "num_heads_kv is 0; accepted: at least 1");
  refuses([](auto& p) { p.head_dim = 0; }, "head_dim is 0; accepted: at least 1");
  refuses([](auto& p) { p.head_dim_v = 0; }, "head_dim of v is 0; accepted: at least 1");
  refuses([](auto& p) { p.num_heads = 0; }, "num_heads is 0; accepted: at least 1", good_rotary());
  refuses([](auto& p) { p.seqlen_k = -1; }, "seqlen_k is -1; accepted: at least 0");
  refuses([](auto& p) { p.seqlen_new = 10; },
          "seqlen_new is 10; accepted: up to 9, the keys that a sequence has room for");
  refuses([](auto& p) { p.cu_seqlens_q = ints, p.total_new = -1; },
          "total_new is -1; accepted: at least 0");
  refuses([](auto& p) { p.cu_seqlens_q = ints, p.total_new = std::int64_t{1} << 31; },
          "total_new is 2147483648; accepted: up to 2147483647");
  refuses([](auto& p) { p.cu_seqlens_q = ints, p.total_new = 3, p.batch_size = 0; },
          "batch_size is 0, by a cu_seqlens_q of one offset, but k has 3 tokens; accepted: at "
          "least 1 sequence, or a k without tokens");
  refuses([](auto& p) { p.page_size = 0; }, "page_size is 0; accepted: at least 1", good_paged());
  refuses([](auto& p) { p.num_pages = -1; }, "num_pages is -1; accepted: at least 0", good_slots());
  refuses([](auto& p) { p.cache_batch_idx = ints, p.cache_batch_size = -1; },
          "cache_batch_size is -1; accepted: at least 0");
}

void places() {
  refuses([](auto& p) { p.slots = ints; },
          "page_table is given with slots; accepted: one of them, as slots name pages",
          good_paged());
  refuses([](auto& p) { p.cache_batch_idx = ints; },
          "cache_batch_idx is given with page_table; accepted: none, as pages have no entries",
          good_paged());
  refuses([](auto& p) { p.cache_batch_idx = ints; },
          "cache_batch_idx is given with slots; accepted: none, as pages have no entries",
          good_slots());
  refuses([](auto& p) { p.slot_bytes = 2; }, "slot_bytes is 2; accepted: 4 (int32) or 8 (int64)",
          good_slots());
  refuses([](auto& p) { p.seqused_k = nullptr; },
          "seqused_k is null; accepted: the lengths before the call, or slots");
  refuses([](auto& p) { p.page_table.batch_stride = -3; },
          "page_table: the stride of dimension batch is -3; negative strides are not accepted",
          good_paged());
  const auto odd = [](auto*& list) {
    list = reinterpret_cast<std::remove_reference_t<decltype(list)>>(memory + 1);
  };
  const std::string four =
      ": its address is 1 byte(s) past a multiple of 4; accepted: multiples of the element's size";
  refuses([&](auto& p) { odd(p.seqused_k); }, "seqused_k" + four);
  refuses([&](auto& p) { odd(p.cu_seqlens_q); }, "cu_seqlens_q" + four);
  refuses([&](auto& p) { odd(p.cache_batch_idx); }, "cache_batch_idx" + four);
  refuses([&](auto& p) { odd(p.leftpad_k); }, "leftpad_k" + four, good_rotary());
  refuses([&](auto& p) { odd(p.page_table.data); }, "page_table" + four, good_paged());
  refuses([&](auto& p) { p.slots = memory + 4; },
          "slots: its address is 4 byte(s) past a multiple of 8; accepted: multiples of the "
          "element's size",
          good_slots());
}

void rotary() {
  const auto alone = [](const char* name) {
    return std::string(name) + " is given without rotary_cos and rotary_sin; accepted: with both";
  };
  refuses([](auto& p) { p.rotary_cos = p.rotary_sin = {}; }, alone("q"), good_rotary());
  refuses([](auto& p) { p.leftpad_k = ints; }, alone("leftpad_k"));
  refuses([](auto& p) { p.q_fixed_position = true; }, alone("q_fixed_position"));
  refuses([](auto& p) { p.rotary_cos = {}; }, "rotary_cos is null; accepted: both tables or none",
          good_rotary());
  refuses([](auto& p) { p.rotary_sin = {}; }, "rotary_sin is null; accepted: both tables or none",
          good_rotary());
  for (const int dim : {0, 3, 10}) {
    refuses([&](auto& p) { p.rotary_dim = dim; },
            "rotary_dim is " + std::to_string(dim) +
                ", twice the columns of rotary_cos; accepted: even, 2 to head_dim = 8",
            good_rotary());
  }
  refuses([](auto& p) { p.rotary_cos.dtype = DType::kFloat16; },
          "rotary_cos: dtype is float16; accepted: float32, that of k, or float32", good_rotary());
  refuses([](auto& p) { p.rotary_sin.dtype = DType::kFloat16; },
          "rotary_sin: dtype is float16; accepted: float32, that of rotary_cos", good_rotary());
  refuses([](auto& p) { p.rotary_positions = 8; },
          "rotary_cos has 8 rows; accepted: at least 9, the keys that the cache has room for",
          good_rotary());
  refuses([](auto& p) { p.rotary_positions = -1; }, "rotary_positions is -1; accepted: at least 0",
          good_rotary());
  AppendParams slots = good_slots();
  slots.rotary_cos = slots.rotary_sin = good_rotary().rotary_cos;
  slots.rotary_dim = 8, slots.rotary_positions = 2;
  refuses([](auto&) {},
          "rotary_cos is given with slots and without seqused_k; accepted: with seqused_k, which "
          "tells the positions",
          slots);
}

void dtypes() {
  refuses([](auto& p) { p.k.dtype = DType::kFloat8E4M3; },
          "k: dtype is float8_e4m3fn; accepted: float16, bfloat16, float32, float64");
  refuses([](auto& p) { p.v.dtype = DType::kFloat16; },
          "v: dtype is float16; accepted: float32, that of k");
  refuses([](auto& p) { p.q.dtype = DType::kFloat16; },
          "q: dtype is float16; accepted: float32, that of k", good_rotary());
  refuses([](auto& p) { p.q_out.dtype = DType::kFloat16; },
          "q_out: dtype is float16; accepted: float32, that of k", good_rotary());
  refuses([](auto& p) { p.k_cache.dtype = DType::kFloat16; },
          "k_cache: dtype is float16; accepted: float32, that of k, int8 or float8_e4m3fn");
  refuses([](auto& p) { p.v_cache.dtype = DType::kFloat8E4M3; },
          "v_cache: dtype is float8_e4m3fn; accepted: int8, that of k_cache", good_8_bit());
  refuses([](auto& p) { p.k.dtype = p.v.dtype = DType::kFloat64; },
          "k_cache: dtype is int8; accepted: float64, that of k", good_8_bit());
  refuses([](auto& p) { p.k_descale = {}; },
          "k_descale is null with k_cache of int8; accepted: a float32 tensor on its device",
          good_8_bit());
  refuses([](auto& p) { p.v_descale = {}; },
          "v_descale is null with v_cache of int8; accepted: a float32 tensor on its device",
          good_8_bit());
  refuses([](auto& p) { p.v_descale = {floats, 0, 0, 0}; },
          "v_descale is given with v_cache of float32; accepted: none");
  refuses([](auto& p) { p.k_descale.head_stride = -1; },
          "k_descale: a stride is negative; accepted: strides of at least 0", good_8_bit());
  refuses([](auto& p) { p.k_descale.data = reinterpret_cast<float*>(memory + 2); },
          "k_descale: its address is 2 byte(s) past a multiple of 4; accepted: multiples of the "
          "element's size",
          good_8_bit());
}

void memory_of_tensors() {
  for (const char* name : {"k", "v", "k_cache", "v_cache"}) {
    refuses(
        [&](auto& p) {
          const std::string which = name;
          if (which == "k") p.k.data = nullptr;
          if (which == "v") p.v.data = nullptr;
          if (which == "k_cache") p.k_cache.data = nullptr;
          if (which == "v_cache") p.v_cache.data = nullptr;
        },
        std::string(name) + " is null");
  }
  refuses([](auto& p) { p.q_out.data = nullptr; }, "q_out is null", good_rotary());
  refuses([](auto& p) { p.k.row_stride = -16; },
          "k: the stride of dimension seqlen is -16; negative strides are not accepted");
  refuses([](auto& p) { p.v_cache.data = memory + 3 * kApart + 2; },
          "v_cache: its address is 2 byte(s) past a multiple of 4; accepted: multiples of the "
          "element's size");
  refuses(
      [](auto& p) { p.k_cache.batch_stride = 0; },
      "k_cache: a stride of 0 elements makes elements share memory; accepted: at least 8 there");
  refuses([](auto& p) { p.v_cache.row_stride = 8; },
          "v_cache: a stride of 8 elements makes elements share memory; accepted: at least 72 "
          "there");
  refuses([](auto& p) { p.v_cache.data = p.k_cache.data; },
          "k_cache shares memory with v_cache" + kShared);
  refuses([](auto& p) { p.v_cache.data = p.k_cache.data; },
          "k_cache shares memory with v_cache" + kShared, good_paged());
  refuses([](auto& p) { p.v_cache.data = memory + 16; }, "v_cache shares memory with k" + kShared);
  refuses([](auto& p) { p.k_cache.data = memory + kApart; },
          "k_cache shares memory with v" + kShared);
  refuses([](auto& p) { p.k_cache.data = ints; }, "k_cache shares memory with seqused_k" + kShared);
  const auto cache_at = [](const void* where) {
    return [where](auto& p) { p.v_cache.data = const_cast<void*>(where); };
  };
  refuses(cache_at(floats), "v_cache shares memory with rotary_cos" + kShared, good_rotary());
  refuses(cache_at(floats + 1000), "v_cache shares memory with rotary_sin" + kShared,
          good_rotary());
  refuses(cache_at(ints + 100), "v_cache shares memory with page_table" + kShared, good_paged());
  refuses(cache_at(ints + 200), "v_cache shares memory with slots" + kShared, good_slots());
  refuses(cache_at(floats), "v_cache shares memory with k_descale" + kShared, good_8_bit());
  AppendParams lists = good_rotary();
  lists.cu_seqlens_q = ints + 5000, lists.total_new = 3;
  lists.leftpad_k = ints + 6000;
  refuses(cache_at(ints + 5000), "v_cache shares memory with cu_seqlens_q" + kShared, lists);
  refuses(cache_at(ints + 6000), "v_cache shares memory with leftpad_k" + kShared, lists);
  lists.cache_batch_idx = ints + 7000, lists.cache_batch_size = 2;
  refuses(cache_at(ints + 7000), "v_cache shares memory with cache_batch_idx" + kShared, lists);
  AppendParams scaled = good_8_bit();
  scaled.v_descale.data = floats + 4000;
  refuses(cache_at(floats + 4000), "v_cache shares memory with v_descale" + kShared, scaled);
  refuses([](auto& p) { p.v_cache.data = const_cast<void*>(p.q.data); },
          "v_cache shares memory with q" + kShared, good_rotary());
  refuses([](auto& p) { p.v_cache.data = p.q_out.data; },
          "v_cache shares memory with q_out" + kShared, good_rotary());
  refuses([](auto& p) { p.q_out.data = const_cast<void*>(p.k.data); },
          "q_out shares memory with k" + kShared, good_rotary());
  refuses([](auto& p) { p.q_out.data = static_cast<char*>(const_cast<void*>(p.q.data)) + 32; },
          "q_out shares memory with q" + kShared, good_rotary());
  // Both in one row of memory: every second run of 8 is of v.
  AppendParams halves = good();
  halves.k_cache = {memory + 2 * kApart, 9 * 32, 32, 16, 1, DType::kFloat32};
  halves.v_cache = halves.k_cache;
  halves.v_cache.data = memory + 2 * kApart + 32;
  CHECK_THROWS(core::validate(halves), UnsupportedError, "(nothing thrown)");
}

// A problem of 1 head of 2 columns on the CPU, with memory.
struct OnCpu {
  std::vector<float> k, v, k_cache, v_cache, tables;
  std::vector<std::int32_t> used, offsets, table, idx, leftpad;
  std::vector<std::int64_t> slots;
  AppendParams p;

  OnCpu() : k(12, 1.5f), v(12, 2.5f), k_cache(64, -9.0f), v_cache(64, -9.0f), tables(64, 0.5f) {
    used = {1, 2};
    p.k = {k.data(), 6, 2, 2, 1, DType::kFloat32}, p.v = {v.data(), 6, 2, 2, 1, DType::kFloat32};
    p.k_cache = {k_cache.data(), 10, 2, 2, 1, DType::kFloat32};
    p.v_cache = {v_cache.data(), 10, 2, 2, 1, DType::kFloat32};
    p.batch_size = 2, p.seqlen_new = 3, p.num_heads = p.num_heads_kv = 1;
    p.head_dim = p.head_dim_v = 2, p.seqlen_k = 5, p.seqused_k = used.data();
  }
  void page(std::vector<std::int32_t> pages) {
    table = std::move(pages);
    p.page_table = {table.data(), 2, 0, 0};
    p.page_size = 3, p.num_pages = 4, p.seqlen_k = 6;
    p.k_cache.batch_stride = p.v_cache.batch_stride = 6;
  }
  void slot(std::vector<std::int64_t> numbers) {
    slots = std::move(numbers);
    p.slots = slots.data(), p.page_size = 3, p.num_pages = 4;
    p.k_cache.batch_stride = p.v_cache.batch_stride = 6;
    p.seqused_k = nullptr, p.seqlen_k = 0;
  }
  void rotate(std::int64_t positions) {
    p.rotary_cos = {tables.data(), 0, 1, 0, 1, DType::kFloat32};
    p.rotary_sin = {tables.data() + 32, 0, 1, 0, 1, DType::kFloat32};
    p.rotary_dim = 2, p.rotary_positions = positions;
  }
  void varlen(std::vector<std::int32_t> starts) {
    offsets = std::move(starts);
    p.cu_seqlens_q = offsets.data(), p.total_new = 6;
  }
};

template <typename Change>
void refuses_value(Change change, const std::string& message) {
  OnCpu problem;
  change(problem);
  CHECK_THROWS(append_kv(problem.p), UnsupportedError, message);
  for (const auto* cache : {&problem.k_cache, &problem.v_cache}) {
    for (const float x : *cache) CHECK(x == -9.0f);  // nothing was written before
  }
}

// The last of the values is the wrong one, so that others come before it.
void values() {
  refuses_value([](OnCpu& c) { c.used = {0, 3}; },
                "seqused_k[1] is 3 with 3 new keys; accepted: 0 to 2, so that they end by 5, the "
                "room in the cache");
  refuses_value([](OnCpu& c) { c.used = {0, -1}; },
                "seqused_k[1] is -1 with 3 new keys; accepted: 0 to 2, so that they end by 5, the "
                "room in the cache");
  refuses_value([](OnCpu& c) { c.varlen({-1, 2, 3}); },
                "cu_seqlens_q[0] is -1; accepted: 0 or more");
  refuses_value([](OnCpu& c) { c.varlen({0, 2, 1}); },
                "cu_seqlens_q[2] is 1, less than cu_seqlens_q[1] = 2; accepted: offsets that do "
                "not decrease");
  refuses_value([](OnCpu& c) { c.varlen({0, 2, 7}); },
                "cu_seqlens_q[2] is 7; accepted: up to the 6 tokens of the tensor");
  refuses_value([](OnCpu& c) { c.varlen({0, 0, 6}); },
                "cu_seqlens_q: sequence 1 has 6 new keys; accepted: up to 5, the room in "
                "the cache");
  refuses_value([](OnCpu& c) { c.page({0, 1, 2, 4}); },
                "page_table[1, 1] is 4; accepted: 0 to 3, the pages of the cache");
  refuses_value([](OnCpu& c) { c.page({0, 1, 2, -1}); },
                "page_table[1, 1] is -1; accepted: 0 to 3, the pages of the cache");
  refuses_value(
      [](OnCpu& c) {
        c.idx = {1, 2};
        c.p.cache_batch_idx = c.idx.data(), c.p.cache_batch_size = 2;
      },
      "cache_batch_idx[1] is 2; accepted: 0 to 1, the entries of the cache");
  refuses_value([](OnCpu& c) { c.slot({0, 1, 2, 3, 4, 12}); },
                "slots[5] is 12; accepted: 0 to 11, or -1 for none");
  refuses_value([](OnCpu& c) { c.slot({0, 1, 2, 3, 4, -2}); },
                "slots[5] is -2; accepted: 0 to 11, or -1 for none");
  refuses_value(
      [](OnCpu& c) {
        c.rotate(5);
        c.leftpad = {0, -1};
        c.p.leftpad_k = c.leftpad.data();
      },
      "leftpad_k[1] is -1; accepted: 0 or more");
  refuses_value(
      [](OnCpu& c) {
        c.slot({0, 1, 2, 3, 4, 5});
        c.rotate(4);
        c.used = {1, 2};
        c.p.seqused_k = c.used.data();
      },
      "seqused_k[1] is 2 with 3 new keys; accepted: 0 to 1, so that they end by 4, the rows of "
      "rotary_cos");
  refuses_value(
      [](OnCpu& c) {
        c.slot({0, 1, 2, 3, 4, 5});
        c.rotate(2);
        c.varlen({0, 0, 3});
        c.used = {0, 0};
        c.p.seqused_k = c.used.data();
      },
      "cu_seqlens_q: sequence 1 has 3 new keys; accepted: up to 2, the rows of rotary_cos");
}

void queries_in_place() {
  for (const bool interleaved : {false, true}) {
    OnCpu c;
    c.rotate(5);
    std::vector<float> q(12);
    for (int i = 0; i < 12; ++i) q[i] = 1.0f + 0.25f * static_cast<float>(i);
    const std::vector<float> before = q;
    c.p.q = {q.data(), 6, 2, 2, 1, DType::kFloat32};
    c.p.q_out = {q.data(), 6, 2, 2, 1, DType::kFloat32};
    c.p.rotary_interleaved = interleaved;  // of 2 columns the same pair
    append_kv(c.p);
    for (int i = 0; i < 12; i += 2) {
      CHECK(q[i] == (before[i] - before[i + 1]) * 0.5f);
      CHECK(q[i + 1] == (before[i + 1] + before[i]) * 0.5f);
    }
    CHECK(c.k_cache[0] == -9.0f && c.k_cache[2] == 0.0f && c.k_cache[3] == 1.5f);
    CHECK(c.v_cache[2] == 2.5f && c.v_cache[8] == -9.0f && c.v_cache[14] == 2.5f);
  }
}

void plans() {
  const DeviceInfo device = test::gpu("RTX 4090", 8, 9, 128, 101376);
  AppendParams p = good_rotary();
  p.device.type = DeviceType::kCuda;
  const Plan plan = dlattn::plan(p, device);
  CHECK(plan.operation == Operation::kAppend);
  CHECK(plan.kernel == "token_rows");
  CHECK_EQ(plan.grid, 6);  // 2 + 2 + 4 rows of a token, up to 16 a thread block
  CHECK(describe(plan).find("operation: append\n") != std::string::npos);
  AppendParams wide = good();
  wide.num_heads_kv = 9, wide.k.row_stride = wide.v.row_stride = 72;
  wide.k.batch_stride = wide.v.batch_stride = 3 * 72;
  wide.k_cache.row_stride = wide.v_cache.row_stride = 72;
  wide.k_cache.batch_stride = wide.v_cache.batch_stride = 9 * 72;
  CHECK_EQ(dlattn::plan(wide, device).grid, 12);
  AppendParams doubles = good();
  doubles.k.dtype = doubles.v.dtype = DType::kFloat64;
  doubles.k_cache.dtype = doubles.v_cache.dtype = DType::kFloat64;
  CHECK_THROWS(dlattn::plan(doubles, device), UnsupportedError,
               "no kernel can run this: token_rows: dtype is float64; accepted: float16, bfloat16, "
               "float32");
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const bool found = cuda::find_launcher<AppendParams>("token_rows", dtype, 0);
    CHECK_EQ(found, cuda::compiled());
  }
  DeviceInfo cpu;
  cpu.num_threads = 3;
  CHECK(dlattn::plan(doubles, cpu).kernel == "cpu");
  AppendParams huge = good();
  huge.batch_size = std::int64_t{1} << 30;
  huge.k_cache.batch_stride = huge.v_cache.batch_stride = 0;
  huge.k_cache.data = huge.v_cache.data = nullptr;
  huge.cache_batch_idx = ints, huge.cache_batch_size = 0;
  huge.k.batch_stride = huge.v.batch_stride = 0;
  CHECK_THROWS(
      dlattn::plan(huge, device), UnsupportedError,
      "no kernel can run this: token_rows: needs 3221225472 thread blocks; accepted: up to "
      "2147483647");
  AppendParams none = good();
  none.seqlen_new = 0;
  none.device.type = DeviceType::kCuda, none.device.index = 99;  // which is not even asked for
  append_kv(none);
}

// New rows and attention over them, as one call.
struct AsOne : OnCpu {
  std::vector<float> q, out;
  std::vector<std::int32_t> after;
  AttentionParams attention;

  AsOne() : q(12), out(13, -7.0f), after{4, 5} {
    for (std::size_t i = 0; i < q.size(); ++i) q[i] = 0.3f + 0.1f * static_cast<float>(i % 5);
    for (std::size_t i = 0; i < k.size(); ++i) k[i] += 0.2f * static_cast<float>(i % 7);
    for (std::size_t i = 0; i < v.size(); ++i) v[i] += 0.3f * static_cast<float>(i % 4);
    AttentionParams& a = attention;
    a.q = {q.data(), 6, 2, 2, 1, DType::kFloat32};
    a.k = {k_cache.data(), 10, 2, 2, 1, DType::kFloat32};
    a.v = {v_cache.data(), 10, 2, 2, 1, DType::kFloat32};
    a.out = {out.data(), 6, 2, 2, 1, DType::kFloat32};
    a.batch_size = 2, a.seqlen_q = 3, a.seqlen_k = 5, a.num_heads = a.num_heads_kv = 1;
    a.head_dim = a.head_dim_v = 2, a.softmax_scale = 0.5, a.seqused_k = after.data();
  }
  AsOne(const AsOne&) = delete;

  template <typename Change>
  void refuses(Change change, const std::string& message) {
    change(*this);
    const std::vector<float> before[] = {k, v, q, k_cache, v_cache, out};
    CHECK_THROWS(append_and_attend(p, attention), UnsupportedError, message);
    const std::vector<float> now[] = {k, v, q, k_cache, v_cache, out};
    for (int i = 0; i < 6; ++i) CHECK(now[i] == before[i]);
  }
};

void as_one_call() {
  AsOne one, two;
  append_and_attend(one.p, one.attention);
  append_kv(two.p), forward(two.attention);
  CHECK(one.k_cache == two.k_cache && one.v_cache == two.v_cache && one.out == two.out);
  CHECK(one.k_cache[2] == one.k[0] && one.out[0] != -7.0f && one.out[12] == -7.0f);

  AsOne().refuses([](AsOne& x) { x.used = {1, 3}; },
                  "seqused_k[1] is 3 with 3 new keys; accepted: 0 to 2, so that they end by 5, "
                  "the room in the cache");
  AsOne().refuses([](AsOne& x) { x.attention.seqlen_k = 4; },
                  "seqused_k[1] is 2 with 3 new keys; accepted: 0 to 1, so that they end by 4, "
                  "which is max_seqlen_k");
  AsOne numbered;  // the CPU has no number, whatever its field holds
  numbered.attention.device.index = 1;
  append_and_attend(numbered.p, numbered.attention);
  CHECK(numbered.out == one.out);

  AsOne().refuses([](AsOne& x) { x.attention.softcap = -1.0; },
                  "softcap is -1; accepted: 7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none");
  AsOne().refuses([](AsOne& x) { x.attention.k.row_stride = -2; },
                  "k_cache: the stride of dimension seqlen is -2; negative strides are not "
                  "accepted");
  AsOne().refuses([](AsOne& x) { x.p.k.row_stride = -2; },
                  "k: the stride of dimension seqlen is -2; negative strides are not accepted");
  AsOne().refuses([](AsOne& x) { x.attention.device.type = DeviceType::kCuda; },
                  "attention is on cuda:0; accepted: cpu, where append is");
  AsOne().refuses([](AsOne& x) { x.attention.out.data = x.k.data(); },
                  "out shares memory with k" + kShared);
  AsOne().refuses([](AsOne& x) { x.attention.q.data = x.k_cache.data() + 4; },
                  "k_cache shares memory with q" + kShared);
  AsOne().refuses([](AsOne& x) { x.attention.sinks = {x.v_cache.data() + 4, 0, 0, 1}; },
                  "v_cache shares memory with sinks" + kShared);
  AsOne().refuses(
      [](AsOne& x) { x.attention.workspace = x.used.data(), x.attention.workspace_bytes = 4; },
      "workspace shares memory with seqused_k" + kShared);
  AsOne().refuses(
      [](AsOne& x) {
        x.attention.workspace = x.v_cache.data() + 19, x.attention.workspace_bytes = 4;
      },
      "workspace shares memory with v_cache" + kShared);
}

}  // namespace

int main() {
  accepted();
  sizes();
  places();
  rotary();
  dtypes();
  memory_of_tensors();
  values();
  queries_in_place();
  plans();
  as_one_call();
  return test::summary();
}
