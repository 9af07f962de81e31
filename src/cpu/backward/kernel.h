#pragma once

#include <math.h>

#include "cpu/backward/key_sums.h"
#include "cpu/backward/rows.h"
#include "cpu/backward/task.h"
#include "cpu/outer_product.h"
#include "cpu/score_tile.h"

// The CPU kernels of the backward pass. A tile of keys and queries is computed by two products,
// S^T = K Q^T and dP^T = V dO^T, with keys in rows and queries in lanes, from which follow
//   P^T = exp(S^T - lse)  and  dS^T = P^T (dP^T - delta).
// Who owns keys adds P^T dO to dv and dS^T Q to dk, over all queries that see them; who owns
// queries adds dS K to dq, over all keys that they see; who owns a head does both for each tile,
// 5 products where the other two need 7; who owns a tile of dbias adds dS^T over the dimensions
// that dbias lacks. So nobody writes to what another one writes to, and all sums have an order of
// their own, whatever the threads do, and whichever of the owners computes them. Tiles differ with
// the owner, so a row of q, dout or lse that is not finite must reach no key that it does not see,
// as 0 times NaN would.
namespace dlattn::cpu::DLATTN_CPU_ISA {

template <typename T>
constexpr int kBackwardM = sizeof(T) == 4 ? 64 : 32;
template <typename T>
constexpr int kBackwardN = sizeof(T) == 4 ? 96 : 48;

template <typename T>
class BackwardKernel {
 public:
  static constexpr std::int64_t kM = kBackwardM<T>, kN = kBackwardN<T>;

  BackwardKernel(const BackwardParams& params, const T* delta, void* scratch)
      : b_(params), p_(params.forward), all_deltas_(delta), arena_(scratch) {
    const std::int64_t dim = p_.head_dim, dim_v = p_.head_dim_v;
    q_t_ = arena_.take<T>(dim * kM);
    dout_t_ = arena_.take<T>(dim_v * kM);
    q_ = arena_.take<T>(padded_columns<T>(dim) * kM);
    dout_ = arena_.take<T>(padded_columns<T>(dim_v) * kM);
    k_ = arena_.take<T>(dim * kN);
    v_ = arena_.take<T>(dim_v * kN);
    part_ = KeySums<T>(p_, kN, &arena_);
    total_ = KeySums<T>(p_, kN, &arena_);
    dq_t_ = arena_.take<T>(padded_columns<T>(dim) * kM);
    s_t_ = arena_.take<T>(kN * kM);
    dp_t_ = arena_.take<T>(kN * kM);
    slopes_ = arena_.take<T>(kN * kM);
    sums_ = arena_.take<T>(kN * kM);
    bias_rows_ = arena_.take<T>(kN * kM);
    lse_ = arena_.take<T>(kM);
    delta_ = arena_.take<T>(kM);
    ones_ = arena_.take<T>(kM);
    row_ = arena_.take<T>(padded_columns<T>(max_int(dim, dim_v)));
    score_memory_ = arena_.used();
    Arena sizes(nullptr);
    ScoreTile<T>(p_, 0, 0, 0, kM, kN, &sizes);
    arena_.take<char>(sizes.used());
    scratch_ = static_cast<char*>(scratch);
    if (scratch) fill(ones_, kM, T(1));
  }

  std::int64_t scratch_bytes() const { return arena_.used(); }

  void keys(const BackwardTask& task, int num_parts) {
    const SequenceRows& sequence = task.sequence;
    const std::int64_t count = min_int(kN, sequence.len_k - task.begin);
    load_keys(sequence, task.head, task.begin, count);
    const PositionMask<std::int64_t> mask = mask_of(sequence);
    const std::int64_t begin = max_int(0, mask.column(task.begin).begin);
    const std::int64_t end = min_int(sequence.len_q, mask.column(task.begin + count - 1).end);
    for (int part = 0; part < num_parts; ++part) {
      const KeySums<T>& sums = part == 0 ? total_ : part_;
      sums.clear(count);
      const auto add_tile = [&](std::int64_t head, std::int64_t i) {
        if (i + kM <= begin || i >= end) return;
        ScoreTile<T> scores = load_queries(sequence, head, i);
        tile(&scores, task.begin, count);
        add_to_keys(count, sums);
      };
      for_each_query_tile({sequence, task.head, part, num_parts}, add_tile);
      if (part > 0) total_.add(part_, count);
    }
    write_keys(task, count, total_);
  }

