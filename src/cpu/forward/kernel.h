#pragma once

#include <float.h>
#include <math.h>

#include "core/problem/descales.h"
#include "cpu/elements.h"
#include "cpu/forward/few_rows.h"
#include "cpu/forward/key_rows.h"
#include "cpu/forward/scratch.h"
#include "cpu/forward/softmax.h"
#include "cpu/forward/task.h"
#include "cpu/outer_product.h"
#include "cpu/score_tile.h"

// The CPU kernel: attention of block_m queries, one key tile after the other, with a streaming
// softmax.
//
// Scores of a tile stand transposed, keys in rows and queries in lanes, so the softmax runs down
// the rows without a reduction across lanes. The state per query is the running maximum, the sum
// of the probabilities and the unnormalised output; the latter two are rescaled when a tile raises
// the maximum (softmax.h).
namespace dlattn::cpu::DLATTN_CPU_ISA {

template <typename T>
constexpr int kMaxBlockM = sizeof(T) == 4 ? 64 : 32;
template <typename T>
constexpr int kBlockN = sizeof(T) == 4 ? 96 : 48;

template <typename T>
Tiles tiles_for(std::int64_t rows) {
  Tiles tiles;
  tiles.block_m = kWidth<T>;
  while (tiles.block_m < rows && tiles.block_m < kMaxBlockM<T>) tiles.block_m *= 2;
  tiles.block_n = kBlockN<T>;
  return tiles;
}

// `T`: float or double, the type that is computed with.
template <typename T>
class TaskKernel {
 public:
  // `states` holds the parts of the task if its keys are split, and is null otherwise.
  TaskKernel(const AttentionParams& params, const Tiles& tiles, const Task& task, void* scratch,
             void* states)
      : p_(params),
        t_(task),
        ld_(tiles.block_m),
        block_n_(tiles.block_n),
        key_size_(size_of(params.k.dtype)),
        arena_(scratch),
        states_(static_cast<char*>(states)),
        state_(part(task.split)),
        softmax_(state_, ld_, params.head_dim_v, has_totals(params.seqlen_k), &arena_),
        scores_(params, task.batch, task.len_q, task.len_k, ld_, block_n_, &arena_) {
    q_t_ = arena_.take<T>(p_.head_dim * ld_);
    s_t_ = arena_.take<T>(block_n_ * ld_);
    const bool copies = converts() || KeyRows::has_pages(p_);
    k_tile_ = arena_.take<T>((copies ? block_n_ : kWidth<T>)*p_.head_dim);
    v_tile_ = arena_.take<T>(copies ? block_n_ * p_.head_dim_v : 0);
    row_ = arena_.take<T>(max_int(p_.head_dim, p_.head_dim_v));
    o_ = arena_.take<T>(kFewRows<T> * p_.head_dim_v);
  }

  std::int64_t scratch_bytes() const { return arena_.used(); }

  void run() {
    locate_rows();
    load_queries();
    softmax_.clear();
    const Range<std::int64_t> keys = scores_.keys();
    std::int64_t begin = max_int(keys.begin, t_.leftpad_k), end = keys.end;
    if (t_.num_splits > 1) {
      const std::int64_t tiles = (max_int(0, end - begin) + block_n_ - 1) / block_n_;
      const std::int64_t keys = (tiles + t_.num_splits - 1) / t_.num_splits * block_n_;
      begin += t_.split * keys;
      end = min_int(end, begin + keys);
    }
    for (std::int64_t j = begin; j < end; j += block_n_) {
      const std::int64_t count = min_int(block_n_, end - j);
      const std::int64_t next = min_int(block_n_, max_int(0, end - j - block_n_));
      if (!has_few_rows()) {
        tile(j, count, next);
        continue;
      }
      with_rows<T>(t_.num_rows, [&](auto rows) { few_rows_tile<rows.kNumRows>(j, count, next); });
    }
    softmax_.end_keys();
    if (t_.num_splits == 1) finish();
  }

  // Adds the other parts to part 0, in order, and finishes it.
  void merge() {
    locate_rows();
    for (int split = 1; split < t_.num_splits; ++split) softmax_.add(part(split));
    finish();
  }

 private:
  // Whether elements of k and v are of another type than T.
  bool converts() const { return key_size_ != static_cast<std::int64_t>(sizeof(T)); }
  // Only 8-bit elements have any.
  bool has_descales() const { return key_size_ == 1; }

  State<T> part(int split) {
    if (!states_) return State<T>(p_, ld_, &arena_);
    Arena sizes(nullptr);
    State<T>(p_, ld_, &sizes);
    Arena memory(states_ + split * sizes.used());
    return State<T>(p_, ld_, &memory);
  }

