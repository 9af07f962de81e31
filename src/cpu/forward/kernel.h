#pragma once

#include <float.h>
#include <math.h>

#include "core/problem/descales.h"
#include "core/problem/positions.h"
#include "core/problem/score.h"
#include "cpu/forward/key_rows.h"
#include "cpu/forward/outer_product.h"
#include "cpu/forward/scratch.h"
#include "cpu/forward/softmax.h"
#include "cpu/forward/task.h"
#include "cpu/simd_math.h"

// The CPU kernel: attention of block_m queries, one key tile after the other, with a streaming
// softmax.
//
// Scores of a tile stand transposed, keys in rows and queries in lanes, so the softmax runs down
// the rows without a reduction across lanes. The state per query is the running maximum, the sum
// of the probabilities and the unnormalised output; the latter two are rescaled when a tile raises
// the maximum (softmax.h).
namespace dlattn::cpu::DLATTN_CPU_ISA {

template <typename In>
struct ComputeTypeOf {
  using Type = float;
};
template <>
struct ComputeTypeOf<double> {
  using Type = double;
};

template <typename T>
constexpr int kMaxBlockM = sizeof(T) == 4 ? 64 : 32;
template <typename T>
constexpr int kBlockN = sizeof(T) == 4 ? 96 : 48;

DLATTN_INLINE std::int64_t min_int(std::int64_t a, std::int64_t b) {
  return a < b ? a : b;
}
DLATTN_INLINE std::int64_t max_int(std::int64_t a, std::int64_t b) {
  return a > b ? a : b;
}
DLATTN_INLINE std::int64_t clamp_int(std::int64_t x, std::int64_t low, std::int64_t high) {
  return max_int(low, min_int(x, high));
}

template <typename T>
Tiles tiles_for(std::int64_t rows) {
  Tiles tiles;
  tiles.block_m = kWidth<T>;
  while (tiles.block_m < rows && tiles.block_m < kMaxBlockM<T>) tiles.block_m *= 2;
  tiles.block_n = kBlockN<T>;
  return tiles;
}

// `In`: elements of q; `Key`: of k and v.
template <typename In, typename Key = In>
class TaskKernel {
 public:
  using T = typename ComputeTypeOf<In>::Type;

  // `states` holds the parts of the task if its keys are split, and is null otherwise.
  TaskKernel(const AttentionParams& params, const Tiles& tiles, const Task& task, void* scratch,
             void* states)
      : p_(params),
        t_(task),
        ld_(tiles.block_m),
        block_n_(tiles.block_n),
        arena_(scratch),
        states_(static_cast<char*>(states)),
        state_(part(task.split)),
        softmax_(state_, ld_, params.head_dim_v, has_totals(params.seqlen_k), &arena_),
        mask_(window_of<std::int64_t>(params),
              position_shift(params.causal, task.len_q, task.len_k), task.len_k) {
    q_t_ = arena_.take<T>(p_.head_dim * ld_);
    s_t_ = arena_.take<T>(block_n_ * ld_);
    const bool copies = kConverts || KeyRows<Key>::has_pages(p_);
    k_tile_ = arena_.take<T>(copies ? block_n_ * p_.head_dim : 0);
    v_tile_ = arena_.take<T>(copies ? block_n_ * p_.head_dim_v : 0);
    row_ = arena_.take<T>(max_int(p_.head_dim, p_.head_dim_v));
    slope_ = arena_.take<T>(ld_);
    distance_ = arena_.take<T>(ld_);
    first_key_ = arena_.take<LaneInt<T>>(ld_);
    end_key_ = arena_.take<LaneInt<T>>(ld_);
    query_ = arena_.take<std::int64_t>(ld_);
    head_ = arena_.take<std::int64_t>(ld_);
  }

  std::int64_t scratch_bytes() const { return arena_.used(); }

