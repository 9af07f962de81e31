// append_kv(): the kernels write the bits of the CPU backend where this test says that rows go, and
// nothing else.
#include <numeric>

#include "attention_test.h"
#include "core/operations/append.h"
#include "cuda/append/token_rows/kernel.cuh"

namespace {

using dlattn::AppendParams;
using dlattn::DType;
using simt::Layout;
namespace token_rows = dlattn::append::token_rows;

enum class Where { kRows, kEntries, kPages, kSlots, kSlots32 };

struct AppendCase {
  std::vector<int> lengths = {3, 3};  // new rows of each sequence
  std::vector<std::int32_t> seqused = {2, 5};
  Where where = Where::kRows;
  DType cache = DType::kFloat16;  // kInt8, kFloat8E4M3; else k's
  int rotary_dim = 0;
  bool interleaved = false, own_tables = false;  // tables of k's dtype, else fp32
  bool with_q = false, fixed_q = false;
  int head_dim = 64, head_dim_v = 64, heads = 5, heads_kv = 2;
  int page_size = 3, capacity = 12;
  bool varlen = false;
  Layout layout = Layout::kBshd, cache_layout = Layout::kBshd;
  Layout cos_layout = Layout::kBshd, sin_layout = Layout::kBshd;
  bool narrow_q_out = false;  // rows of q_out are off 4 bytes
  std::vector<std::int32_t> leftpad = {};
  std::vector<std::int32_t> offsets = {};  // cu_seqlens_q, instead of those of lengths
  // Changes what lies on the device into what nobody accepts.
  void (*spoil)(struct Lists*) = nullptr;