  // With `writes_bias` dbias has an element for each score, and its rows are written as well.
  double queries(const BackwardTask& task, bool writes_bias) {
    const SequenceRows& sequence = task.sequence;
    ScoreTile<T> scores = load_queries(sequence, task.head, task.begin);
    fill(dq_t_, p_.head_dim * lanes_, T(0));
    const Range<std::int64_t> keys = scores.keys();
    double slope = 0.0;
    for (std::int64_t j = keys.begin; j < keys.end; j += kN) {
      const std::int64_t count = min_int(kN, keys.end - j);
      load_keys(sequence, task.head / group(), j, count);
      tile(&scores, j, count, b_.dalibi_slopes.data ? &slope : nullptr,
           writes_bias ? Bias::kStore : Bias::kNone);
      if (b_.dq.data) add_to_queries(count);
      if (writes_bias) write_bias_tile(sequence.batch, task.head, task.begin, j, count);
    }
    if (writes_bias) clear_bias(sequence.batch, task.head, task.begin, keys);
    if (b_.dq.data) write_queries(sequence, task.head, task.begin);
    return slope;
  }

  // Writes dq of a part of the queries that share the head, and leaves in `sums` what they add to
  // dk and dv of all its keys. `writes_bias`: as of queries().
  void head(const HeadTask& task, bool writes_bias, const KeySums<T>& sums) {
    sums.clear(task.sequence.len_k);
    for_each_query_tile(task, [&](std::int64_t head, std::int64_t i) {
      ScoreTile<T> scores = load_queries(task.sequence, head, i);
      fill(dq_t_, p_.head_dim * lanes_, T(0));
      const Range<std::int64_t> keys = scores.keys();
      for (std::int64_t j = keys.begin; j < keys.end; j += kN) {
        const std::int64_t count = min_int(kN, keys.end - j);
        load_keys(task.sequence, task.head, j, count);
        tile(&scores, j, count, nullptr, writes_bias ? Bias::kStore : Bias::kNone);
        add_to_keys(count, sums.from_key(j));
        add_to_queries(count);
        if (writes_bias) write_bias_tile(task.sequence.batch, head, i, j, count);
      }
      if (writes_bias) clear_bias(task.sequence.batch, head, i, keys);
      write_queries(task.sequence, head, i);
    });
  }

  // Writes dk and dv of kN keys from the sums of all parts of their head, which are `stride`
  // numbers apart.
  void finish(const BackwardTask& task, const KeySums<T>& sums, int num_parts,
              std::int64_t stride) {
    const std::int64_t count = min_int(kN, task.sequence.len_k - task.begin);
    const KeySums<T> first = sums.from_key(task.begin);
    KeySums<T> other = first;
    for (int part = 1; part < num_parts; ++part) {
      other.dk += stride, other.dv += stride;
      first.add(other, count);
    }
    write_keys(task, count, first);
  }

  void bias(const BiasTask& task, const BiasDims& dims, const SequenceRows* sequences) {
    fill(sums_, kN * kM, T(0));
    const auto each = [](bool own, std::int64_t index, std::int64_t count) {
      return own ? Range<std::int64_t>{index, index + 1} : Range<std::int64_t>{0, count};
    };
    const auto rows_of = [](bool own, std::int64_t tile, std::int64_t size, std::int64_t length) {
      if (!own) return Range<std::int64_t>{0, length};
      return Range<std::int64_t>{tile * size, min_int((tile + 1) * size, length)};
    };
    const Range<std::int64_t> batches =
        sequences ? each(dims.batches, task.batch, p_.batch_size) : Range<std::int64_t>{0, 0};
    const Range<std::int64_t> heads = each(dims.heads, task.head, p_.num_heads);
    for (std::int64_t b = batches.begin; b < batches.end; ++b) {
      const SequenceRows& sequence = sequences[b];
      const Range<std::int64_t> queries =
          rows_of(dims.queries, task.query_tile, kM, sequence.len_q);
      const Range<std::int64_t> keys = rows_of(dims.keys, task.key_tile, kN, sequence.len_k);
      for (std::int64_t h = heads.begin; h < heads.end; ++h) {
        for (std::int64_t i = queries.begin; i < queries.end; i += kM)
          add_to_bias(sequence, h, i, keys);
      }
    }
    write_bias(task, dims);
  }

