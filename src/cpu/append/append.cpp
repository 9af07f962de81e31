#include "core/problem/append.h"

#include <vector>

#include "core/operations/append.h"
#include "core/util/default_floats.h"
#include "core/validate/fail.h"
#include "cpu/convert.h"
#include "cpu/thread_pool.h"

namespace dlattn::cpu {
namespace {

using core::fail;

// Where a row goes, read once: what was checked must be what is used, whoever writes to the lists
// meanwhile.
struct Place {
  std::int64_t sequence = -1;  // < 0: the row is of none
  CacheRow to = nowhere();
  std::int64_t rotary_k = 0, rotary_q = 0;  // rows of the tables
};

// The rows of a sequence among all.
struct Rows {
  std::int64_t begin, count;
};

class Placement {
 public:
  explicit Placement(const AppendParams& p, std::int64_t max_seqlen_k = INT64_MAX)
      : p_(p),
        rotates_(p.rotary_cos.data),
        max_seqlen_k_(max_seqlen_k),
        places_(static_cast<std::size_t>(num_new_rows(p))) {
    std::int64_t begin = p.cu_seqlens_q ? first_offset() : 0;
    for (std::int64_t b = 0; b < p.batch_size; ++b) {
      const std::int64_t count = p.cu_seqlens_q ? count_of(b, begin) : p.seqlen_new;
      place(b, {begin, count});
      begin += count;
    }
  }

  std::vector<Place> take() { return std::move(places_); }

 private:
  std::int64_t first_offset() const {
    const std::int64_t first = p_.cu_seqlens_q[0];
    if (first < 0) fail("cu_seqlens_q[0] is ", first, "; accepted: 0 or more");
    return first;
  }

  std::int64_t count_of(std::int64_t b, std::int64_t begin) const {
    const std::int64_t end = p_.cu_seqlens_q[b + 1];
    if (end < begin) {
      fail("cu_seqlens_q[", b + 1, "] is ", end, ", less than cu_seqlens_q[", b, "] = ", begin,
           "; accepted: offsets that do not decrease");
    }
    if (end > p_.total_new) {
      fail("cu_seqlens_q[", b + 1, "] is ", end, "; accepted: up to the ", p_.total_new,
           " tokens of the tensor");
    }
    return end - begin;
  }

  // The position of a sequence's first new row, where positions count.
  std::int64_t checked_first(std::int64_t b, std::int64_t count) const {
    if (p_.slots && !rotates_) return 0;
    const std::int64_t room = p_.slots ? p_.rotary_positions : p_.seqlen_k;
    const std::int64_t most = max_seqlen_k_ < room ? max_seqlen_k_ : room;
    const char* const why = most < room ? ", which is max_seqlen_k"
                            : p_.slots  ? ", the rows of rotary_cos"
                                        : ", the room in the cache";
    if (count > most) {
      fail("cu_seqlens_q: sequence ", b, " has ", count, " new keys; accepted: up to ", most, why);
    }
    const std::int64_t first = p_.seqused_k[b];
    if (first < 0 || first > most - count) {
      fail("seqused_k[", b, "] is ", first, " with ", count, " new keys; accepted: 0 to ",
           most - count, ", so that they end by ", most, why);
    }
    return first;
  }

  std::int64_t checked_leftpad(std::int64_t b) const {
    const std::int64_t leftpad = p_.leftpad_k ? p_.leftpad_k[b] : 0;
    if (leftpad < 0) fail("leftpad_k[", b, "] is ", leftpad, "; accepted: 0 or more");
    return leftpad;
  }

  CacheRow checked_slot(std::int64_t n) const {
    const std::int64_t slot = slot_of(p_, n), most = p_.num_pages * p_.page_size - 1;
    if (slot < -1 || slot > most)
      fail("slots[", n, "] is ", slot, "; accepted: 0 to ", most, ", or -1 for none");
    return cache_row_of_slot(p_, slot);
  }

