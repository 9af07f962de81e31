#pragma once

#include <math.h>

#include <type_traits>

#include "core/problem/positions.h"
#include "core/problem/score.h"
#include "cpu/arena.h"
#include "cpu/columns.h"
#include "cpu/simd_math.h"
#include "dlattn/forward.h"

// The scores of a tile, from the products q.k on: scale, softcap, ALiBi, bias, mask and positions.
// Keys stand in rows and queries in lanes.
namespace dlattn::cpu::DLATTN_CPU_ISA {

DLATTN_INLINE std::int64_t min_int(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
DLATTN_INLINE std::int64_t max_int(std::int64_t a, std::int64_t b) {
  return a > b ? a : b;
}
DLATTN_INLINE std::int64_t clamp_int(std::int64_t x, std::int64_t low, std::int64_t high) {
  return max_int(low, min_int(x, high));
}

// `T`: float or double, the type that scores are computed in.
template <typename T>
class ScoreTile {
 public:
  // The scores of sequence `batch`, with `ld` lanes, and up to block_n keys at a time.
  ScoreTile(const AttentionParams& params, std::int64_t batch, std::int64_t len_q,
            std::int64_t len_k, std::int64_t ld, std::int64_t block_n, Arena* arena)
      : p_(params),
        batch_(batch),
        ld_(ld),
        block_n_(block_n),
        mask_(window_of<std::int64_t>(params), position_shift(params.causal, len_q, len_k), len_k),
        adjusts_(p_.softcap > 0 || p_.alibi_slopes.data || p_.bias.data || p_.mask.data) {
    slope_ = arena->take<T>(ld_);
    distance_ = arena->take<T>(ld_);
    first_key_ = arena->take<LaneInt<T>>(ld_);
    end_key_ = arena->take<LaneInt<T>>(ld_);
    query_ = arena->take<std::int64_t>(ld_);
    head_ = arena->take<std::int64_t>(ld_);
    rows_ = arena->take<T>(p_.bias.data || p_.mask.data ? kWidth<T> * block_n : 0);
    row_slope_ = arena->take<T>(p_.alibi_slopes.data ? block_n : 0);
    row_distance_ = arena->take<T>(p_.alibi_slopes.data ? block_n : 0);
  }

  // Which query and head lane r has; lanes ascend in their queries.
  void set_lane(std::int64_t r, std::int64_t query, std::int64_t head) {
    query_[r] = query;
    head_[r] = head;
    slope_[r] = p_.alibi_slopes.data
                    ? limited_slope<T>(p_.alibi_slopes.data[batch_ * p_.alibi_slopes.batch_stride +
                                                            head * p_.alibi_slopes.head_stride])
                    : T(0);
  }
  std::int64_t query(std::int64_t r) const { return query_[r]; }
  std::int64_t head(std::int64_t r) const { return head_[r]; }
  const PositionMask<std::int64_t>& mask() const { return mask_; }

  // Whether scores are more than the product times softmax_scale.
  bool adjusts() const { return adjusts_; }
  // The keys that a lane's query sees.
  Range<std::int64_t> keys() const { return mask_.any_row(query_[0], query_[ld_ - 1]); }

  // Scale, softcap, ALiBi, bias and mask of the first `num_rows` lanes and keys [j, j + count).
  // `slopes`, unless it is null, receives the derivative of the softcap.
  void adjust(T* s_t, std::int64_t j, std::int64_t count, std::int64_t num_rows,
              T* slopes = nullptr) {
    for (std::int64_t r = 0; r < ld_; ++r)
      distance_[r] = static_cast<T>(mask_.position(query_[r]) - j);
    modify(s_t, count, ld_, slope_, distance_, slopes);
    if (p_.bias.data) add_bias(s_t, j, count, num_rows);
    if (p_.mask.data) apply_mask(s_t, j, count, num_rows);
  }

  // The same of the scores of row r, with keys in the lanes: whole vectors of them, of which those
  // behind the last key are of no matter.
  void adjust_row(T* s, std::int64_t r, std::int64_t j, std::int64_t count) {
    const std::int64_t lanes = (count + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
    if (p_.alibi_slopes.data) {
      const T distance = static_cast<T>(mask_.position(query_[r]) - j);
      for (std::int64_t n = 0; n < lanes; ++n) {
        row_slope_[n] = slope_[r];
        row_distance_[n] = distance - static_cast<T>(n);
      }
    }
    modify(s, 1, lanes, row_slope_, row_distance_, nullptr);
    if (p_.bias.data) {
      read_bias(r, j, count, rows_);
      const bool small = is_small(rows_, count);
      for (std::int64_t n = 0; n < count; n += kWidth<T>)
        store(s + n, biased(load(s + n), load(rows_ + n), small));
    }
    if (p_.mask.data) {
      read_mask(r, j, count, rows_);
      for (std::int64_t n = 0; n < count; n += kWidth<T>)
        store(s + n, masked(load(s + n), load(rows_ + n)));
    }
  }

  // -inf where causality or the window forbid the key.
  void hide(T* s_t, std::int64_t j, std::int64_t count) {
    if (contains_all(mask_.every_row(query_[0], query_[ld_ - 1]), j, count)) return;
    typedef LaneInt<T> Int __attribute__((vector_size(kVectorBytes)));
    const Vec<T> minus_inf = broadcast(-static_cast<T>(INFINITY));
    for (std::int64_t r = 0; r < ld_; ++r) {
      const Range<std::int64_t> keys = mask_.row(query_[r], j);
      first_key_[r] = static_cast<LaneInt<T>>(clamp_int(keys.begin, 0, count));
      end_key_[r] = static_cast<LaneInt<T>>(clamp_int(keys.end, 0, count));
    }
    for (std::int64_t lane = 0; lane < ld_; lane += kWidth<T>) {
      Int first, end;
      std::memcpy(&first, first_key_ + lane, sizeof(first));
      std::memcpy(&end, end_key_ + lane, sizeof(end));
      for (std::int64_t n = 0; n < count; ++n) {
        const Int key = Int{} + static_cast<LaneInt<T>>(n);
        const Int seen = (key >= first) & (key < end);
        const Vec<T> score = load(s_t + n * ld_ + lane);
        store(s_t + n * ld_ + lane, seen ? score : minus_inf);
      }
    }
  }

  // The same of row r, with keys in the lanes; and of lanes behind the last key.
  void hide_row(T* s, std::int64_t r, std::int64_t j, std::int64_t count) const {
    const std::int64_t lanes = (count + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
    const Range<std::int64_t> keys = mask_.row(query_[r], j);
    const std::int64_t begin = clamp_int(keys.begin, 0, count);
    const std::int64_t end = clamp_int(keys.end, begin, count);
    for (std::int64_t n = 0; n < begin; ++n) s[n] = -static_cast<T>(INFINITY);
    for (std::int64_t n = end; n < lanes; ++n) s[n] = -static_cast<T>(INFINITY);
  }

 private:
  // Scale, softcap and ALiBi of `count` rows of `lanes` scores: the distance of a score is that of
  // its lane, less its row. Not inlined, so that its roundings are the same wherever it is called:
  // compilers may fuse a product and a sum in one place and not in another.
  __attribute__((noinline)) void modify(T* s, std::int64_t count, std::int64_t lanes,
                                        const T* slope, const T* distance, T* slopes) const {
    const T scale = static_cast<T>(p_.softmax_scale);
    const T cap = static_cast<T>(p_.softcap);
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t lane = 0; lane < lanes; lane += kWidth<T>) {
        Vec<T> score = softcapped(load(s + n * lanes + lane) * scale, cap,
                                  [](Vec<T> x) { return tanh<T>(x); });
        if (slopes && cap != T(0)) {
          const Vec<T> ratio = score / cap;
          store(slopes + n * lanes + lane, T(1) - ratio * ratio);
        }
        if (p_.alibi_slopes.data) {
          // The magnitude comes last: it keeps the product from being fused with the difference, so
          // that keys at one distance have one penalty, which may be large enough to absorb scores.
          const Vec<T> penalty = load(slope + lane) * (load(distance + lane) - static_cast<T>(n));
          const Vec<T> magnitude = penalty < T(0) ? -penalty : penalty;
          score -= load(slope + lane) < T(0) ? -magnitude : magnitude;
        }
        store(s + n * lanes + lane, score);
      }
    }
  }

  // Calls function(score, x) for the scores of the first num_rows lanes, a vector at a time, with
  // what read(r, row) leaves for the keys of a lane. Rows of x run across the lanes.
  template <typename Read, typename Function>
  void for_each_score(T* s_t, std::int64_t count, std::int64_t num_rows, const Read& read,
                      const Function& function) {
    for (std::int64_t lane = 0; lane < num_rows; lane += kWidth<T>) {
      for (std::int64_t r = 0; r < kWidth<T>; ++r) {
        T* const row = rows_ + r * block_n_;
        if (lane + r < num_rows) {
          read(lane + r, row);
        } else {
          for (std::int64_t n = 0; n < count; ++n) row[n] = T(0);
        }
      }
      for (std::int64_t n = 0; n < count; n += kColumns<T>) {
        Vec<T> x[kColumns<T>];
        load_columns(rows_ + n, block_n_, x);
        for (std::int64_t c = 0; c < kColumns<T> && n + c < count; ++c) {
          T* const score = s_t + (n + c) * ld_ + lane;
          store(score, function(load(score), x[c]));
        }
      }
    }
  }

  void add_bias(T* s_t, std::int64_t j, std::int64_t count, std::int64_t num_rows) {
    bool small = true;
    const auto read = [&](std::int64_t r, T* row) {
      read_bias(r, j, count, row);
      small = is_small(row, count) && small;
    };
    for_each_score(s_t, count, num_rows, read,
                   [&](Vec<T> score, Vec<T> bias) { return biased(score, bias, small); });
  }

  void apply_mask(T* s_t, std::int64_t j, std::int64_t count, std::int64_t num_rows) {
    for_each_score(
        s_t, count, num_rows, [&](std::int64_t r, T* row) { read_mask(r, j, count, row); },
        [](Vec<T> score, Vec<T> mask) { return masked(score, mask); });
  }

  // The biases of row r, to[0 .. count).
  void read_bias(std::int64_t r, std::int64_t j, std::int64_t count, T* to) const {
    const auto read = [&](const auto* bias) {
      using Bias = std::remove_const_t<std::remove_pointer_t<decltype(bias)>>;
      constexpr bool kConverts = sizeof(Bias) == sizeof(T) || (sizeof(Bias) == 2 && sizeof(T) == 4);
      const std::int64_t step = p_.bias.col_stride;
      bias += batch_ * p_.bias.batch_stride + head_[r] * p_.bias.head_stride +
              query_[r] * p_.bias.row_stride + j * step;
      if constexpr (kConverts) {
        if (step == 1) return convert_row(bias, count, to);
      }
      for (std::int64_t n = 0; n < count; ++n) to[n] = static_cast<T>(to_float(bias[n * step]));
    };
    switch (p_.bias.dtype) {
      case DType::kFloat16:
        return read(static_cast<const Half*>(p_.bias.data));
      case DType::kBFloat16:
        return read(static_cast<const BFloat16*>(p_.bias.data));
      case DType::kFloat32:
        return read(static_cast<const float*>(p_.bias.data));
      case DType::kFloat64:
        return read(static_cast<const double*>(p_.bias.data));
      case DType::kFloat8E4M3:
      case DType::kInt8:
        break;  // validate refuses it
    }
  }

  // 1 where the mask shows row r a key, else 0.
  void read_mask(std::int64_t r, std::int64_t j, std::int64_t count, T* to) const {
    const std::int64_t step = p_.mask.col_stride;
    const std::uint8_t* const row = p_.mask.data + batch_ * p_.mask.batch_stride +
                                    head_[r] * p_.mask.head_stride +
                                    query_[r] * p_.mask.row_stride + j * step;
    if (step == 1) {  // which the compiler makes vectors of
      for (std::int64_t n = 0; n < count; ++n) to[n] = row[n] ? T(1) : T(0);
    } else {
      for (std::int64_t n = 0; n < count; ++n) to[n] = row[n * step] ? T(1) : T(0);
    }
  }

  // Whether every bias is so small that no score in range overflows by it. NaN is not.
  static bool is_small(const T* row, std::int64_t count) {
    auto worst = magnitude_bits(row[0]);
    for (std::int64_t n = 1; n < count; ++n)
      worst = magnitude_bits(row[n]) > worst ? magnitude_bits(row[n]) : worst;
    return worst < small_bits(row[0]);
  }

  // -inf hides the key, whatever its score. Every other bias is a score like any other: finite ones
  // add up to a finite one, so a row of the least numbers is not an empty row.
  static Vec<T> biased(Vec<T> score, Vec<T> bias, bool small) {
    const Vec<T> sum = score + bias;
    if (small) return sum;
    const Vec<T> least = broadcast(-MathConstants<T>::kLargest);
    const Vec<T> limited = -max(least, -max(least, sum));
    const Vec<T> finite = score - score == T(0) ? limited : sum;
    const Vec<T> unhidden = bias - bias == T(0) ? finite : sum;
    return bias == -static_cast<T>(INFINITY) ? bias : unhidden;
  }

  static Vec<T> masked(Vec<T> score, Vec<T> mask) {
    return mask == T(0) ? broadcast(-static_cast<T>(INFINITY)) : score;
  }

  const AttentionParams& p_;
  const std::int64_t batch_;
  const std::int64_t ld_;
  const std::int64_t block_n_;
  const PositionMask<std::int64_t> mask_;
  const bool adjusts_;
  // All [ld]:
  T *slope_, *distance_;
  LaneInt<T>*first_key_, *end_key_;  // the keys of the tile that a row may see
  std::int64_t *query_, *head_;
  T* rows_;                       // [kWidth, block_n] of biases or of the mask
  T *row_slope_, *row_distance_;  // [block_n]
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