 private:
  enum class Bias { kNone, kAdd, kStore };

  // Rows of k or v: in place, or converted to T.
  struct Left {
    const T* rows = nullptr;
    std::int64_t stride = 0;
  };

  template <typename U>
  static void fill(U* to, std::int64_t count, U value) {
    for (std::int64_t i = 0; i < count; ++i) to[i] = value;
  }

  // `columns`: padded, so whole vectors.
  static bool is_finite(const T* x, std::int64_t columns) {
    Vec<T> zero = {};
    for (std::int64_t i = 0; i < columns; i += kWidth<T>) zero += load(x + i) - load(x + i);
    T sum = T(0);
    for (int c = 0; c < kWidth<T>; ++c) sum += zero[c];
    return sum == T(0);
  }

  static void add_lanes(Vec<T> value, T* to) { store(to, load(to) + value); }

  PositionMask<std::int64_t> mask_of(const SequenceRows& sequence) const {
    return {window_of<std::int64_t>(p_), position_shift(p_.causal, sequence.len_q, sequence.len_k),
            sequence.len_k};
  }

  std::int64_t group() const { return p_.num_heads / p_.num_heads_kv; }

  // The tiles of queries of a part, over the query heads that share a KV head: every num_parts-th,
  // so that with causality all parts have about as many keys.
  template <typename Function>
  void for_each_query_tile(const HeadTask& task, const Function& function) {
    const std::int64_t tiles = (task.sequence.len_q + kM - 1) / kM;
    for (std::int64_t tile = task.part; tile < group() * tiles; tile += task.num_parts)
      function(task.head * group() + tile / tiles, tile % tiles * kM);
  }

  void write_keys(const BackwardTask& task, std::int64_t count, const KeySums<T>& sums) {
    const T scale = static_cast<T>(p_.softmax_scale);
    const std::int64_t entry = p_.cu_seqlens_k ? 0 : task.sequence.batch;
    for (std::int64_t n = 0; n < count; ++n) {
      const std::int64_t at = task.sequence.first_k + task.begin + n;
      const KeySums<T> row = sums.from_key(n);
      if (b_.dv.data) write_row(b_.dv, entry, at, task.head, p_.head_dim_v, row.dv);
      if (!b_.dk.data) continue;
      for (std::int64_t d = 0; d < p_.head_dim; ++d) row_[d] = row.dk[d] * scale;
      write_row(b_.dk, entry, at, task.head, p_.head_dim, row_);
    }
  }

  void load_keys(const SequenceRows& sequence, std::int64_t head, std::int64_t j,
                 std::int64_t count) {
    const std::int64_t entry = p_.cu_seqlens_k ? 0 : sequence.batch;
    const auto load_rows = [&](const TensorView& view, std::int64_t columns, T* to) -> Left {
      const char* const from =
          static_cast<const char*>(view.data) + row_offset(view, entry, sequence.first_k + j, head);
      if (size_of(view.dtype) == static_cast<std::int64_t>(sizeof(T)))
        return {reinterpret_cast<const T*>(from), count > 1 ? view.row_stride : 0};
      read_elements(view.dtype, from, count, view.row_stride, columns, to);
      return {to, columns};
    };
    keys_ = load_rows(p_.k, p_.head_dim, k_);
    values_ = load_rows(p_.v, p_.head_dim_v, v_);
  }

