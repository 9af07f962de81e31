// Every message of core/cache, and of what else is checked of keys in a cache.
#include "core/validate/cache.h"

#include <vector>

#include "check.h"
#include "core/plan/choose.h"
#include "core/plan/plan.h"
#include "core/problem/tensor_sizes.h"
#include "core/validate/validate.h"
#include "dlattn/attention.h"

using namespace dlattn;

namespace {

// Where tensors would lie, this far apart. Never read: validation looks at addresses only.
char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
constexpr std::int64_t kApart = 1 << 20;
const std::string kNothing = "(nothing thrown)";

// Lists of 3 sequences of up to 10 keys.
std::int32_t used[3] = {10, 0, 5};
std::int32_t leftpads[3] = {0, 0, 3};
std::int32_t entries[3] = {6, 0, 6};
const std::int32_t rows[4] = {0, 2, 2, 6};  // of queries, where they are of variable length
// In pages of 4, of which there are 9. Entries that are not in use are no pages.
std::int32_t table[3][3] = {{8, 0, 3}, {-1, -1, 99}, {8, 8, -1}};

AttentionParams good() {
  AttentionParams p;
  p.q.data = memory, p.k.data = memory + kApart, p.v.data = memory + 2 * kApart,
  p.out.data = memory + 3 * kApart;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat16;
  p.batch_size = 3, p.seqlen_q = 2, p.seqlen_k = 10, p.num_heads = 4, p.num_heads_kv = 2;
  p.head_dim = 8, p.head_dim_v = 8;
  p.q.batch_stride = p.out.batch_stride = 2 * 32;
  p.q.row_stride = p.out.row_stride = 32;
  p.k.batch_stride = p.v.batch_stride = 10 * 16, p.k.row_stride = p.v.row_stride = 16;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = 8;
  p.softmax_scale = 0.5;
  p.seqused_k = used;
  return p;
}

AttentionParams chosen() {
  AttentionParams p = good();
  p.cache_batch_idx = entries, p.cache_batch_size = 7, p.leftpad_k = leftpads;
  return p;
}

AttentionParams paged() {
  AttentionParams p = good();
  p.k.batch_stride = p.v.batch_stride = 4 * 16;
  p.page_table.data = table[0], p.page_table.batch_stride = 3;
  p.page_size = 4, p.num_pages = 9;
  return p;
}

template <typename Change>
void refuses(Change change, const std::string& message, AttentionParams p) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, message);
  const Support support = supported(p, DeviceInfo{});
  CHECK(!support.ok && support.reasons.size() == 1 && support.reasons[0] == message);
}

template <typename Change>
void accepts(Change change, AttentionParams p) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, kNothing);
  CHECK(supported(p, DeviceInfo{}).ok);
}

void what_a_cache_is() {
  const auto is = [](const char* feature, AttentionParams p) {
    return is_cache(p) && std::string(core::cache_feature(p)) == feature;
  };
  CHECK(is("seqused_k", good()) && is("cache_batch_idx", chosen()) && is("page_table", paged()));
  AttentionParams p = good();
  p.leftpad_k = leftpads;
  CHECK(is("leftpad_k", p));
  p = good(), p.seqused_k = nullptr;
  CHECK(!is_cache(p));
  p = good(), p.cu_seqlens_k = used;
  CHECK(!is_cache(p));

  const auto sizes = [](const AttentionParams& p) {
    const core::TensorSizes keys = core::key_sizes(p);
    return std::vector<std::int64_t>{keys.batch, keys.rows, keys.heads};
  };
  CHECK((sizes(good()) == std::vector<std::int64_t>{3, 10, 2}));
  CHECK((sizes(chosen()) == std::vector<std::int64_t>{7, 10, 2}));
  CHECK((sizes(paged()) == std::vector<std::int64_t>{9, 4, 2}));
  CHECK(core::pages_of(paged(), 0) == 0 && core::pages_of(paged(), 8) == 2 &&
        core::pages_of(paged(), 9) == 3);
}