  std::string name() const;
};

// The lists on the device beside the tensors of numbers.
struct Lists {
  std::vector<std::int32_t> cu_seqlens, seqused, leftpad, entries, table, slots32;
  std::vector<std::int64_t> slots;
};

std::string AppendCase::name() const {
  static const char* const kWhere[] = {" rows", " entries", " pages", " slots", " slots32"};
  std::string text = kWhere[static_cast<int>(where)];
  const auto add = [&](const char* what, int number) {
    text += std::string(" ") + what + std::to_string(number);
  };
  for (const int n : lengths) add("n", n);
  add("d", head_dim), add("v", head_dim_v), add("h", heads_kv), add("page", page_size);
  if (rotary_dim) add(interleaved ? "pairs" : "halves", rotary_dim);
  if (own_tables) text += " own tables";
  if (with_q) add(fixed_q ? "fixed q" : "q", heads);
  if (narrow_q_out) text += " narrow q_out";
  if (varlen) text += " varlen";
  if (cache != DType::kFloat16) text += std::string(" ") + dlattn::to_string(cache);
  add("layout", static_cast<int>(layout)), add("cache", static_cast<int>(cache_layout));
  add("tables", 10 * static_cast<int>(cos_layout) + static_cast<int>(sin_layout));
  if (!leftpad.empty()) text += " leftpad";
  if (spoil) text += " spoilt";
  return text;
}

template <typename T>
struct All {
  simt::Tensor<T> k, v, q, q_out, k_cache, v_cache, own_cos, own_sin;
  simt::Tensor<std::uint8_t> k_cache8, v_cache8;
  simt::Tensor<float> cos, sin, scales;  // [k and v, batch, heads, 1]
  Lists lists;
};
template <typename T>
void rewrite(const All<T>& all) {
  simt::rewrite(all.k), simt::rewrite(all.v), simt::rewrite(all.q), simt::rewrite(all.q_out);
  simt::rewrite(all.k_cache), simt::rewrite(all.v_cache), simt::rewrite(all.k_cache8);
  simt::rewrite(all.v_cache8), simt::rewrite(all.cos), simt::rewrite(all.sin);
  simt::rewrite(all.own_cos), simt::rewrite(all.own_sin), simt::rewrite(all.scales);
  const Lists& lists = all.lists;
  simt::rewrite(lists.cu_seqlens), simt::rewrite(lists.seqused), simt::rewrite(lists.leftpad);
  simt::rewrite(lists.entries), simt::rewrite(lists.table), simt::rewrite(lists.slots32);
  for (const std::int64_t& x : lists.slots) const_cast<volatile std::int64_t&>(x) = x;
}

bool is_paged(const AppendCase& c) {
  return c.where == Where::kPages || c.where == Where::kSlots || c.where == Where::kSlots32;
}
int pages_of_sequence(const AppendCase& c) {
  return (c.capacity + c.page_size - 1) / c.page_size;
}
int num_entries(const AppendCase& c) {
  const int batch = static_cast<int>(c.lengths.size());
  return is_paged(c) ? batch * pages_of_sequence(c) + 3
                     : batch + (c.where == Where::kEntries ? 2 : 0);
}
int total_rows(const AppendCase& c) {
  return std::accumulate(c.lengths.begin(), c.lengths.end(), 0);
}
int num_positions(const AppendCase& c) {
  return c.capacity + 1;
}

template <typename T>
void make_tensors(const AppendCase& c, All<T>* all) {
  const int batch = static_cast<int>(c.lengths.size());
  const int entries = c.varlen ? 1 : batch, rows = c.varlen ? total_rows(c) : c.lengths[0];
  std::mt19937 random(c.head_dim + 7 * c.capacity);
  const auto make = [&](auto* x, int heads, int dim) {
    simt::allocate(x, c.layout, entries, rows, heads, dim);
    x->fill(&random, 2.0, 0.5);
  };
  make(&all->k, c.heads_kv, c.head_dim), make(&all->v, c.heads_kv, c.head_dim_v);
  make(&all->q, c.heads, c.head_dim);
  if (rows > 0 && c.cache == DType::kFloat16) {
    // A signalling NaN, whose bits a copy keeps and arithmetic does not.
    const std::uint32_t bits = simt::DTypeOf<T>::value == DType::kFloat16    ? 0x7d01
                               : simt::DTypeOf<T>::value == DType::kBFloat16 ? 0x7f81
                                                                             : 0x7f800001;
    T& last = all->v.at(entries - 1, rows - 1, c.heads_kv - 1, c.head_dim_v - 1);
    std::memcpy(static_cast<void*>(&last), &bits, sizeof last);
  }
  simt::allocate(&all->q_out, c.narrow_q_out ? Layout::kAlign2 : c.layout, entries, rows, c.heads,
                 c.head_dim);
  const int cached = is_paged(c) ? c.page_size : c.capacity;
  const auto make_cache = [&](auto* x, int dim) {
    simt::allocate(x, c.cache_layout, num_entries(c), cached, c.heads_kv, dim);
  };
  if (c.cache == DType::kFloat16) {
    make_cache(&all->k_cache, c.head_dim), make_cache(&all->v_cache, c.head_dim_v);
  } else {
    make_cache(&all->k_cache8, c.head_dim), make_cache(&all->v_cache8, c.head_dim_v);
  }
  const int half = std::max(c.rotary_dim / 2, 1);
  const auto make_table = [&](auto* x, Layout layout) {
    simt::allocate(x, layout, 1, num_positions(c), 1, half);
    x->fill(&random, 0.6, 0.1);
  };
  make_table(&all->cos, c.cos_layout), make_table(&all->sin, c.sin_layout);
  make_table(&all->own_cos, c.cos_layout), make_table(&all->own_sin, c.sin_layout);
  all->scales.allocate({2, batch, c.heads_kv, 1}, {batch * c.heads_kv, c.heads_kv, 1, 1});
  all->scales.fill(&random, 0.004, 0.05);
}

Lists make_lists(const AppendCase& c) {
  Lists lists;
  const int batch = static_cast<int>(c.lengths.size()), pages = pages_of_sequence(c);
  lists.cu_seqlens = c.offsets;
  for (int b = 0, row = 0; b <= batch && c.offsets.empty(); ++b) {
    lists.cu_seqlens.push_back(row);
    if (b < batch) row += c.lengths[b];
  }
  lists.seqused = c.seqused, lists.leftpad = c.leftpad;
  std::vector<std::int32_t> shuffled(num_entries(c));
  std::iota(shuffled.begin(), shuffled.end(), 0);
  std::shuffle(shuffled.begin(), shuffled.end(), std::mt19937(1));
  if (c.where == Where::kEntries) lists.entries.assign(shuffled.begin(), shuffled.begin() + batch);
  if (!is_paged(c)) return lists;
  lists.table.assign(shuffled.begin(), shuffled.begin() + batch * pages);
  for (int b = 0; b < batch; ++b) {
    for (int i = 0; i < c.lengths[b]; ++i) {
      const int position = c.seqused[b] + i;
      const int page = lists.table[b * pages + position / c.page_size];
      lists.slots.push_back(page * c.page_size + position % c.page_size);
    }
  }
  if (!lists.slots.empty()) lists.slots[0] = -1;
  lists.slots32.assign(lists.slots.begin(), lists.slots.end());
  return lists;
}

template <typename T>
AppendParams make_params(const AppendCase& c, const All<T>& all) {
  AppendParams p;
  constexpr DType kDType = simt::DTypeOf<T>::value;
  const auto view = [](const auto& x, DType dtype, auto* to) {
    to->data = x.data(), to->dtype = dtype;
    to->batch_stride = x.stride(0), to->row_stride = x.stride(1), to->head_stride = x.stride(2);
  };
  view(all.k, kDType, &p.k), view(all.v, kDType, &p.v);
  if (c.with_q) view(all.q, kDType, &p.q), view(all.q_out, kDType, &p.q_out);
  if (c.cache == DType::kFloat16) {
    view(all.k_cache, kDType, &p.k_cache), view(all.v_cache, kDType, &p.v_cache);
  } else {
    view(all.k_cache8, c.cache, &p.k_cache), view(all.v_cache8, c.cache, &p.v_cache);
    p.k_descale = {all.scales.data(), c.heads_kv, 0, 1};
    p.v_descale = {&all.scales.at(1, 0, 0, 0), c.heads_kv, 0, 1};
  }
  if (c.rotary_dim && c.own_tables) {
    view(all.own_cos, kDType, &p.rotary_cos), view(all.own_sin, kDType, &p.rotary_sin);
  } else if (c.rotary_dim) {
    view(all.cos, DType::kFloat32, &p.rotary_cos), view(all.sin, DType::kFloat32, &p.rotary_sin);
  }
  p.device.type = dlattn::DeviceType::kCuda;
  p.batch_size = static_cast<std::int64_t>(c.lengths.size());
  (c.varlen ? p.total_new : p.seqlen_new) = c.varlen ? total_rows(c) : c.lengths[0];
  p.num_heads = c.heads, p.num_heads_kv = c.heads_kv;
  p.head_dim = c.head_dim, p.head_dim_v = c.head_dim_v;
  const Lists& lists = all.lists;
  if (c.varlen) p.cu_seqlens_q = lists.cu_seqlens.data();
  p.seqused_k = lists.seqused.data();
  if (!lists.leftpad.empty()) p.leftpad_k = lists.leftpad.data();
  p.rotary_dim = c.rotary_dim, p.rotary_positions = c.rotary_dim ? num_positions(c) : 0;
  p.rotary_interleaved = c.interleaved, p.q_fixed_position = c.fixed_q;
  if (is_paged(c)) p.page_size = c.page_size, p.num_pages = num_entries(c);
  if (c.where == Where::kEntries)
    p.cache_batch_idx = lists.entries.data(), p.cache_batch_size = num_entries(c);
  if (c.where == Where::kPages) p.page_table = {lists.table.data(), pages_of_sequence(c), 0, 0};
  if (c.where == Where::kSlots) p.slots = lists.slots.data();
  if (c.where == Where::kSlots32) p.slots = lists.slots32.data(), p.slot_bytes = 4;
  if (!p.slots) p.seqlen_k = c.capacity;
  return p;
}

// The sequence of a row; -1: none. Starts that decrease may give any, and are left out.
int sequence_of(const AppendCase& c, const Lists& lists, int row) {
  if (!c.varlen) return row / c.lengths[0];
  const int total = total_rows(c);
  for (std::size_t b = 0; b + 1 < lists.cu_seqlens.size(); ++b) {
    const int begin = std::clamp(lists.cu_seqlens[b], 0, total);
    const int end = std::clamp(lists.cu_seqlens[b + 1], 0, total);
    if (row >= begin && row < end) return static_cast<int>(b);
  }
  return -1;
}

// Where a row goes, as a slot of the cache's rows; -1: nowhere.
std::int64_t slot_of(const AppendCase& c, const Lists& lists, int row, int sequence,
                     std::int64_t position) {
  const std::int64_t rows = is_paged(c) ? c.page_size : c.capacity, all = num_entries(c) * rows;
  if (c.where == Where::kSlots || c.where == Where::kSlots32) {
    const std::int64_t slot = c.where == Where::kSlots ? lists.slots[row] : lists.slots32[row];
    return slot >= 0 && slot < all ? slot : -1;
  }
  if (position < 0 || position >= c.capacity) return -1;
  std::int64_t entry = sequence;
  if (c.where == Where::kEntries) entry = lists.entries[sequence];
  if (c.where == Where::kPages)
    entry = lists.table[sequence * pages_of_sequence(c) + position / rows];
  return entry >= 0 && entry < num_entries(c) ? entry * rows + position % rows : -1;
}

// Computes the expected cache: the CPU backend writes one row at a time, to a slot, at a position.
template <typename T>
void append_on_cpu(const AppendCase& c, const AppendParams& given, const Lists& lists) {
  const std::int64_t bytes = sizeof(T);
  for (int row = 0; row < total_rows(c); ++row) {
    const int b = sequence_of(c, lists, row);
    if (b < 0) continue;
    const int start =
        c.varlen ? std::clamp(lists.cu_seqlens[b], 0, total_rows(c)) : b * c.lengths[0];
    const std::int64_t used = lists.seqused[b], index = row - start;
    const std::int64_t position = used < 0 ? -1 : used + index;
    const auto rotary = [&](std::int64_t at) -> std::int64_t {
      if (at < 0) return -1;
      if (!lists.leftpad.empty()) at = std::max<std::int64_t>(at - lists.leftpad[b], 0);
      return at < num_positions(c) ? at : -1;
    };
    AppendParams p = given;
    p.device.type = dlattn::DeviceType::kCpu;
    p.batch_size = p.seqlen_new = 1, p.cu_seqlens_q = nullptr, p.leftpad_k = nullptr;
    p.page_table = {}, p.cache_batch_idx = nullptr, p.seqlen_k = 0, p.slot_bytes = 8;
    p.page_size = is_paged(c) ? c.page_size : c.capacity, p.num_pages = num_entries(c);
    const std::int64_t entry = c.varlen ? 0 : b, at = c.varlen ? row : index;
    const auto to_row = [&](auto* x) {
      if (x->data)
        x->data = (char*)x->data + (entry * x->batch_stride + at * x->row_stride) * bytes;
    };
    to_row(&p.k), to_row(&p.v), to_row(&p.q), to_row(&p.q_out);
    if (p.k_descale.data)
      p.k_descale.data += b * p.k_descale.batch_stride,
          p.v_descale.data += b * p.v_descale.batch_stride;
    const auto run = [&](std::int64_t slot, std::int64_t table_row, bool with_q) {
      if (c.rotary_dim && table_row < 0) return;
      const auto first = static_cast<std::int32_t>(table_row);
      AppendParams one = p;
      one.slots = &slot, one.seqused_k = &first, one.q_fixed_position = false;
      if (!with_q) one.q = {}, one.q_out = {};
      dlattn::core::validate(one);
      dlattn::cpu::append_kv(one, 1);
    };
    run(slot_of(c, lists, row, b, position), rotary(position), false);
    if (c.with_q) run(-1, rotary(c.fixed_q ? used : position), true);
  }
}

template <typename T>
void run(simt::Tests* tests, const std::string& filter, AppendCase c) {
  const std::string name =
      std::string("append ") + dlattn::to_string(simt::DTypeOf<T>::value) + c.name();
  if (name.find(filter) == std::string::npos) return;
  const simt::HangGuard guard(name);
  All<T> all;
  make_tensors(c, &all);
  all.lists = make_lists(c);
  if (c.spoil) c.spoil(&all.lists);
  const AppendParams params = make_params(c, all);
  dlattn::core::validate(params);
  const dlattn::Plan plan = dlattn::core::make_plan(params, simt::ada());
  const auto outputs = [&] {
    return std::vector<std::vector<unsigned char>>{all.k_cache.bytes(), all.v_cache.bytes(),
                                                   all.k_cache8.bytes(), all.v_cache8.bytes(),
                                                   all.q_out.bytes()};
  };
  const auto poison = [&] {
    all.k_cache.poison(), all.v_cache.poison(), all.q_out.poison();
    all.k_cache8.poison(), all.v_cache8.poison();
  };
  append_on_cpu<T>(c, params, all.lists);
  const auto expected = outputs();
  std::string trouble;
  for (const simt::Schedule schedule : simt::schedules()) {
    poison();
    const token_rows::Shape shape = token_rows::make_shape(params);
    simt::Launch launch{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32), 0,
                        schedule};
    simt::start_early(&launch, all);
    if (plan.grid > 0) simt::launch(launch, [&] { token_rows::kernel<T>(params, shape); });
    if (outputs() != expected) trouble = "other bytes than the CPU's";
  }
  tests->report(name, {}, simt::DTypeOf<T>::value, trouble);
}

