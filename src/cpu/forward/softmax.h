#pragma once

#include <math.h>

#include "cpu/forward/scratch.h"
#include "cpu/simd_math.h"

// The running softmax of a task's rows: what they carry from key tile to key tile.
//
// A probability is exp2((score - row max) * factor). The difference comes first, so p <= 1 and
// equal scores have equal probabilities whatever the scores' magnitude; what all scores of a row
// have in common is never multiplied, so never rounded.
namespace dlattn::cpu::DLATTN_CPU_ISA {

// Probabilities are kept times 2^-kShift: then sums of 2^kShift of them times V stay finite for
// every finite V. It costs nothing, being a part of exp2's exponent.
constexpr int kShift = 12;
// After so many tiles the sums go to totals in double. A sum in float stops growing at 2^24 keys,
// and is far off before. These are 3072 keys of float, so fewer than 2^kShift.
constexpr std::int64_t kTilesPerRun = 32;
// Totals are scaled by that much in turn, which leaves room for 2^26 keys in all.
constexpr int kTotalShift = 14;

template <typename T>
class RunningSoftmax {
 public:
  // The totals need memory only where a task may have more tiles than a run.
  RunningSoftmax(const State<T>& state, std::int64_t block_m, std::int64_t head_dim_v,
                 bool may_need_totals, Arena* arena)
      : state_(state), ld_(block_m), size_(block_m * head_dim_v) {
    rescale_ = arena->take<T>(ld_);
    totals_.o_t = arena->take<double>(may_need_totals ? size_ : 0);
    totals_.row_sum = arena->take<double>(may_need_totals ? ld_ : 0);
    totals_.row_max = arena->take<T>(may_need_totals ? ld_ : 0);
    keep_ = arena->take<double>(may_need_totals ? ld_ : 0);
  }

  // `unit` times a score is the score in natural units. All parts of a task's keys have to agree on
  // `has_totals`.
  void set_up(double unit, bool has_totals) {
    unit_ = unit;
    to_log2_ = static_cast<T>(unit * MathConstants<double>::kLog2E);
    has_totals_ = has_totals;
  }

  void clear() {
    tiles_in_run_ = 0;
    fill(state_.row_max, ld_, -static_cast<T>(INFINITY));
    fill(state_.row_sum, ld_, T(0));
    fill(state_.o_t, size_, T(0));
    if (!has_totals_) return;
    fill(totals_.row_max, ld_, -static_cast<T>(INFINITY));
    fill(totals_.row_sum, ld_, 0.0);
    fill(totals_.o_t, size_, 0.0);
  }

  // Scores S^T of `count` keys become P^T, unnormalised; rescale() is what the sums up to here are
  // worth beside them. A NaN score is passed over by the maximum and reaches the sum.
  void step(T* s_t, std::int64_t count) {
    for (std::int64_t lane = 0; lane < ld_; lane += kWidth<T>) {
      const Vec<T> old_max = load(state_.row_max + lane);
      Vec<T> row_max = old_max;
      for (std::int64_t n = 0; n < count; ++n) row_max = max(load(s_t + n * ld_ + lane), row_max);
      store(state_.row_max + lane, row_max);
      const Vec<T> top = zero_if_nothing_seen(row_max);
      const Vec<T> rescale = exp2<T>((old_max - top) * to_log2_);
      store(rescale_ + lane, rescale);
      Vec<T> sum = {};
      for (std::int64_t n = 0; n < count; ++n) {
        const Vec<T> p = exp2<T, kShift>((load(s_t + n * ld_ + lane) - top) * to_log2_);
        store(s_t + n * ld_ + lane, p);
        sum += p;
      }
      store(state_.row_sum + lane, load(state_.row_sum + lane) * rescale + sum);
    }
  }

  // The same of up to kWidth rows whose scores have keys in the lanes, S [num_rows][ld], in whole
  // vectors. Their sums are add_sums()'s to add.
  void step_rows(T* s, std::int64_t ld, std::int64_t num_rows, std::int64_t count) {
    fill(rescale_, kWidth<T>, -static_cast<T>(INFINITY));
    for (std::int64_t r = 0; r < num_rows; ++r) {
      Vec<T> largest = broadcast(-static_cast<T>(INFINITY));
      for (std::int64_t n = 0; n < count; n += kWidth<T>)
        largest = max(load(s + r * ld + n), largest);
      for (int c = 0; c < kWidth<T>; ++c)
        rescale_[r] = largest[c] > rescale_[r] ? largest[c] : rescale_[r];
    }
    const Vec<T> old_max = load(state_.row_max);
    const Vec<T> row_max = max(load(rescale_), old_max);
    store(state_.row_max, row_max);
    const Vec<T> top = zero_if_nothing_seen(row_max);
    store(rescale_, exp2<T>((old_max - top) * to_log2_));
    for (std::int64_t r = 0; r < num_rows; ++r) {
      const T row_top = state_.row_max[r] == -static_cast<T>(INFINITY) ? T(0) : state_.row_max[r];
      for (std::int64_t n = 0; n < count; n += kWidth<T>) {
        T* const at = s + r * ld + n;
        store(at, exp2<T, kShift>((load(at) - row_top) * to_log2_));
      }
    }
  }

  // Adds what step_rows()'s tile adds to the sums of row r: of its probabilities, and O.
  void add_sums(std::int64_t r, T row_sum, const T* o) {
    const T rescale = rescale_[r];
    state_.row_sum[r] = state_.row_sum[r] * rescale + row_sum;
    const std::int64_t head_dim_v = size_ / ld_;
    T* const o_t = state_.o_t + r;
    for (std::int64_t d = 0; d < head_dim_v; ++d) o_t[d * ld_] = o_t[d * ld_] * rescale + o[d];
  }