void together() {
  for (const AttentionParams& p : {good(), chosen(), paged()}) {
    accepts([](auto&) {}, p);
    accepts([](auto& p) { p.seqused_k = nullptr; }, chosen());
    accepts([](auto& p) { p.cu_seqlens_q = rows, p.total_q = 6, p.seqlen_q = 4; }, p);
    refuses([](auto& p) { p.cu_seqlens_q = rows, p.total_q = 6, p.seqlen_q = 3; },
            "cu_seqlens_q: sequence 2 has 4 tokens; accepted: up to max_seqlen_q = 3", p);
  }
  const std::string alone = "; accepted: one of them, as keys in a cache have no cu_seqlens_k";
  const auto varlen = [](auto& p) {
    p.cu_seqlens_q = p.cu_seqlens_k = rows, p.total_q = p.total_k = 6;
  };
  refuses(varlen, "page_table is given with cu_seqlens_k" + alone, paged());
  refuses(varlen, "cache_batch_idx is given with cu_seqlens_k" + alone, chosen());
  refuses([&](auto& p) { varlen(p), p.leftpad_k = leftpads; },
          "leftpad_k is given with cu_seqlens_k" + alone, good());
  refuses([](auto& p) { p.cache_batch_idx = entries; },
          "cache_batch_idx is given with page_table; accepted: one of them, as a page table tells "
          "where a sequence's keys are",
          paged());
  refuses([](auto& p) { p.precision = Precision::kFp8; },
          "precision is fp8 with keys in a cache (page_table); accepted: inputs", paged());
  refuses([](auto& p) { p.precision = Precision::kInt8Fp8; },
          "precision is int8_fp8 with keys in a cache (seqused_k); accepted: inputs", good());
  refuses([](auto& p) { p.q.dtype = p.k.dtype = p.v.dtype = DType::kFloat8E4M3; },
          "q: dtype is float8_e4m3fn with keys in a cache (cache_batch_idx); accepted: float16, "
          "bfloat16, float32, float64",
          chosen());
}

void sizes_and_addresses() {
  refuses([](auto& p) { p.page_size = 0; }, "page_size is 0; accepted: at least 1", paged());
  refuses([](auto& p) { p.page_size = -16; }, "page_size is -16; accepted: at least 1", paged());
  refuses([](auto& p) { p.num_pages = 0; }, "num_pages is 0; accepted: at least 1", paged());
  refuses([](auto& p) { p.cache_batch_size = 0; }, "cache_batch_size is 0; accepted: at least 1",
          chosen());
  accepts([](auto& p) { p.num_pages = 0, p.batch_size = 0; }, paged());
  refuses([](auto& p) { p.num_pages = -1, p.seqlen_k = 0; },
          "num_pages is -1; accepted: at least 0", paged());
  refuses([](auto& p) { p.page_table.batch_stride = -3; },
          "page_table: the stride of dimension batch is -3; negative strides are not accepted",
          paged());
  accepts([](auto& p) { p.page_table.batch_stride = -3, p.batch_size = 1; }, paged());
  // Pages lie at k's and v's batch stride.
  refuses([](auto& p) { p.num_pages = 2; },
          "page_table[0][0] is 8; accepted: 0 to 1, as the sequence has 10 keys in pages of 4",
          paged());
  refuses([](auto& p) { p.k.batch_stride = -64; },
          "k: the stride of dimension batch is -64; negative strides are not accepted", paged());
  accepts([](auto& p) { p.v.batch_stride = 0; }, paged());

  const auto odd = [](const std::int32_t* x) {
    return reinterpret_cast<const std::int32_t*>(reinterpret_cast<const char*>(x) + 2);
  };
  const std::string past =
      ": its address is 2 byte(s) past a multiple of 4; accepted: multiples of the element's size";
  const auto on_gpu = [](auto change) {
    return [change](auto& p) { p.device.type = DeviceType::kCuda, change(p); };
  };
  const auto refuses_address = [&](const std::string& name, auto change, AttentionParams p) {
    on_gpu(change)(p);
    CHECK_THROWS(core::validate(p), UnsupportedError, name + past);
  };
  refuses_address("page_table", [&](auto& p) { p.page_table.data = odd(table[0]); }, paged());
  refuses_address("cache_batch_idx", [&](auto& p) { p.cache_batch_idx = odd(entries); }, chosen());
  refuses_address("leftpad_k", [&](auto& p) { p.leftpad_k = odd(leftpads); }, chosen());
}

// By the numbers themselves, on the CPU.
void values() {
  const auto with = [](auto* numbers, std::int32_t value, const std::string& message,
                       const AttentionParams& p) {
    const std::int32_t before = *numbers;
    *numbers = value;
    refuses([](auto&) {}, message, p);
    AttentionParams on_gpu = p;  // whose memory is not read
    on_gpu.device.type = DeviceType::kCuda;
    CHECK_THROWS(core::validate(on_gpu), UnsupportedError, kNothing);
    *numbers = before;
  };
  const std::string most = "; accepted: 0 to 10, the most keys that a sequence can have";
  with(&used[2], 11, "seqused_k[2] is 11" + most, good());
  with(&used[0], -1, "seqused_k[0] is -1" + most, paged());
  with(&leftpads[2], 6, "leftpad_k[2] is 6; accepted: 0 to 5, the keys of the sequence", chosen());
  with(&leftpads[0], -2, "leftpad_k[0] is -2; accepted: 0 to 10, the keys of the sequence",
       chosen());
  const std::string cache = "; accepted: 0 to 6, the entries of the cache";
  with(&entries[1], 7, "cache_batch_idx[1] is 7" + cache, chosen());
  with(&entries[0], -1, "cache_batch_idx[0] is -1" + cache, chosen());
  with(&table[0][2], 9,
       "page_table[0][2] is 9; accepted: 0 to 8, as the sequence has 10 keys in pages of 4",
       paged());
  with(&table[2][1], -1,
       "page_table[2][1] is -1; accepted: 0 to 8, as the sequence has 5 keys in pages of 4",
       paged());
  with(&table[2][0], -7,
       "page_table[2][0] is -7; accepted: 0 to 8, as the sequence has 5 keys in pages of 4",
       paged());
  // Without lengths all keys are in use.
  AttentionParams all = paged();
  all.seqused_k = nullptr;
  refuses([](auto&) {},
          "page_table[1][0] is -1; accepted: 0 to 8, as the sequence has 10 keys in pages of 4",
          all);
  // A page all of whose keys are hidden is not read.
  std::int32_t hidden[3] = {0, 0, 4};
  AttentionParams p = paged();
  p.leftpad_k = hidden;
  table[2][0] = -1;
  accepts([](auto&) {}, p);
  hidden[2] = 3;
  refuses([](auto&) {},
          "page_table[2][0] is -1; accepted: 0 to 8, as the sequence has 5 keys in pages of 4", p);
  hidden[2] = 5, table[2][1] = -1;
  accepts([](auto&) {}, p);
  table[2][0] = table[2][1] = 8;
}