  void run() {
    locate_rows();
    load_queries();
    softmax_.clear();
    const Range<std::int64_t> keys = mask_.any_row(query_[0], query_[ld_ - 1]);
    std::int64_t begin = max_int(keys.begin, t_.leftpad_k), end = keys.end;
    if (t_.num_splits > 1) {
      const std::int64_t tiles = (max_int(0, end - begin) + block_n_ - 1) / block_n_;
      const std::int64_t keys = (tiles + t_.num_splits - 1) / t_.num_splits * block_n_;
      begin += t_.split * keys;
      end = min_int(end, begin + keys);
    }
    for (std::int64_t j = begin; j < end; j += block_n_)
      tile(j, min_int(block_n_, end - j), min_int(block_n_, max_int(0, end - j - block_n_)));
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
  static constexpr bool kConverts = sizeof(Key) <= 2;
  static constexpr bool kIs8Bit = sizeof(In) == 1;
  static constexpr bool kHasDescales = sizeof(Key) == 1;
  static constexpr int kStep = kWidth<T>;

  State<T> part(int split) {
    if (!states_) return State<T>(p_, ld_, &arena_);
    Arena sizes(nullptr);
    State<T>(p_, ld_, &sizes);
    Arena memory(states_ + split * sizes.used());
    return State<T>(p_, ld_, &memory);
  }

  bool has_totals(std::int64_t keys) const { return keys > kTilesPerRun * block_n_; }
  bool varlen() const { return p_.cu_seqlens_q != nullptr; }

  void locate_rows() {
    const std::int64_t group = p_.num_heads / p_.num_heads_kv;
    adjusts_ = p_.softcap > 0 || p_.alibi_slopes.data || p_.bias.data || p_.mask.data;
    // By the sequence's own length, so that its result has the same bits in any batch.
    softmax_.set_up(adjusts_ ? 1.0 : p_.softmax_scale, has_totals(t_.len_k));

    for (std::int64_t r = 0; r < ld_; ++r) {
      // Lanes beyond the task's rows repeat the last one, so that no tile is visited for them.
      const std::int64_t row = t_.row_begin + min_int(r, t_.num_rows - 1);
      query_[r] = row / group;
      head_[r] = t_.head_kv * group + row % group;
      slope_[r] =
          p_.alibi_slopes.data
              ? limited_slope<T>(p_.alibi_slopes.data[t_.batch * p_.alibi_slopes.batch_stride +
                                                      head_[r] * p_.alibi_slopes.head_stride])
              : T(0);
    }
  }

  // The descales of a row's head. Only 8-bit elements have any.
  Descales descales(std::int64_t r) const {
    return descales_of<std::int64_t>(p_, t_.batch, head_[r], t_.head_kv);
  }

  void load_queries() {
    if (t_.num_rows < ld_)
      std::memset(q_t_, 0, static_cast<std::size_t>(p_.head_dim * ld_) * sizeof(T));
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const In* q = static_cast<const In*>(p_.q.data) +
                    (varlen() ? 0 : t_.batch * p_.q.batch_stride) +
                    (t_.first_q + query_[r]) * p_.q.row_stride + head_[r] * p_.q.head_stride;
      convert_row(q, p_.head_dim, row_);
      const T factor = kHasDescales ? static_cast<T>(descales(r).scores) : T(1);
      for (std::int64_t d = 0; d < p_.head_dim; ++d) q_t_[d * ld_ + r] = row_[d] * factor;
    }
  }

  KeyRows<Key> k_rows() const { return {p_, t_, p_.k, p_.head_dim}; }
  KeyRows<Key> v_rows() const { return {p_, t_, p_.v, p_.head_dim_v}; }

  // Makes keys [j, j + count) the left operand: in place, or converted to `tile`, or copied there
  // if they lie in several pages.
  void set_left(const KeyRows<Key>& rows, std::int64_t j, std::int64_t count, T* tile,
                ProductArgs<T>* args) {
    if constexpr (!kConverts) {
      if (rows.run(j, count) == count) {
        args->left = rows.row(j);
        args->left_stride = rows.stride();
        return;
      }
    }
    args->left = tile;
    args->left_stride = rows.width();
    for (std::int64_t n = 0; n < count;) {
      const std::int64_t run = rows.run(j + n, count - n);
      const Key* from = rows.row(j + n);
      for (const std::int64_t end = n + run; n < end; ++n, from += rows.stride())
        convert_row(from, rows.width(), tile + n * rows.width());
    }
  }

  // The first page's, if they lie in several.
  Upcoming upcoming(const KeyRows<Key>& rows, std::int64_t j, std::int64_t count) const {
    const std::int64_t size = sizeof(Key);
    return {reinterpret_cast<const char*>(rows.row(j)), rows.stride() * size, rows.width() * size,
            rows.run(j, count)};
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

    if (adjusts_) adjust(j, count);
    if (!contains_all(mask_.every_row(query_[0], query_[ld_ - 1]), j, count)) hide(j, count);
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

  // Scale, softcap, ALiBi, bias and mask.
  void adjust(std::int64_t j, std::int64_t count) {
    const T scale = static_cast<T>(p_.softmax_scale);
    const T cap = static_cast<T>(p_.softcap);
    for (std::int64_t r = 0; r < ld_; ++r)
      distance_[r] = static_cast<T>(mask_.position(query_[r]) - j);
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t lane = 0; lane < ld_; lane += kStep) {
        Vec<T> score = softcapped(load(s_t_ + n * ld_ + lane) * scale, cap,
                                  [](Vec<T> x) { return tanh<T>(x); });
        if (p_.alibi_slopes.data) {
          // The magnitude comes last: it keeps the product from being fused with the difference, so
          // that keys at one distance have one penalty, which may be large enough to absorb scores.
          const Vec<T> slope = load(slope_ + lane);
          const Vec<T> penalty = slope * (load(distance_ + lane) - static_cast<T>(n));
          const Vec<T> magnitude = penalty < T(0) ? -penalty : penalty;
          score -= slope < T(0) ? -magnitude : magnitude;
        }
        store(s_t_ + n * ld_ + lane, score);
      }
    }
    if constexpr (!kIs8Bit) {
      if (p_.bias.data && p_.bias.dtype == DType::kFloat32)
        add_bias(static_cast<const float*>(p_.bias.data), j, count);
      if (p_.bias.data && p_.bias.dtype != DType::kFloat32)
        add_bias(static_cast<const In*>(p_.bias.data), j, count);
    }
    if (p_.mask.data) apply_mask(j, count);
  }