  const T* rescale() const { return rescale_; }

  // After the tile's P V has been added to the output.
  void end_tile() {
    if (has_totals_ && ++tiles_in_run_ == kTilesPerRun) end_run();
  }

  void end_keys() {
    if (!has_totals_) return;
    end_run();
    for (std::int64_t i = 0; i < size_; ++i) state_.o_t[i] = static_cast<T>(totals_.o_t[i]);
    for (std::int64_t r = 0; r < ld_; ++r) state_.row_sum[r] = static_cast<T>(totals_.row_sum[r]);
  }

  // Adds another part of the keys.
  void add(const State<T>& other) {
    for (std::int64_t lane = 0; lane < ld_; lane += kWidth<T>) {
      const Vec<T> own_max = load(state_.row_max + lane);
      const Vec<T> row_max = max(own_max, load(other.row_max + lane));
      const Vec<T> top = zero_if_nothing_seen(row_max);
      const Vec<T> weight = exp2<T>((own_max - top) * to_log2_);
      const Vec<T> other_weight = exp2<T>((load(other.row_max + lane) - top) * to_log2_);
      store(state_.row_max + lane, row_max);
      store(state_.row_sum + lane,
            load(state_.row_sum + lane) * weight + load(other.row_sum + lane) * other_weight);
      for (std::int64_t at = lane; at < size_; at += ld_) {
        store(state_.o_t + at,
              load(state_.o_t + at) * weight + load(other.o_t + at) * other_weight);
      }
    }
  }

  // A row's denominator, times e^-top. In double and natural units, which hold a sink of any size.
  struct Denominator {
    double top;
    double total;
    double log() const { return total == 0.0 ? -INFINITY : top + ::log(total); }
  };

  // The row's, from which follows what its output is to be multiplied by.
  Denominator finish(std::int64_t r, double sink) {
    const double scale = 1 << (has_totals_ ? kShift + kTotalShift : kShift);
    const double sum = static_cast<double>(state_.row_sum[r]) * scale;
    double top = static_cast<double>(state_.row_max[r]) * unit_;
    double total = sum;
    double weight = 1.0;  // of the sum, once the sink may have raised the maximum
    if (sink != -INFINITY) {
      const double row_max = top;
      top = row_max > sink ? row_max : sink;
      weight = row_max == top ? 1.0 : ::exp(row_max - top);
      total = sum * weight + (sink == top ? 1.0 : ::exp(sink - top));
    }
    rescale_[r] = total == 0.0 ? T(0) : static_cast<T>(weight * scale / total);
    return {top, total};
  }

  // The output of a row that is finished; `row` has room for whole vectors. The sums of a row that
  // saw no key (0 times V, a NaN perhaps) do not count, and a mean of finite V is not rounded to
  // infinity. `v_descale` is what V's elements count.
  void copy_row(std::int64_t r, T v_descale, T* row) const {
    const std::int64_t head_dim_v = size_ / ld_;
    if (rescale_[r] == T(0)) {
      fill(row, head_dim_v, T(0));
      return;
    }
    for (std::int64_t d = 0; d < head_dim_v; ++d) row[d] = state_.o_t[d * ld_ + r];
    constexpr T kLargest = MathConstants<T>::kLargest;
    for (std::int64_t d = 0; d < head_dim_v; d += kWidth<T>) {
      const Vec<T> o = load(row + d);
      const Vec<T> value = o * rescale_[r];
      const Vec<T> limited = -max(broadcast(-kLargest), -max(broadcast(-kLargest), value));
      store(row + d, (o - o == T(0) ? limited : value) * v_descale);
    }
  }

 private:
  template <typename U>
  static void fill(U* to, std::int64_t count, U value) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = value;
  }

  static Vec<T> zero_if_nothing_seen(Vec<T> row_max) {
    return row_max == -static_cast<T>(INFINITY) ? Vec<T>{} : row_max;
  }

  // Adds the run's sums to the totals, whose maximum is no larger, and begins another run.
  void end_run() {
    constexpr double kScale = 1.0 / (1 << kTotalShift);
    tiles_in_run_ = 0;
    for (std::int64_t r = 0; r < ld_; ++r) {
      const double old_max = static_cast<double>(totals_.row_max[r]);
      const double row_max = static_cast<double>(state_.row_max[r]);
      keep_[r] = old_max == row_max ? 1.0 : ::exp((old_max - row_max) * unit_);
      totals_.row_max[r] = state_.row_max[r];
      totals_.row_sum[r] = totals_.row_sum[r] * keep_[r] + state_.row_sum[r] * kScale;
      state_.row_sum[r] = T(0);
    }
    for (std::int64_t at = 0; at < size_; at += ld_) {
      for (std::int64_t r = 0; r < ld_; ++r) {
        totals_.o_t[at + r] = totals_.o_t[at + r] * keep_[r] + state_.o_t[at + r] * kScale;
        state_.o_t[at + r] = T(0);
      }
    }
  }

  const State<T> state_;
  State<T, double> totals_;  // of the runs that have ended
  const std::int64_t ld_;    // block_m
  const std::int64_t size_;  // of O^T
  double unit_ = 1.0;
  T to_log2_ = 0;  // turns differences of scores into powers of two
  bool has_totals_ = false;
  std::int64_t tiles_in_run_ = 0;
  T* rescale_;    // [block_m]
  double* keep_;  // [block_m], what the totals are worth beside a run
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