  // Whether keys stand in the lanes, and not queries. The bits are the same.
  bool has_few_rows() const {
    return t_.num_rows <= kFewRows<T> && ld_ == kWidth<T> && p_.head_dim % kColumns<T> == 0 &&
           p_.head_dim_v >= kWidth<T>;
  }

  bool has_totals(std::int64_t keys) const { return keys > kTilesPerRun * block_n_; }
  bool varlen() const { return p_.cu_seqlens_q != nullptr; }

  void locate_rows() {
    const std::int64_t group = p_.num_heads / p_.num_heads_kv;
    // By the sequence's own length, so that its result has the same bits in any batch.
    softmax_.set_up(scores_.adjusts() ? 1.0 : p_.softmax_scale, has_totals(t_.len_k));

    for (std::int64_t r = 0; r < ld_; ++r) {
      // Lanes beyond the task's rows repeat the last one, so that no tile is visited for them.
      const std::int64_t row = t_.row_begin + min_int(r, t_.num_rows - 1);
      scores_.set_lane(r, row / group, t_.head_kv * group + row % group);
    }
  }

  // The descales of a row's head.
  Descales descales(std::int64_t r) const {
    return descales_of<std::int64_t>(p_, t_.batch, scores_.head(r), t_.head_kv);
  }

  void load_queries() {
    if (t_.num_rows < ld_)
      std::memset(q_t_, 0, static_cast<std::size_t>(p_.head_dim * ld_) * sizeof(T));
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const char* const from =
          static_cast<const char*>(p_.q.data) + place(p_.q, r) * size_of(p_.q.dtype);
      read_elements(p_.q.dtype, from, 1, 0, p_.head_dim, row_);
      const T factor = has_descales() ? static_cast<T>(descales(r).scores) : T(1);
      for (std::int64_t d = 0; d < p_.head_dim; ++d) q_t_[d * ld_ + r] = row_[d] * factor;
    }
  }

  // Where the row begins in q or out.
  template <typename View>
  std::int64_t place(const View& x, std::int64_t r) const {
    return (varlen() ? 0 : t_.batch * x.batch_stride) +
           (t_.first_q + scores_.query(r)) * x.row_stride + scores_.head(r) * x.head_stride;
  }

  KeyRows k_rows() const { return {p_, t_, p_.k, p_.head_dim}; }
  KeyRows v_rows() const { return {p_, t_, p_.v, p_.head_dim_v}; }

  // Makes keys [j, j + count) the left operand: in place, or converted to `tile`, or copied there
  // if they lie in several pages.
  void set_left(const KeyRows& rows, std::int64_t j, std::int64_t count, T* tile,
                ProductArgs<T>* args) {
    if (!converts() && rows.run(j, count) == count) {
      args->left = reinterpret_cast<const T*>(rows.row(j));
      args->left_stride = rows.stride();
      return;
    }
    args->left = tile;
    args->left_stride = rows.width();
    for (std::int64_t n = 0; n < count;) {
      const std::int64_t run = rows.run(j + n, count - n);
      read_elements(p_.k.dtype, rows.row(j + n), run, rows.stride(), rows.width(),
                    tile + n * rows.width());
      n += run;
    }
  }

  // The first page's, if they lie in several.
  Upcoming upcoming(const KeyRows& rows, std::int64_t j, std::int64_t count) const {
    return {rows.row(j), rows.stride() * key_size_, rows.width() * key_size_, rows.run(j, count)};
  }

  // Keys [j, j + count), with `next` keys to follow.
  void tile(std::int64_t j, std::int64_t count, std::int64_t next) {
    ProductArgs<T> args;
    args.block_m = ld_;
    args.rescale = softmax_.rescale();

    // S^T = K Q^T
    set_left(k_rows(), j, count, k_tile_, &args);
    args.right = q_t_;
    args.depth = p_.head_dim;
    args.result = s_t_;
    args.upcoming = upcoming(v_rows(), j, count);
    multiply<T, Product::kScores>(count, args);

    if (scores_.adjusts()) scores_.adjust(s_t_, j, count, t_.num_rows);
    scores_.hide(s_t_, j, count);
    softmax_.step(s_t_, count);

    // O^T = O^T rescaled + V^T P^T
    set_left(v_rows(), j, count, v_tile_, &args);
    args.right = s_t_;
    args.depth = count;
    args.result = state_.o_t;
    args.upcoming = next > 0 ? upcoming(k_rows(), j + count, next) : Upcoming();
    multiply<T, Product::kOutput>(p_.head_dim_v, args);
    softmax_.end_tile();
  }