template <typename Change>
AppendCase with(AppendCase c, Change change) {
  change(c);
  return c;
}

std::vector<AppendCase> cases() {
  std::vector<AppendCase> all;
  const auto add = [&](auto change) { all.push_back(with(AppendCase(), change)); };
  for (const Where where :
       {Where::kRows, Where::kEntries, Where::kPages, Where::kSlots, Where::kSlots32}) {
    add([&](AppendCase& c) { c.where = where; });
    add([&](AppendCase& c) {  // varlen, one page size of each kind, q beside
      c.where = where, c.varlen = true, c.lengths = {4, 0, 1, 3}, c.seqused = {7, 2, 0, 4};
      c.page_size = 16, c.capacity = 32, c.rotary_dim = 64, c.with_q = true;
    });
    add([&](AppendCase& c) {
      c.where = where, c.page_size = 1, c.rotary_dim = 16, c.interleaved = true;
      c.with_q = c.fixed_q = c.own_tables = true, c.leftpad = {1, 9};
    });
  }
  // Alignments, odd sizes, layouts of the cache: what is wide of k, v and q differs.
  for (const Layout layout :
       {Layout::kBhsd, Layout::kPacked, Layout::kAlign8, Layout::kAlign4, Layout::kAlign2}) {
    for (const bool interleaved : {false, true}) {
      add([&](AppendCase& c) {
        c.layout = layout, c.rotary_dim = 32, c.interleaved = interleaved, c.with_q = true;
      });
      add([&](AppendCase& c) {
        c.cache_layout = layout, c.rotary_dim = 64, c.interleaved = interleaved;
        c.own_tables = true, c.where = Where::kPages;
      });
    }
  }
  for (const bool own : {false, true}) {
    const auto add_tables = [&](Layout cos, Layout sin) {
      add([&](AppendCase& c) {
        c.cos_layout = cos, c.sin_layout = sin, c.own_tables = own, c.rotary_dim = 64;
        c.with_q = true;
      });
    };
    add_tables(Layout::kAlign4, Layout::kBshd), add_tables(Layout::kBshd, Layout::kAlign8);
  }
  add([](AppendCase& c) { c.head_dim = 40, c.head_dim_v = 17, c.rotary_dim = 24; });
  add([](AppendCase& c) {
    c.head_dim = 17, c.head_dim_v = 256, c.rotary_dim = 2, c.with_q = true;
  });
  add([](AppendCase& c) { c.head_dim = 300, c.head_dim_v = 1, c.rotary_dim = 256; });
  add([](AppendCase& c) { c.with_q = c.narrow_q_out = true, c.rotary_dim = 64; });
  add([](AppendCase& c) { c.heads = 33, c.heads_kv = 11, c.rotary_dim = 64, c.with_q = true; });
  for (const DType cache : {DType::kInt8, DType::kFloat8E4M3}) {
    for (const int rotary_dim : {0, 32, 64}) {
      add([&](AppendCase& c) {
        c.cache = cache, c.rotary_dim = rotary_dim, c.interleaved = rotary_dim == 64;
        c.where = Where::kPages;
      });
      add([&](AppendCase& c) {
        c.cache = cache, c.rotary_dim = rotary_dim, c.head_dim = 72, c.head_dim_v = 41;
        c.varlen = true, c.lengths = {2, 5}, c.seqused = {0, 3};
      });
    }
  }
  // More sequences than a step of the search looks at, some of them empty, the last one not; slices
  // of a batch.
  add([](AppendCase& c) {
    c.varlen = true, c.lengths.clear(), c.seqused.clear();
    for (int b = 0; b < 1100; ++b)
      c.lengths.push_back(b % 37 == 5 || b == 1099 ? 2 : 0), c.seqused.push_back(b % 9);
    c.heads_kv = 1, c.head_dim = c.head_dim_v = 8;
  });
  add([](AppendCase& c) {
    c.varlen = true, c.lengths = {2, 3, 2}, c.seqused = {1, 2, 3}, c.offsets = {1, 2, 4, 6};
    c.rotary_dim = 16, c.with_q = true;
  });
  return all;
}

