#pragma once

#include <math.h>

#include "cpu/outer_product.h"
#include "cpu/scratch.h"
#include "cpu/simd_math.h"
#include "cpu/task.h"

// The CPU kernel: attention of block_m queries, one key tile after the other, with a streaming
// softmax.
//
// Scores of a tile stand transposed, keys in rows and queries in lanes, so the softmax runs down
// the rows without a reduction across lanes. The state per query is the running maximum, the sum
// of 2^(score - maximum) and the unnormalised output; the latter two are rescaled when a tile
// raises the maximum.
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

constexpr std::int64_t kUnlimited = INT64_MAX / 4;  // a window's side; sums of two do not overflow

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

template <typename In>
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
        state_(part(task.split)) {
    q_t_ = arena_.take<T>(p_.head_dim * ld_);
    s_t_ = arena_.take<T>(block_n_ * ld_);
    k_tile_ = arena_.take<T>(kConverts ? block_n_ * p_.head_dim : 0);
    v_tile_ = arena_.take<T>(kConverts ? block_n_ * p_.head_dim_v : 0);
    row_ = arena_.take<T>(max_int(p_.head_dim, p_.head_dim_v));
    rescale_ = arena_.take<T>(ld_);
    slope_ = arena_.take<T>(ld_);
    distance_ = arena_.take<T>(ld_);
    first_key_ = arena_.take<LaneInt<T>>(ld_);
    end_key_ = arena_.take<LaneInt<T>>(ld_);
    query_ = arena_.take<std::int64_t>(ld_);
    head_ = arena_.take<std::int64_t>(ld_);
    position_ = arena_.take<std::int64_t>(ld_);
  }

  std::int64_t scratch_bytes() const { return arena_.used(); }

  void run() {
    locate_rows();
    load_queries();
    clear_state();
    std::int64_t begin = clamp_int(min_position_ - left_, 0, t_.len_k);
    std::int64_t end = clamp_int(max_position_ + right_ + 1, 0, t_.len_k);
    if (t_.num_splits > 1) {
      const std::int64_t tiles = (max_int(0, end - begin) + block_n_ - 1) / block_n_;
      const std::int64_t keys = (tiles + t_.num_splits - 1) / t_.num_splits * block_n_;
      begin += t_.split * keys;
      end = min_int(end, begin + keys);
    }
    for (std::int64_t j = begin; j < end; j += block_n_)
      tile(j, min_int(block_n_, end - j), min_int(block_n_, max_int(0, end - j - block_n_)));
    if (t_.num_splits == 1) finish();
  }

  // Adds the other parts to part 0, in order, and finishes it.
  void merge() {
    locate_rows();
    for (int split = 1; split < t_.num_splits; ++split) add(part(split));
    finish();
  }

 private:
  static constexpr bool kConverts = sizeof(In) == 2;
  static constexpr int kStep = kWidth<T>;

  State<T> part(int split) {
    if (!states_) return State<T>(p_, ld_, &arena_);
    Arena sizes(nullptr);
    State<T>(p_, ld_, &sizes);
    Arena memory(states_ + split * sizes.used());
    return State<T>(p_, ld_, &memory);
  }

  bool varlen() const { return p_.cu_seqlens_q != nullptr; }

  void locate_rows() {
    const std::int64_t group = p_.num_heads / p_.num_heads_kv;
    const std::int64_t shift = p_.causal == Causal::kTopLeft ? 0 : t_.len_k - t_.len_q;
    left_ = p_.window_left < 0 ? kUnlimited : min_int(p_.window_left, kUnlimited);
    right_ = p_.window_right < 0 ? kUnlimited : min_int(p_.window_right, kUnlimited);
    if (p_.causal != Causal::kNone) right_ = min_int(right_, 0);
    adjusts_ = p_.softcap > 0 || p_.alibi_slopes || p_.bias || p_.mask;
    to_log2_ = MathConstants<T>::kLog2E;
    if (!adjusts_) {
      // At least the smallest normal number: 0 times -inf would be NaN.
      to_log2_ = static_cast<T>(p_.softmax_scale * MathConstants<double>::kLog2E);
      if (to_log2_ < MathConstants<T>::kSmallest) to_log2_ = MathConstants<T>::kSmallest;
    }

    for (std::int64_t r = 0; r < ld_; ++r) {
      // Lanes beyond the task's rows repeat the last one, so that no tile is visited for them.
      const std::int64_t row = t_.row_begin + min_int(r, t_.num_rows - 1);
      query_[r] = row / group;
      head_[r] = t_.head_kv * group + row % group;
      position_[r] = query_[r] + shift;
      slope_[r] = p_.alibi_slopes ? T(p_.alibi_slopes[t_.batch * p_.alibi_batch_stride +
                                                      head_[r] * p_.alibi_head_stride])
                                  : T(0);
    }
    min_position_ = position_[0];
    max_position_ = position_[ld_ - 1];
  }

  void clear_state() {
    for (std::int64_t r = 0; r < ld_; ++r) {
      state_.row_max[r] = state_.row_base[r] = -static_cast<T>(INFINITY);
      state_.row_sum[r] = T(0);
    }
    std::memset(state_.o_t, 0, static_cast<std::size_t>(p_.head_dim_v * ld_) * sizeof(T));
  }

  void load_queries() {
    if (t_.num_rows < ld_)
      std::memset(q_t_, 0, static_cast<std::size_t>(p_.head_dim * ld_) * sizeof(T));
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const In* q = static_cast<const In*>(p_.q) + (varlen() ? 0 : t_.batch * p_.q_batch_stride) +
                    (t_.first_q + query_[r]) * p_.q_row_stride + head_[r] * p_.q_head_stride;
      convert_row(q, p_.head_dim, row_);
      for (std::int64_t d = 0; d < p_.head_dim; ++d) q_t_[d * ld_ + r] = row_[d];
    }
  }

  // K or V of the task's KV head.
  struct Rows {
    const In* first;  // the sequence's first key
    std::int64_t stride;
    std::int64_t width;
  };

  Rows k_rows() const {
    const In* k = static_cast<const In*>(p_.k) + (varlen() ? 0 : t_.batch * p_.k_batch_stride);
    return {k + t_.first_k * p_.k_row_stride + t_.head_kv * p_.k_head_stride, p_.k_row_stride,
            p_.head_dim};
  }

  Rows v_rows() const {
    const In* v = static_cast<const In*>(p_.v) + (varlen() ? 0 : t_.batch * p_.v_batch_stride);
    return {v + t_.first_k * p_.v_row_stride + t_.head_kv * p_.v_head_stride, p_.v_row_stride,
            p_.head_dim_v};
  }

  // Makes keys [j, j + count) the left operand: in place, or converted to `tile`.
  void set_left(const Rows& rows, std::int64_t j, std::int64_t count, T* tile,
                ProductArgs<T>* args) {
    const In* from = rows.first + j * rows.stride;
    if constexpr (kConverts) {
      for (std::int64_t n = 0; n < count; ++n) {
        convert_row(from + n * rows.stride, rows.width, tile + n * rows.width);
      }
      args->left = tile;
      args->left_stride = rows.width;
    } else {
      args->left = from;
      args->left_stride = rows.stride;
    }
  }

  Upcoming upcoming(const Rows& rows, std::int64_t j, std::int64_t count) const {
    const std::int64_t size = sizeof(In);
    return {reinterpret_cast<const char*>(rows.first + j * rows.stride), rows.stride * size,
            rows.width * size, count};
  }

  // Keys [j, j + count), with `next` keys to follow.
  void tile(std::int64_t j, std::int64_t count, std::int64_t next) {
    ProductArgs<T> args;
    args.block_m = ld_;
    args.rescale = rescale_;

    // S^T = K Q^T
    set_left(k_rows(), j, count, k_tile_, &args);
    args.right = q_t_;
    args.depth = p_.head_dim;
    args.result = s_t_;
    args.upcoming = upcoming(v_rows(), j, count);
    multiply<T, Product::kScores>(count, args);

    if (adjusts_) adjust(j, count);
    if (max_position_ - left_ > j || min_position_ + right_ + 1 < j + count) hide(j, count);
    softmax(count);

    // O^T = O^T rescaled + V^T P^T
    set_left(v_rows(), j, count, v_tile_, &args);
    args.right = s_t_;
    args.depth = count;
    args.result = state_.o_t;
    args.upcoming = next > 0 ? upcoming(k_rows(), j + count, next) : Upcoming();
    multiply<T, Product::kOutput>(p_.head_dim_v, args);
  }

  // Scale, softcap, ALiBi, bias and mask.
  void adjust(std::int64_t j, std::int64_t count) {
    const T scale = static_cast<T>(p_.softmax_scale);
    const T cap = static_cast<T>(p_.softcap);
    for (std::int64_t r = 0; r < ld_; ++r) distance_[r] = static_cast<T>(position_[r] - j);
    for (std::int64_t n = 0; n < count; ++n) {
      for (std::int64_t lane = 0; lane < ld_; lane += kStep) {
        Vec<T> score = load(s_t_ + n * ld_ + lane) * scale;
        if (cap > T(0)) score = tanh<T>(score / cap) * cap;
        if (p_.alibi_slopes) {
          const Vec<T> distance = load(distance_ + lane) - static_cast<T>(n);
          score -= load(slope_ + lane) * (distance < T(0) ? -distance : distance);
        }
        store(s_t_ + n * ld_ + lane, score);
      }
    }
    if (p_.bias && p_.bias_dtype == DType::kFloat32)
      add_bias(static_cast<const float*>(p_.bias), j, count);
    if (p_.bias && p_.bias_dtype != DType::kFloat32)
      add_bias(static_cast<const In*>(p_.bias), j, count);
    if (p_.mask) apply_mask(j, count);
  }

  template <typename B>
  void add_bias(const B* bias, std::int64_t j, std::int64_t count) {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const B* row = bias + t_.batch * p_.bias_batch_stride + head_[r] * p_.bias_head_stride +
                     query_[r] * p_.bias_row_stride + j * p_.bias_col_stride;
      for (std::int64_t n = 0; n < count; ++n) {
        s_t_[n * ld_ + r] += static_cast<T>(to_float(row[n * p_.bias_col_stride]));
      }
    }
  }

  void apply_mask(std::int64_t j, std::int64_t count) {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const std::uint8_t* row = p_.mask + t_.batch * p_.mask_batch_stride +
                                head_[r] * p_.mask_head_stride + query_[r] * p_.mask_row_stride +
                                j * p_.mask_col_stride;
      for (std::int64_t n = 0; n < count; ++n) {
        if (!row[n * p_.mask_col_stride]) s_t_[n * ld_ + r] = -static_cast<T>(INFINITY);
      }
    }
  }

  // -inf where causality or the window forbid the key.
  void hide(std::int64_t j, std::int64_t count) {
    typedef LaneInt<T> Int __attribute__((vector_size(kVectorBytes)));
    const Vec<T> minus_inf = broadcast(-static_cast<T>(INFINITY));
    for (std::int64_t r = 0; r < ld_; ++r) {
      first_key_[r] = static_cast<LaneInt<T>>(clamp_int(position_[r] - left_ - j, 0, count));
      end_key_[r] = static_cast<LaneInt<T>>(clamp_int(position_[r] + right_ + 1 - j, 0, count));
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

  // S^T becomes P^T, unnormalised. A NaN score is passed over by the maximum and reaches the sum.
  void softmax(std::int64_t count) {
    const Vec<T> minus_inf = broadcast(-static_cast<T>(INFINITY));
    for (std::int64_t lane = 0; lane < ld_; lane += kStep) {
      Vec<T> row_max = load(state_.row_max + lane);
      for (std::int64_t n = 0; n < count; ++n) row_max = max(load(s_t_ + n * ld_ + lane), row_max);
      store(state_.row_max + lane, row_max);
      // Rounded once: the same base goes into the weights, the rescaling and the LSE, so its
      // rounding cancels out.
      const Vec<T> base = row_max == minus_inf ? Vec<T>{} : row_max * to_log2_;
      const Vec<T> rescale = exp2<T>(load(state_.row_base + lane) - base);
      store(state_.row_base + lane, row_max == minus_inf ? minus_inf : base);
      store(rescale_ + lane, rescale);
      Vec<T> sum = load(state_.row_sum + lane) * rescale;
      for (std::int64_t n = 0; n < count; ++n) {
        const Vec<T> weight = exp2<T>(load(s_t_ + n * ld_ + lane) * to_log2_ - base);
        store(s_t_ + n * ld_ + lane, weight);
        sum += weight;
      }
      store(state_.row_sum + lane, sum);
    }
  }

  void add(const State<T>& other) {
    const Vec<T> minus_inf = broadcast(-static_cast<T>(INFINITY));
    for (std::int64_t lane = 0; lane < ld_; lane += kStep) {
      const Vec<T> base = max(load(state_.row_base + lane), load(other.row_base + lane));
      const Vec<T> finite = base == minus_inf ? Vec<T>{} : base;
      const Vec<T> weight = exp2<T>(load(state_.row_base + lane) - finite);
      const Vec<T> other_weight = exp2<T>(load(other.row_base + lane) - finite);
      store(state_.row_base + lane, base);
      store(state_.row_sum + lane,
            load(state_.row_sum + lane) * weight + load(other.row_sum + lane) * other_weight);
      for (std::int64_t d = 0; d < p_.head_dim_v; ++d) {
        T* o = state_.o_t + d * ld_ + lane;
        store(o, load(o) * weight + load(other.o_t + d * ld_ + lane) * other_weight);
      }
    }
  }

  void finish() {
    for (std::int64_t r = 0; r < t_.num_rows; ++r) {
      const double sum = state_.row_sum[r];
      double base = static_cast<double>(state_.row_base[r]) / MathConstants<double>::kLog2E;
      double total = sum;
      double weight = 1.0;  // of the sum, once the sink may have raised the maximum
      if (p_.sinks) {
        const double sink = p_.sinks[head_[r] * p_.sinks_stride];
        if (sink != -INFINITY) {
          const double top = base > sink ? base : sink;
          weight = ::exp(base - top);
          total = sum * weight + ::exp(sink - top);
          base = top;
        }
      }
      write_row(r, sum == 0.0 ? 0.0 : weight / total);
      if (p_.lse) {
        float* lse = p_.lse + (varlen() ? 0 : t_.batch * p_.lse_batch_stride) +
                     head_[r] * p_.lse_head_stride + t_.first_q + query_[r];
        *lse = total == 0.0 ? -INFINITY : static_cast<float>(base + ::log(total));
      }
    }
  }

  // A row that saw no key has a factor of 0; what the tile gave it (0 times V, a NaN perhaps) does
  // not count.
  void write_row(std::int64_t r, double factor) {
    In* out = static_cast<In*>(p_.out) + (varlen() ? 0 : t_.batch * p_.out_batch_stride) +
              (t_.first_q + query_[r]) * p_.out_row_stride + head_[r] * p_.out_head_stride;
    const T scale = static_cast<T>(factor);
    for (std::int64_t d = 0; d < p_.head_dim_v; ++d) {
      row_[d] = factor == 0.0 ? T(0) : state_.o_t[d * ld_ + r] * scale;
    }
    convert_row(row_, p_.head_dim_v, out);
  }

  const AttentionParams& p_;
  const Task& t_;
  const std::int64_t ld_;  // block_m
  const std::int64_t block_n_;
  Arena arena_;
  char* const states_;
  const State<T> state_;

  std::int64_t left_ = 0, right_ = 0;  // the window about a row's position, causality included
  std::int64_t min_position_ = 0, max_position_ = 0;
  bool adjusts_ = false;
  T to_log2_ = 0;  // what turns the scores in s_t_ into powers of two

  T *q_t_, *s_t_;               // [head_dim, block_m], [block_n, block_m]
  T *k_tile_, *v_tile_, *row_;  // [block_n, head_dim], [block_n, head_dim_v], [either head dim]
  // All [block_m]:
  T *rescale_, *slope_, *distance_;
  LaneInt<T>*first_key_, *end_key_;  // the keys of the tile that a row may see
  std::int64_t *query_, *head_, *position_;
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