  CacheRow checked_row(std::int64_t b, std::int64_t position) const {
    if (p_.page_table.data) {
      const std::int64_t index = position / p_.page_size;
      const std::int64_t page = p_.page_table.data[b * p_.page_table.batch_stride + index];
      if (!is_within(page, p_.num_pages)) {
        fail("page_table[", b, ", ", index, "] is ", page, "; accepted: 0 to ", p_.num_pages - 1,
             ", the pages of the cache");
      }
      return {page, position % p_.page_size};
    }
    if (!p_.cache_batch_idx) return {b, position};
    const std::int64_t entry = p_.cache_batch_idx[b];
    if (!is_within(entry, p_.cache_batch_size)) {
      fail("cache_batch_idx[", b, "] is ", entry, "; accepted: 0 to ", p_.cache_batch_size - 1,
           ", the entries of the cache");
    }
    return {entry, position};
  }

  void place(std::int64_t b, const Rows& rows) {
    if (rows.count == 0) return;
    const std::int64_t first = checked_first(b, rows.count), leftpad = checked_leftpad(b);
    const auto rotary = [leftpad](std::int64_t position) {
      return position > leftpad ? position - leftpad : 0;
    };
    for (std::int64_t i = 0; i < rows.count; ++i) {
      Place& place = places_[static_cast<std::size_t>(rows.begin + i)];
      place.sequence = b;
      place.to = p_.slots ? checked_slot(rows.begin + i) : checked_row(b, first + i);
      place.rotary_k = rotary(first + i);
      place.rotary_q = rotary(p_.q_fixed_position ? first : first + i);
    }
  }

  const AppendParams& p_;
  const bool rotates_;
  const std::int64_t max_seqlen_k_;
  std::vector<Place> places_;
};

// One row of a head as it comes, rotated: T is the tensors' element.
template <typename T>
class RowWriter {
 public:
  using Real = decltype(to_float(T{}));

  explicit RowWriter(const AppendParams& p)
      : p_(p), half_(p.rotary_cos.data ? p.rotary_dim / 2 : 0) {}

  // `store(column, number)` takes the columns that are rotated, `copy(column)` the others. `row` is
  // that of the tables; < 0: nothing is rotated.
  template <typename Store, typename Copy>
  void write(const T* from, std::int64_t columns, std::int64_t row, Store store, Copy copy) const {
    const std::int64_t half = row < 0 ? 0 : half_;
    for (std::int64_t j = 0; j < half; ++j) {
      const std::int64_t c0 = p_.rotary_interleaved ? 2 * j : j;
      const std::int64_t c1 = p_.rotary_interleaved ? 2 * j + 1 : j + half;
      Real x0 = to_float(from[c0]), x1 = to_float(from[c1]);
      rotate_pair(table(p_.rotary_cos, row, j), table(p_.rotary_sin, row, j), &x0, &x1);
      store(c0, x0);
      store(c1, x1);
    }
    for (std::int64_t c = 2 * half; c < columns; ++c) copy(c);
  }

 private:
  static Real table(const TensorView& x, std::int64_t row, std::int64_t column) {
    const std::int64_t at = row * x.row_stride + column;
    if (x.dtype == DType::kFloat32) return static_cast<const float*>(x.data)[at];
    return to_float(static_cast<const T*>(x.data)[at]);
  }