  // Takes queries i .. i + kM - 1 of a head, in as few lanes as hold those that there are. Lanes
  // behind the last one repeat it, so that no tile is visited for them, with an lse by which they
  // have no probability.
  ScoreTile<T> load_queries(const SequenceRows& sequence, std::int64_t head, std::int64_t i) {
    num_rows_ = min_int(kM, sequence.len_q - i);
    lanes_ = kWidth<T>;
    while (lanes_ < num_rows_) lanes_ *= 2;
    Arena memory(scratch_ + score_memory_);
    ScoreTile<T> scores(p_, sequence.batch, sequence.len_q, sequence.len_k, lanes_, kN, &memory);
    const std::int64_t entry = p_.cu_seqlens_q ? 0 : sequence.batch;
    const std::int64_t rows = p_.cu_seqlens_q ? p_.total_q : p_.seqlen_q;
    const T* const delta = all_deltas_ + (entry * p_.num_heads + head) * rows;
    const std::int64_t columns = padded_columns<T>(p_.head_dim);
    const std::int64_t columns_v = padded_columns<T>(p_.head_dim_v);
    if (num_rows_ < lanes_ || columns > p_.head_dim) fill(q_, columns * lanes_, T(0));
    if (num_rows_ < lanes_ || columns_v > p_.head_dim_v || !b_.dout.data)
      fill(dout_, columns_v * lanes_, T(0));
    odd_rows_ = 0;
    for (std::int64_t r = 0; r < lanes_; ++r) {
      scores.set_lane(r, i + min_int(r, num_rows_ - 1), head);
      lse_[r] = static_cast<T>(INFINITY), delta_[r] = T(0);
      if (r >= num_rows_) continue;
      const std::int64_t row = sequence.first_q + i + r;
      T* const q = q_ + r * columns;
      T* const dout = dout_ + r * columns_v;
      const float lse = p_.lse.data[entry * p_.lse.batch_stride + head * p_.lse.head_stride + row];
      if (lse == -INFINITY) {  // it sees nothing
        fill(q, columns, T(0));
        fill(dout, columns_v, T(0));
        continue;
      }
      read_row(p_.q, entry, row, head, p_.head_dim, q);
      if (b_.dout.data) read_row(b_.dout, entry, row, head, p_.head_dim_v, dout);
      lse_[r] = static_cast<T>(lse), delta_[r] = delta[row];
      if (!is_finite(q, columns) || !is_finite(dout, columns_v)) odd_rows_ |= 1ull << r;
    }
    transpose(q_, columns, lanes_, p_.head_dim, q_t_, lanes_);
    transpose(dout_, columns_v, lanes_, p_.head_dim_v, dout_t_, lanes_);
    for (std::uint64_t odd = odd_rows_; odd; odd &= odd - 1) {
      const std::int64_t r = __builtin_ctzll(odd);
      fill(q_ + r * columns, columns, T(0));
      fill(dout_ + r * columns_v, columns_v, T(0));
    }
    return scores;
  }

  // Leaves P^T in s_t_ and dS^T, times the derivative of the softcap, in dp_t_. Adds to `slope`
  // what dalibi_slopes gains, if it is wanted, and does with dS^T and sums_ as `bias` says.
  void tile(ScoreTile<T>* scores, std::int64_t j, std::int64_t count, double* slope = nullptr,
            Bias bias = Bias::kNone) {
    product(keys_, q_t_, p_.head_dim, count, s_t_);
    product(values_, dout_t_, p_.head_dim_v, count, dp_t_);
    const bool capped = p_.softcap > 0;
    if (scores->adjusts()) scores->adjust(s_t_, j, count, num_rows_, capped ? slopes_ : nullptr);
    scores->hide(s_t_, j, count);
    const T unit = scores->adjusts() ? T(1) : static_cast<T>(p_.softmax_scale);
    constexpr T kLog2E = MathConstants<T>::kLog2E;
    double total = 0.0;
    for (std::int64_t lane = 0; lane < lanes_; lane += kWidth<T>) {
      const Vec<T> lse = load(lse_ + lane), delta = load(delta_ + lane);
      Vec<T> distance = {}, sum = {};
      for (int c = 0; c < kWidth<T>; ++c) {
        distance[c] = static_cast<T>(scores->mask().position(scores->query(lane + c)) - j);
      }
      for (std::int64_t n = 0; n < count; ++n) {
        const std::int64_t at = n * lanes_ + lane;
        const Vec<T> score = load(s_t_ + at), power = (score * unit - lse) * kLog2E;
        // No score exceeds lse but by rounding, which at -1e9 is by 64.
        const Vec<T> seen = exp2<T>(-max(broadcast(T(0)), -power));
        // A key that is hidden has neither, be lse, delta or dP NaN.
        const auto hidden = score == -static_cast<T>(INFINITY);
        const Vec<T> p = hidden ? Vec<T>{} : seen;
        Vec<T> ds = hidden ? Vec<T>{} : seen * (load(dp_t_ + at) - delta);
        if (slope) {
          const Vec<T> keys = distance - static_cast<T>(n);
          sum += ds * (keys < T(0) ? -keys : keys);
        }
        if (bias == Bias::kAdd) add_lanes(ds, sums_ + n * kM + lane);
        if (bias == Bias::kStore) store(sums_ + n * kM + lane, ds);
        if (capped) ds *= load(slopes_ + at);
        store(s_t_ + at, p);
        store(dp_t_ + at, ds);
      }
      for (int c = 0; c < kWidth<T>; ++c) total += static_cast<double>(sum[c]);
    }
    if (slope) *slope -= total;
  }