// Lists that the CPU backend refuses.
std::vector<AppendCase> spoilt_cases() {
  AppendCase base;
  base.lengths = {4, 3}, base.seqused = {2, 5}, base.varlen = true;
  base.rotary_dim = 16, base.with_q = true;
  std::vector<AppendCase> all;
  const auto add = [&](Where where, void (*spoil)(Lists*)) {
    AppendCase c = base;
    c.where = where, c.spoil = spoil;
    all.push_back(c);
  };
  for (const Where where : {Where::kRows, Where::kPages, Where::kSlots}) {
    add(where, [](Lists* lists) { lists->seqused = {10, -2}; });
    add(where, [](Lists* lists) { lists->seqused = {INT32_MAX, INT32_MIN}; });
    add(where, [](Lists* lists) { lists->leftpad = {-20, -9}; });
    add(where, [](Lists* lists) { lists->leftpad = {INT32_MIN, INT32_MAX}; });
    add(where, [](Lists* lists) { lists->cu_seqlens = {-3, 4, 90}; });
  }
  add(Where::kEntries, [](Lists* lists) { lists->entries = {-1, 4}; });
  add(Where::kEntries, [](Lists* lists) { lists->entries = {3, INT32_MAX}; });
  add(Where::kPages, [](Lists* lists) {
    lists->table[0] = -1, lists->table[1] = 11, lists->table[6] = INT32_MAX;
  });
  add(Where::kSlots, [](Lists* lists) {
    lists->slots[1] = -2, lists->slots[2] = 33, lists->slots[3] = INT64_MAX,
    lists->slots[4] = INT64_MIN;
  });
  add(Where::kSlots32, [](Lists* lists) {
    lists->slots32[1] = -2, lists->slots32[2] = 33, lists->slots32[3] = INT32_MAX,
    lists->slots32[4] = INT32_MIN;
  });
  return all;
}

