#pragma once

#include <math.h>

#include "core/problem/positions.h"
#include "core/problem/score.h"
#include "cpu/arena.h"
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
  // The scores of sequence `batch`, with `ld` lanes.
  ScoreTile(const AttentionParams& params, std::int64_t batch, std::int64_t len_q,
            std::int64_t len_k, std::int64_t ld, Arena* arena)
      : p_(params),
        batch_(batch),
        ld_(ld),
        mask_(window_of<std::int64_t>(params), position_shift(params.causal, len_q, len_k), len_k),
        adjusts_(p_.softcap > 0 || p_.alibi_slopes.data || p_.bias.data || p_.mask.data) {
    slope_ = arena->take<T>(ld_);
    distance_ = arena->take<T>(ld_);
    first_key_ = arena->take<LaneInt<T>>(ld_);
    end_key_ = arena->take<LaneInt<T>>(ld_);
    query_ = arena->take<std::int64_t>(ld_);
    head_ = arena->take<std::int64_t>(ld_);
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
    const T scale = static_cast<T>(p_.softmax_scale);
    const T cap = static_cast<T>(p_.softcap);
    for (std::int64_t r = 0; r < ld_; ++r)
      distance_[r] = static_cast<T>(mask_.position(query_[r]) - j);
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t lane = 0; lane < ld_; lane += kWidth<T>) {
        Vec<T> score = softcapped(load(s_t + n * ld_ + lane) * scale, cap,
                                  [](Vec<T> x) { return tanh<T>(x); });
        if (slopes && cap != T(0)) {
          const Vec<T> ratio = score / cap;
          store(slopes + n * ld_ + lane, T(1) - ratio * ratio);
        }
        if (p_.alibi_slopes.data) {
          // The magnitude comes last: it keeps the product from being fused with the difference, so
          // that keys at one distance have one penalty, which may be large enough to absorb scores.
          const Vec<T> slope = load(slope_ + lane);
          const Vec<T> penalty = slope * (load(distance_ + lane) - static_cast<T>(n));
          const Vec<T> magnitude = penalty < T(0) ? -penalty : penalty;
          score -= slope < T(0) ? -magnitude : magnitude;
        }
        store(s_t + n * ld_ + lane, score);
      }
    }
    if (p_.bias.data) {
      switch (p_.bias.dtype) {
        case DType::kFloat16:
          add_bias(static_cast<const Half*>(p_.bias.data), s_t, j, count, num_rows);
          break;
        case DType::kBFloat16:
          add_bias(static_cast<const BFloat16*>(p_.bias.data), s_t, j, count, num_rows);
          break;
        case DType::kFloat32:
          add_bias(static_cast<const float*>(p_.bias.data), s_t, j, count, num_rows);
          break;
        case DType::kFloat64:
          add_bias(static_cast<const double*>(p_.bias.data), s_t, j, count, num_rows);
          break;
        case DType::kFloat8E4M3:
        case DType::kInt8:
          break;  // validate refuses it
      }
    }
    if (p_.mask.data) apply_mask(s_t, j, count, num_rows);
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

 private:
  template <typename B>
  void add_bias(const B* bias, T* s_t, std::int64_t j, std::int64_t count, std::int64_t num_rows) {
    for (std::int64_t r = 0; r < num_rows; ++r) {
      const B* row = bias + batch_ * p_.bias.batch_stride + head_[r] * p_.bias.head_stride +
                     query_[r] * p_.bias.row_stride + j * p_.bias.col_stride;
      const bool small = is_small(row, count);
      for (std::int64_t n = 0; n < count; ++n) {
        T* score = s_t + n * ld_ + r;
        const T value = static_cast<T>(to_float(row[n * p_.bias.col_stride]));
        *score = small ? *score + value : biased(*score, value);
      }
    }
  }

  // Whether every bias is so small that no score in range overflows by it. NaN is not.
  template <typename B>
  bool is_small(const B* row, std::int64_t count) {
    const B* last = row + (count - 1) * p_.bias.col_stride;
    auto worst = magnitude_bits(*last);
    if (p_.bias.col_stride == 1) {  // which the compiler makes vectors of
      for (std::int64_t n = 0; n < count; ++n)
        worst = magnitude_bits(row[n]) > worst ? magnitude_bits(row[n]) : worst;
    } else {
      for (; row != last; row += p_.bias.col_stride)
        worst = magnitude_bits(*row) > worst ? magnitude_bits(*row) : worst;
    }
    return worst < small_bits(*last);
  }

  // -inf hides the key, whatever its score. Every other bias is a score like any other: finite ones
  // add up to a finite one, so a row of the least numbers is not an empty row.
  static T biased(T score, T bias) {
    constexpr T kLargest = MathConstants<T>::kLargest;
    if (bias == -static_cast<T>(INFINITY)) return bias;
    const T sum = score + bias;
    if (score - score != T(0) || bias - bias != T(0)) return sum;
    return sum > kLargest ? kLargest : (sum < -kLargest ? -kLargest : sum);
  }

  void apply_mask(T* s_t, std::int64_t j, std::int64_t count, std::int64_t num_rows) {
    for (std::int64_t r = 0; r < num_rows; ++r) {
      const std::uint8_t* row = p_.mask.data + batch_ * p_.mask.batch_stride +
                                head_[r] * p_.mask.head_stride + query_[r] * p_.mask.row_stride +
                                j * p_.mask.col_stride;
      for (std::int64_t n = 0; n < count; ++n) {
        if (!row[n * p_.mask.col_stride]) s_t[n * ld_ + r] = -static_cast<T>(INFINITY);
      }
    }
  }

  const AttentionParams& p_;
  const std::int64_t batch_;
  const std::int64_t ld_;
  const PositionMask<std::int64_t> mask_;
  const bool adjusts_;
  // All [ld]:
  T *slope_, *distance_;
  LaneInt<T>*first_key_, *end_key_;  // the keys of the tile that a row may see
  std::int64_t *query_, *head_;
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