  // S^T = K Q^T, or dP^T = V dO^T.
  void product(const Left& left, const T* right, std::int64_t depth, std::int64_t count,
               T* result) const {
    ProductArgs<T> args;
    args.left = left.rows, args.left_stride = left.stride;
    args.right = right, args.depth = depth;
    args.result = result, args.block_m = lanes_;
    multiply<T, Product::kScores>(count, args);
  }

  // dV += P^T dO and dK += dS^T Q.
  void add_to_keys(std::int64_t count, const KeySums<T>& sums) const {
    const auto add = [&](const T* left, const T* right, const T* right_t, std::int64_t columns,
                         T* result) {
      ProductArgs<T> args;
      args.left = left, args.left_stride = lanes_;
      args.right = right, args.depth = num_rows_;
      args.result = result, args.block_m = padded_columns<T>(columns);
      multiply<T, Product::kGradient>(count, args);
      for (std::uint64_t odd = odd_rows_; odd; odd &= odd - 1) {
        const int r = __builtin_ctzll(odd);
        add_odd_row(left + r, right_t + r, count, columns, result);
      }
    };
    if (b_.dv.data) add(s_t_, dout_, dout_t_, p_.head_dim_v, sums.dv);
    if (b_.dk.data) add(dp_t_, q_, q_t_, p_.head_dim, sums.dk);
  }

  // The terms of a row that is not finite, of keys that it sees.
  void add_odd_row(const T* left, const T* right_t, std::int64_t count, std::int64_t columns,
                   T* result) const {
    for (std::int64_t n = 0; n < count; ++n) {
      const T factor = left[n * lanes_];
      if (factor == T(0)) continue;
      T* const sums = result + n * padded_columns<T>(columns);
      for (std::int64_t d = 0; d < columns; ++d) sums[d] += factor * right_t[d * lanes_];
    }
  }

  // dQ^T += K^T dS^T.
  void add_to_queries(std::int64_t count) const {
    ProductArgs<T> args;
    args.left = keys_.rows, args.left_stride = keys_.stride;
    args.right = dp_t_, args.depth = count;
    args.result = dq_t_, args.rescale = ones_, args.block_m = lanes_;
    multiply<T, Product::kOutput>(p_.head_dim, args);
  }

  // q_ has dq in the place of q then.
  void write_queries(const SequenceRows& sequence, std::int64_t head, std::int64_t i) {
    const T scale = static_cast<T>(p_.softmax_scale);
    const std::int64_t columns = padded_columns<T>(p_.head_dim);
    transpose(dq_t_, lanes_, p_.head_dim, num_rows_, q_, columns);
    for (std::int64_t r = 0; r < num_rows_; ++r) {
      T* const row = q_ + r * columns;
      for (std::int64_t d = 0; d < p_.head_dim; ++d) row[d] *= scale;
      write_row(b_.dq, p_.cu_seqlens_q ? 0 : sequence.batch, sequence.first_q + i + r, head,
                p_.head_dim, row);
    }
  }

