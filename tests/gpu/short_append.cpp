// append_kv into caches whose memory is no more than what may be written: all bytes are those of
// the CPU backend, which is told slots instead of lists that it would refuse.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "device_copy.h"
#include "problem.h"
#include "short_parts.h"

using namespace dlattn;
using test::Buffer;
using test::DeviceCopy;

namespace {

constexpr std::int32_t kLeast = INT32_MIN, kMost = INT32_MAX;

enum class Where { kRows, kEntries, kPages, kSlots };

struct AppendCase {
  Where where;
  DType dtype = DType::kBFloat16, cache = DType::kBFloat16;
  int page_size = 16, dim = 64, rotary_dim = 0;
  // The lists on the device. Rows that it gives no place are left out.
  std::vector<std::int32_t> used = {0, 30, 46};
  std::vector<std::int32_t> entries = {2, 0, 1};
  std::vector<std::int64_t> slots = {};  // empty: those of the table
  bool wrong_pages = false, wrong_starts = false, q = false;
};

// New rows of three sequences with room for 48 keys each, two of each.
class AppendProblem {
 public:
  static constexpr int kBatch = 3, kNew = 2, kRoom = 48, kHeads = 4, kHeadsKv = 2;

  explicit AppendProblem(const AppendCase& c) : c_(c) {
    std::mt19937 random(11);
    const bool paged = c.where == Where::kPages || c.where == Where::kSlots;
    rows_ = paged ? c.page_size : kRoom;
    columns_ = kRoom / c.page_size;
    count_ = paged ? kBatch * columns_ : kBatch;
    for (int i = 0; i < kBatch * columns_; ++i) table_.push_back(kBatch * columns_ - 1 - i);
    if (c.wrong_pages) {
      for (int b = 0; b < kBatch; ++b) {
        for (int i = 0; i < columns_; ++i) {
          const std::int32_t none[] = {-1, count_, kMost, kLeast};
          table_[b * columns_ + i] = none[(b + i) % 4];
        }
      }
    }
    for (int n = 0; n < kBatch * kNew; ++n) place(n);
    const auto fill = [&](Buffer* x, int heads) {
      *x = Buffer(c.dtype, std::int64_t{kBatch} * kNew * heads * c.dim);
      x->fill_normal(random, 0.5, 2.0);
    };
    fill(&k_, kHeadsKv), fill(&v_, kHeadsKv), fill(&q_, kHeads);
    q_out_ = Buffer(c.dtype, q_.size());
    for (Buffer* x : {&k_cache_, &v_cache_})
      *x = Buffer(c.cache, std::int64_t{count_} * rows_ * kHeadsKv * c.dim);
    for (Buffer* x : {&cos_, &sin_}) {
      *x = Buffer(DType::kFloat32, std::int64_t{kRoom} * c.rotary_dim / 2);
      x->fill_normal(random, 0.0, 0.7);
    }
    for (int i = 0; i < kHeadsKv * kBatch; ++i) scales_.push_back(0.02f + 0.005f * i);
    starts_ = {0, 2, 4, 6};
    if (c.wrong_starts) starts_ = {-5, 2, 4, kMost};  // clamped: the same
  }

  void run();

 private:
  // Where row n goes; nowhere: -1.
  void place(int n) {
    std::int64_t slot = -1;
    const std::int64_t all = std::int64_t{count_} * rows_;
    if (!c_.slots.empty()) {
      slot = c_.slots[n];
      given_slots_.push_back(slot);
    } else {
      const int b = n / kNew;
      const std::int64_t used = c_.used[b], position = used + n % kNew;
      std::int64_t entry = b;
      if (used >= 0 && position < kRoom) {
        if (c_.where == Where::kEntries) entry = c_.entries[b];
        if (c_.where == Where::kPages || c_.where == Where::kSlots)
          entry = table_[b * columns_ + position / rows_];
        if (entry >= 0 && entry < count_) slot = entry * rows_ + position % rows_;
      }
      given_slots_.push_back(slot);
    }
    slots_.push_back(slot >= 0 && slot < all ? slot : -1);
  }