  const AppendParams& p_;
  const std::int64_t half_;
};

template <typename T>
void append_head(const AppendParams& p, const TensorView& x, const MutableTensorView& cache,
                 const BasicTensorView<const float>& scales, std::int64_t columns, std::int64_t row,
                 const T* from, const Place& place, std::int64_t head) {
  const RowWriter<T> writer(p);
  const std::int64_t at = place.to.entry * cache.batch_stride + place.to.row * cache.row_stride +
                          head * cache.head_stride;
  if (cache.dtype == x.dtype) {
    T* const to = static_cast<T*>(cache.data) + at;
    writer.write(
        from, columns, row, [to](std::int64_t c, auto number) { from_float(number, &to[c]); },
        [to, from](std::int64_t c) { to[c] = from[c]; });
    return;
  }
  const float scale = scales.data[place.sequence * scales.batch_stride + head * scales.head_stride];
  auto* const to = static_cast<std::uint8_t*>(cache.data) + at;
  const auto store = [&](std::int64_t c, auto number) {
    to[c] = to_8_bits(static_cast<float>(number), scale, cache.dtype);
  };
  writer.write(from, columns, row, store, [&](std::int64_t c) { store(c, to_float(from[c])); });
}

template <typename T>
void append_row(const AppendParams& p, std::int64_t n, const Place& place) {
  if (place.sequence < 0) return;
  const std::int64_t batch = p.cu_seqlens_q ? 0 : place.sequence;
  const std::int64_t row = p.cu_seqlens_q ? n : n - place.sequence * p.seqlen_new;
  const auto row_of = [&](const TensorView& x, std::int64_t head) {
    return static_cast<const T*>(x.data) + batch * x.batch_stride + row * x.row_stride +
           head * x.head_stride;
  };
  if (place.to.entry >= 0) {
    for (std::int64_t h = 0; h < p.num_heads_kv; ++h) {
      append_head<T>(p, p.k, p.k_cache, p.k_descale, p.head_dim, place.rotary_k, row_of(p.k, h),
                     place, h);
      append_head<T>(p, p.v, p.v_cache, p.v_descale, p.head_dim_v, -1, row_of(p.v, h), place, h);
    }
  }
  if (!p.q.data) return;
  const RowWriter<T> writer(p);
  for (std::int64_t h = 0; h < p.num_heads; ++h) {
    const T* const from = row_of(p.q, h);
    T* const to = static_cast<T*>(p.q_out.data) + batch * p.q_out.batch_stride +
                  row * p.q_out.row_stride + h * p.q_out.head_stride;
    writer.write(
        from, p.head_dim, place.rotary_q,
        [to](std::int64_t c, auto number) { from_float(number, &to[c]); },
        [to, from](std::int64_t c) { to[c] = from[c]; });
  }
}

template <typename T>
void append_rows(const AppendParams& p, int num_threads, Poll poll) {
  const std::vector<Place> places = Placement(p).take();
  const auto rows = static_cast<std::int64_t>(places.size());
  // Enough numbers a task that handing it out costs little.
  const std::int64_t numbers =
      p.num_heads_kv * (p.head_dim + p.head_dim_v) + (p.q.data ? p.num_heads * p.head_dim : 0);
  const std::int64_t rows_per_task = 1 + 65536 / numbers;
  const std::int64_t num_tasks = (rows + rows_per_task - 1) / rows_per_task;
  const auto append_some = [&](std::int64_t task, int) {
    const std::int64_t begin = task * rows_per_task;
    const std::int64_t end = begin + rows_per_task < rows ? begin + rows_per_task : rows;
    for (std::int64_t n = begin; n < end; ++n)
      append_row<T>(p, n, places[static_cast<std::size_t>(n)]);
  };
  parallel_for(num_tasks, num_tasks > 1 ? num_threads : 1, append_some, poll);
}

}  // namespace

void check_lists(const AppendParams& params, std::int64_t max_seqlen_k) {
  const core::DefaultFloats floats;
  const Placement checked(params, max_seqlen_k);
}

void append_kv(const AppendParams& params, int num_threads, Poll poll) {
  const core::DefaultFloats floats;
  switch (params.k.dtype) {
    case DType::kFloat16:
      return append_rows<Half>(params, num_threads, poll);
    case DType::kBFloat16:
      return append_rows<BFloat16>(params, num_threads, poll);
    case DType::kFloat32:
      return append_rows<float>(params, num_threads, poll);
    case DType::kFloat64:
      return append_rows<double>(params, num_threads, poll);
    case DType::kFloat8E4M3:
    case DType::kInt8:
      break;  // validate refuses it
  }
}

}  // namespace dlattn::cpu