  void add_to_bias(const SequenceRows& sequence, std::int64_t head, std::int64_t i,
                   const Range<std::int64_t>& all) {
    ScoreTile<T> scores = load_queries(sequence, head, i);
    const Range<std::int64_t> seen = scores.keys();
    for (std::int64_t j = all.begin; j < all.end; j += kN) {
      const std::int64_t count = min_int(kN, all.end - j);
      if (j >= seen.end || j + count <= seen.begin) continue;
      load_keys(sequence, head / group(), j, count);
      tile(&scores, j, count, nullptr, Bias::kAdd);
    }
  }

  // Writes the sums of a task, added up over dimensions in which dbias has one element.
  void write_bias(const BiasTask& task, const BiasDims& dims) {
    const std::int64_t i = dims.queries ? task.query_tile * kM : 0;
    const std::int64_t j = dims.keys ? task.key_tile * kN : 0;
    const std::int64_t rows = dims.queries ? min_int(kM, p_.seqlen_q - i) : 1;
    const std::int64_t columns = dims.keys ? min_int(kN, p_.seqlen_k - j) : 1;
    if (dims.queries && dims.keys) {
      num_rows_ = rows;
      return write_bias_tile(task.batch, task.head, i, j, columns);
    }
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t n = 0; n < columns; ++n) {
        double sum = 0.0;
        for (std::int64_t x = dims.keys ? n : 0; x < (dims.keys ? n + 1 : kN); ++x) {
          for (std::int64_t y = dims.queries ? r : 0; y < (dims.queries ? r + 1 : kM); ++y)
            sum += static_cast<double>(sums_[x * kM + y]);
        }
        bias_rows_[n] = static_cast<T>(sum);
      }
      write_columns(b_.dbias, task.batch, i + r, task.head, j, columns, bias_rows_);
    }
  }

  // dbias of the queries at hand, from i on, and keys [j, j + count): what stands in sums_.
  void write_bias_tile(std::int64_t batch, std::int64_t head, std::int64_t i, std::int64_t j,
                       std::int64_t count) {
    transpose(sums_, kM, count, num_rows_, bias_rows_, kN);
    for (std::int64_t r = 0; r < num_rows_; ++r)
      write_columns(b_.dbias, batch, i + r, head, j, count, bias_rows_ + r * kN);
  }

  // 0 for the keys outside of `seen`, which the queries at hand, from i on, do not see.
  void clear_bias(std::int64_t batch, std::int64_t head, std::int64_t i,
                  const Range<std::int64_t>& seen) {
    const std::int64_t begin = clamp_int(seen.begin, 0, p_.seqlen_k);
    const std::int64_t end = clamp_int(seen.end, begin, p_.seqlen_k);
    fill(bias_rows_, kN, T(0));
    const auto clear = [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t j = first; j < last; j += kN) {
        for (std::int64_t r = 0; r < num_rows_; ++r)
          write_columns(b_.dbias, batch, i + r, head, j, min_int(kN, last - j), bias_rows_);
      }
    };
    clear(0, begin);
    clear(end, p_.seqlen_k);
  }

  const BackwardParams& b_;
  const AttentionParams& p_;
  const T* const all_deltas_;
  Arena arena_;
  char* scratch_;
  std::int64_t score_memory_;
  std::int64_t num_rows_ = 0, lanes_ = kM;  // of the queries at hand
  std::uint64_t odd_rows_ = 0;              // bits of those that are not finite: q_ has 0 there
  static_assert(kM <= 64);

  T *q_t_, *dout_t_, *dq_t_;  // [head_dim or head_dim_v, lanes]
  T *q_, *dout_;              // [lanes, columns]
  T *k_, *v_;                 // [kN, head_dim or head_dim_v]
  Left keys_, values_;        // at hand
  T *s_t_, *dp_t_, *slopes_;  // [kN, lanes]
  T *sums_, *bias_rows_;      // of dbias: [kN, kM], [kM, kN]
  T *lse_, *delta_, *ones_;   // [lanes]
  KeySums<T> part_, total_;   // of kN keys
  T* row_;
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