  AppendParams describe() const;
  void expect();

  AppendCase c_;
  int rows_, columns_, count_;
  std::vector<std::int32_t> table_, starts_;
  std::vector<std::int64_t> given_slots_, slots_;  // as told, and as the CPU backend accepts them
  std::vector<float> scales_;
  mutable Buffer k_, v_, q_, q_out_, k_cache_, v_cache_, cos_, sin_;
};

AppendParams AppendProblem::describe() const {
  AppendParams p;
  const auto view = [&](Buffer& x, DType dtype, int heads, std::int64_t rows, auto* to) {
    to->data = x.data(), to->dtype = dtype, to->head_stride = c_.dim;
    to->row_stride = std::int64_t{heads} * c_.dim, to->batch_stride = rows * to->row_stride;
  };
  view(k_, c_.dtype, kHeadsKv, kNew, &p.k), view(v_, c_.dtype, kHeadsKv, kNew, &p.v);
  if (c_.q) view(q_, c_.dtype, kHeads, kNew, &p.q), view(q_out_, c_.dtype, kHeads, kNew, &p.q_out);
  view(k_cache_, c_.cache, kHeadsKv, rows_, &p.k_cache);
  view(v_cache_, c_.cache, kHeadsKv, rows_, &p.v_cache);
  p.batch_size = kBatch, p.num_heads = kHeads, p.num_heads_kv = kHeadsKv;
  p.head_dim = p.head_dim_v = c_.dim;
  p.cu_seqlens_q = starts_.data(), p.total_new = kBatch * kNew;
  p.seqused_k = c_.used.data();
  if (c_.rotary_dim) {
    p.rotary_cos.data = cos_.data(), p.rotary_sin.data = sin_.data();
    p.rotary_cos.dtype = p.rotary_sin.dtype = DType::kFloat32;
    p.rotary_cos.row_stride = p.rotary_sin.row_stride = c_.rotary_dim / 2;
    p.rotary_dim = c_.rotary_dim, p.rotary_positions = kRoom;
  }
  if (c_.cache != c_.dtype) {
    p.k_descale = {scales_.data(), kHeadsKv, 0, 1};
    p.v_descale = p.k_descale;
  }
  return p;
}

// The CPU backend's bytes.
void AppendProblem::expect() {
  AppendParams p = describe();
  static constexpr std::int32_t kStarts[] = {0, 2, 4, 6};
  p.device = {DeviceType::kCpu, 0};
  p.cu_seqlens_q = kStarts;
  p.slots = slots_.data(), p.page_size = rows_, p.num_pages = count_;
  if (!c_.rotary_dim) p.seqused_k = nullptr;
  append_kv(p);
}

void AppendProblem::run() {
  struct Output {
    Buffer* buffer;
    std::int64_t bytes;
    std::vector<unsigned char> before, want;
  };
  const auto output = [](Buffer* x, DType dtype) {
    return Output{x, x->size() * size_of(dtype), {}, {}};
  };
  Output outputs[] = {output(&k_cache_, c_.cache), output(&v_cache_, c_.cache),
                      output(&q_out_, c_.dtype)};
  const auto bytes_of = [](const Output& x) {
    const auto* data = static_cast<const unsigned char*>(x.buffer->data());
    return std::vector<unsigned char>(data, data + x.bytes);
  };
  for (Output& x : outputs) x.before = bytes_of(x);
  expect();
  for (Output& x : outputs) x.want = bytes_of(x);

  AppendParams p = describe();
  p.device = {DeviceType::kCuda, 0};
  const auto copy = [](const auto& list) {
    return DeviceCopy(list.data(), static_cast<std::int64_t>(list.size() * sizeof(list[0])));
  };
  const std::int64_t element = size_of(c_.dtype);
  const DeviceCopy k(k_.data(), k_.size() * element), v(v_.data(), v_.size() * element);
  const DeviceCopy q(q_.data(), q_.size() * element);
  const DeviceCopy cos(cos_.data(), cos_.size() * 4), sin(sin_.data(), sin_.size() * 4);
  const DeviceCopy k_cache = copy(outputs[0].before), v_cache = copy(outputs[1].before);
  const DeviceCopy q_out = copy(outputs[2].before);
  const DeviceCopy starts = copy(starts_), used = copy(c_.used), table = copy(table_);
  const DeviceCopy entries = copy(c_.entries), slots = copy(given_slots_), scales = copy(scales_);
  const auto list = [](const DeviceCopy& x) { return static_cast<const std::int32_t*>(x.data()); };
  p.k.data = k.data(), p.v.data = v.data();
  p.k_cache.data = k_cache.data(), p.v_cache.data = v_cache.data();
  if (c_.q) p.q.data = q.data(), p.q_out.data = q_out.data();
  if (c_.rotary_dim) p.rotary_cos.data = cos.data(), p.rotary_sin.data = sin.data();
  if (p.k_descale.data)
    p.k_descale.data = p.v_descale.data = static_cast<const float*>(scales.data());
  p.cu_seqlens_q = list(starts), p.seqused_k = list(used);
  if (c_.where != Where::kSlots) p.seqlen_k = kRoom;
  if (c_.where == Where::kEntries) p.cache_batch_idx = list(entries), p.cache_batch_size = kBatch;
  if (c_.where == Where::kPages) p.page_table = {list(table), columns_, 0, 0};
  if (c_.where == Where::kSlots) p.slots = slots.data();
  if (c_.where == Where::kPages || c_.where == Where::kSlots)
    p.page_size = c_.page_size, p.num_pages = count_;
  append_kv(p);
  test::require(cudaDeviceSynchronize());
  const DeviceCopy* const copies[] = {&k_cache, &v_cache, &q_out};
  for (int i = 0; i < 3; ++i) {
    std::vector<unsigned char> got(outputs[i].bytes);
    copies[i]->copy_back(got.data());
    CHECK_FOR(got == outputs[i].want, "output " + std::to_string(i) + " of append to " +
                                          std::to_string(static_cast<int>(c_.where)) +
                                          ", pages of " + std::to_string(c_.page_size) +
                                          ", cache of " + to_string(c_.cache));
  }
}

std::vector<AppendCase> cases() {
  std::vector<AppendCase> all;
  for (const Where where : {Where::kRows, Where::kEntries, Where::kPages, Where::kSlots}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
      for (const DType cache : {dtype, DType::kInt8, DType::kFloat8E4M3}) {
        AppendCase c{where, dtype, cache};
        all.push_back(c);
        c.rotary_dim = 32, c.q = true, c.page_size = 1, c.wrong_starts = true;
        all.push_back(c);
        c.dim = 41, c.page_size = 3;  // number by number
        all.push_back(c);
      }
    }
    AppendCase c{where};
    c.used = {AppendProblem::kRoom, kMost, -1};
    all.push_back(c);
    c.used = {AppendProblem::kRoom - 1, kLeast, AppendProblem::kRoom - 2};
    all.push_back(c);
  }
  AppendCase entries{Where::kEntries};
  entries.entries = {-1, 3, kMost};
  all.push_back(entries);
  for (const int page_size : {1, 16}) {
    AppendCase c{Where::kPages};
    c.page_size = page_size, c.wrong_pages = true;
    all.push_back(c);
    c.where = Where::kSlots, c.wrong_pages = false;
    c.slots = {-1, -2, INT64_MAX, INT64_MIN, 3 * 48, 3 * 48 - 1};
    all.push_back(c);
    c.slots = {0, std::int64_t{kMost} + 1, std::int64_t{kLeast} - 1, 3 * 48 - 1, 1, -1};
    all.push_back(c);
  }
  return all;
}

}  // namespace

void test::run_append() {
  for (const AppendCase& c : cases()) AppendProblem(c).run();
}