  // With so little to compute, asking for rows side by side, which the processor does by itself,
  // costs more than it saves.
  static Upcoming scattered(const Upcoming& rows) {
    return rows.stride == rows.row_bytes ? Upcoming() : rows;
  }

  // tile() with keys in the lanes of scores and the columns of V in those of the output.
  template <int kRows>
  void few_rows_tile(std::int64_t j, std::int64_t count, std::int64_t next) {
    ProductArgs<T> keys;
    set_left(k_rows(), j, count, k_tile_, &keys);
    FewRowsArgs<T> args;
    args.left = keys.left, args.left_stride = keys.left_stride;
    args.right = q_t_, args.ld_right = ld_;
    args.columns = p_.head_dim;
    args.result = s_t_, args.ld_result = block_n_;
    args.num_keys = count / kWidth<T> * kWidth<T>;
    args.upcoming = scattered(upcoming(v_rows(), j, count));
    few_rows_scores<T, kRows>(args);
    if (const std::int64_t rest = count - args.num_keys) {
      // A last vector: of a copy, as there may be nothing behind the last key.
      const T* const from = args.left + args.num_keys * args.left_stride;
      args.result += args.num_keys;
      args.left = from, args.num_keys = kWidth<T>;
      if (keys.left != k_tile_) {
        for (std::int64_t n = 0; n < rest; ++n)
          convert_row(from + n * args.left_stride, p_.head_dim, k_tile_ + n * p_.head_dim);
        args.left = k_tile_, args.left_stride = p_.head_dim;
      }
      args.upcoming = {};
      few_rows_scores<T, kRows>(args);
    }

    for (std::int64_t r = 0; r < kRows; ++r) {
      T* const s = s_t_ + r * block_n_;
      if (scores_.adjusts()) scores_.adjust_row(s, r, j, count);
      scores_.hide_row(s, r, j, count);
    }
    softmax_.step_rows(s_t_, block_n_, kRows, count);

    ProductArgs<T> values;
    set_left(v_rows(), j, count, v_tile_, &values);
    args.left = values.left, args.left_stride = values.left_stride;
    args.right = s_t_, args.ld_right = block_n_;
    args.columns = p_.head_dim_v, args.num_keys = count;
    args.result = o_, args.ld_result = p_.head_dim_v;
    T row_sum[kRows];
    args.row_sum = row_sum;
    if (next > 0) args.upcoming = scattered(upcoming(k_rows(), j + count, next));
    few_rows_output<T, kRows>(args);
    for (std::int64_t r = 0; r < kRows; ++r)
      softmax_.add_sums(r, row_sum[r], o_ + r * p_.head_dim_v);
    softmax_.end_tile();
  }

  void finish() {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const double sink =
          p_.sinks.data ? p_.sinks.data[scores_.head(r) * p_.sinks.head_stride] : -INFINITY;
      const auto denominator = softmax_.finish(r, sink);
      if (p_.lse.data) {
        p_.lse.data[(varlen() ? 0 : t_.batch * p_.lse.batch_stride) +
                    scores_.head(r) * p_.lse.head_stride + t_.first_q + scores_.query(r)] =
            saturated(denominator.log());
      }
    }
    write_rows();
  }

  // Beyond float, where only float64's scores get, lse is the nearest number: the row is not empty.
  static float saturated(double lse) {
    if (lse - lse == 0.0 && lse > FLT_MAX) return FLT_MAX;
    if (lse - lse == 0.0 && lse < -FLT_MAX) return -FLT_MAX;
    return static_cast<float>(lse);
  }

  void write_rows() {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      softmax_.copy_row(r, has_descales() ? static_cast<T>(descales(r).v) : T(1), row_);
      write_elements(p_.out.dtype, row_, p_.head_dim_v,
                     static_cast<char*>(p_.out.data) + place(p_.out, r) * size_of(p_.out.dtype));
    }
  }

  const AttentionParams& p_;
  const Task& t_;
  const std::int64_t ld_;  // block_m
  const std::int64_t block_n_;
  const std::int64_t key_size_;  // bytes of an element of k and v
  Arena arena_;
  char* const states_;
  const State<T> state_;
  RunningSoftmax<T> softmax_;

  ScoreTile<T> scores_;

  T *q_t_, *s_t_;               // [head_dim, block_m], [block_n, block_m]
  T *k_tile_, *v_tile_, *row_;  // [block_n, head_dim], [block_n, head_dim_v], [either head dim]
  T* o_;                        // [kFewRows, head_dim_v]
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