// Pages that no query may see by its position: before a window, and behind what the last query
// sees.
void pages_beyond_windows() {
  const auto refused = [](std::int64_t page) {
    return "page_table[0][" + std::to_string(page) +
           "] is 99; accepted: 0 to 8, as the sequence has 10 keys in pages of 4";
  };
  struct Seen {
    Causal causal;
    std::int64_t left, right;
    bool pages[3];
  };
  // The two queries over 10 keys are at 8 and 9, top-left at 0 and 1.
  const Seen cases[] = {
      {Causal::kNone, -1, -1, {true, true, true}},
      {Causal::kBottomRight, 3, -1, {false, true, true}},  // keys 5 to 9
      {Causal::kBottomRight, 4, 0, {false, true, true}},   // 4 to 9
      {Causal::kNone, 5, 0, {true, true, true}},           // 3 to 9
      {Causal::kBottomRight, 0, -1, {false, false, true}},
      {Causal::kTopLeft, -1, -1, {true, false, false}},
      {Causal::kTopLeft, 0, 0, {true, false, false}},
      {Causal::kNone, -1, 0, {true, true, true}},
  };
  for (const Seen& seen : cases) {
    for (std::int64_t page = 0; page < 3; ++page) {
      const auto set = [&](auto& p) {
        p.causal = seen.causal, p.window_left = seen.left, p.window_right = seen.right;
      };
      const std::int32_t before = table[0][page];
      table[0][page] = 99;
      if (seen.pages[page]) {
        refuses(set, refused(page), paged());
      } else {
        accepts(set, paged());
      }
      table[0][page] = before;
    }
  }
  // A sequence without queries sees none; rows: 2, 0 and 4 queries of the three.
  AttentionParams p = paged();
  p.cu_seqlens_q = rows, p.total_q = 6, p.seqlen_q = 4;
  used[1] = 9;
  accepts([](auto&) {}, p);
  table[2][0] = -1, p.causal = Causal::kBottomRight, p.window_left = 0;  // at keys 1 to 4
  refuses([](auto&) {},
          "page_table[2][0] is -1; accepted: 0 to 8, as the sequence has 5 keys in pages of 4", p);
  used[1] = 0, table[2][0] = 8;
}

// A family reads keys in a cache only if its record says so.
void families() {
  core::ForwardFamily record = {"made_up", 0, 1, nullptr,
                                [](const AttentionParams&, const DeviceInfo&, const Options&, Plan*,
                                   std::string*) { return true; }};
  DeviceInfo device;
  device.type = DeviceType::kCuda;
  device.name = "a GPU", device.compute_major = 9;
  Plan plan;
  std::string why;
  const core::ListedFamily<AttentionParams> family = {&record, {{DType::kFloat16, 64}}};
  AttentionParams without = good();
  without.seqused_k = nullptr;
  CHECK(core::plan_on(family, without, device, Options(), &plan, &why));
  const struct {
    const char* name;
    AttentionParams params;
  } caches[] = {{"page_table", paged()}, {"cache_batch_idx", chosen()}, {"seqused_k", good()}};
  for (const auto& cache : caches) {
    record.reads_caches = false;
    CHECK(!core::plan_on(family, cache.params, device, Options(), &plan, &why));
    CHECK_FOR(why == std::string("does not read keys in a cache: ") + cache.name + " is given",
              why);
    record.reads_caches = true;
    CHECK(core::plan_on(family, cache.params, device, Options(), &plan, &why));
  }
}

}  // namespace

int main() {
  what_a_cache_is();
  together();
  sizes_and_addresses();
  values();
  pages_beyond_windows();
  families();
  return test::summary();
}