// Starts that decrease: which sequence a row is of is any, so all that counts is that nothing is
// written outside the tensors, and that the kernel ends.
template <typename T>
void run_decreasing(simt::Tests* tests) {
  AppendCase c;
  c.varlen = true, c.lengths.assign(40, 1), c.seqused.assign(40, 2), c.rotary_dim = 16;
  All<T> all;
  make_tensors(c, &all);
  all.lists = make_lists(c);
  std::shuffle(all.lists.cu_seqlens.begin(), all.lists.cu_seqlens.end(), std::mt19937(5));
  const AppendParams params = make_params(c, all);
  const dlattn::Plan plan = dlattn::core::make_plan(params, simt::ada());
  std::string trouble;
  for (const simt::Schedule schedule : simt::schedules()) {
    all.k_cache.poison(), all.v_cache.poison();
    const token_rows::Shape shape = token_rows::make_shape(params);
    const simt::HangGuard guard("append of decreasing starts");
    const simt::Launch launch{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32), 0,
                              schedule};
    simt::launch(launch, [&] { token_rows::kernel<T>(params, shape); });
    if (!all.k_cache.gaps_intact() || !all.v_cache.gaps_intact()) trouble = "a write outside";
  }
  tests->report("append of decreasing starts", {}, simt::DTypeOf<T>::value, trouble);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  simt::Tests tests("append", "");
  std::vector<AppendCase> all = cases();
  for (const AppendCase& c : spoilt_cases()) all.push_back(c);
  for (const AppendCase& c : all) {
    run<half>(&tests, filter, c);
    run<__nv_bfloat16>(&tests, filter, c);
    run<float>(&tests, filter, c);
  }
  // Rows of two sequences may go to one place, which ThreadSanitizer would report.
  if (!simt::kThreadSanitizer && filter.empty()) run_decreasing<half>(&tests);
  return tests.finish();
}