  template <typename B>
  void add_bias(const B* bias, std::int64_t j, std::int64_t count) {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const B* row = bias + t_.batch * p_.bias.batch_stride + head_[r] * p_.bias.head_stride +
                     query_[r] * p_.bias.row_stride + j * p_.bias.col_stride;
      const bool small = is_small(row, count);
      for (std::int64_t n = 0; n < count; ++n) {
        T* score = s_t_ + n * ld_ + r;
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

  void apply_mask(std::int64_t j, std::int64_t count) {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const std::uint8_t* row = p_.mask.data + t_.batch * p_.mask.batch_stride +
                                head_[r] * p_.mask.head_stride + query_[r] * p_.mask.row_stride +
                                j * p_.mask.col_stride;
      for (std::int64_t n = 0; n < count; ++n) {
        if (!row[n * p_.mask.col_stride]) s_t_[n * ld_ + r] = -static_cast<T>(INFINITY);
      }
    }
  }

  // -inf where causality or the window forbid the key.
  void hide(std::int64_t j, std::int64_t count) {
    typedef LaneInt<T> Int __attribute__((vector_size(kVectorBytes)));
    const Vec<T> minus_inf = broadcast(-static_cast<T>(INFINITY));
    for (std::int64_t r = 0; r < ld_; ++r) {
      const Range<std::int64_t> keys = mask_.row(query_[r], j);
      first_key_[r] = static_cast<LaneInt<T>>(clamp_int(keys.begin, 0, count));
      end_key_[r] = static_cast<LaneInt<T>>(clamp_int(keys.end, 0, count));
    }
    for (std::int64_t lane = 0; lane < ld_; lane += kStep) {
      Int first, end;
      std::memcpy(&first, first_key_ + lane, sizeof(first));
      std::memcpy(&end, end_key_ + lane, sizeof(end));
      for (std::int64_t n = 0; n < count; ++n) {
        const Int key = Int{} + static_cast<LaneInt<T>>(n);
        const Int seen = (key >= first) & (key < end);
        const Vec<T> score = load(s_t_ + n * ld_ + lane);
        store(s_t_ + n * ld_ + lane, seen ? score : minus_inf);
      }
    }
  }

  void finish() {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const double sink =
          p_.sinks.data ? p_.sinks.data[head_[r] * p_.sinks.head_stride] : -INFINITY;
      const auto denominator = softmax_.finish(r, sink);
      if (p_.lse.data) {
        p_.lse.data[(varlen() ? 0 : t_.batch * p_.lse.batch_stride) +
                    head_[r] * p_.lse.head_stride + t_.first_q + query_[r]] =
            saturated(denominator.log());
      }
    }
    for (std::int64_t r = 0; r < t_.num_rows; ++r) write_row(r);
  }

  // Beyond float, where only float64's scores get, lse is the nearest number: the row is not empty.
  static float saturated(double lse) {
    if (lse - lse == 0.0 && lse > FLT_MAX) return FLT_MAX;
    if (lse - lse == 0.0 && lse < -FLT_MAX) return -FLT_MAX;
    return static_cast<float>(lse);
  }

  void write_row(std::int64_t r) {
    softmax_.copy_row(r, kHasDescales ? static_cast<T>(descales(r).v) : T(1), row_);
    if constexpr (!kIs8Bit) {
      store_row<In>(r);
    } else if (p_.out.dtype == DType::kFloat16) {
      store_row<Half>(r);
    } else if (p_.out.dtype == DType::kBFloat16) {
      store_row<BFloat16>(r);
    } else {
      store_row<float>(r);
    }
  }

  template <typename Out>
  void store_row(std::int64_t r) {
    Out* out = static_cast<Out*>(p_.out.data) + (varlen() ? 0 : t_.batch * p_.out.batch_stride) +
               (t_.first_q + query_[r]) * p_.out.row_stride + head_[r] * p_.out.head_stride;
    convert_row(row_, p_.head_dim_v, out);
  }

  const AttentionParams& p_;
  const Task& t_;
  const std::int64_t ld_;  // block_m
  const std::int64_t block_n_;
  Arena arena_;
  char* const states_;
  const State<T> state_;
  RunningSoftmax<T> softmax_;

  const PositionMask<std::int64_t> mask_;
  bool adjusts_ = false;

  T *q_t_, *s_t_;               // [head_dim, block_m], [block_n, block_m]
  T *k_tile_, *v_tile_, *row_;  // [block_n, head_dim], [block_n, head_dim_v], [either head dim]
  // All [block_m]:
  T *slope_, *distance_;
  LaneInt<T>*first_key_, *end_key_;  // the keys of the tile that a row may see
  std::int64_t *query_, *head_;
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
