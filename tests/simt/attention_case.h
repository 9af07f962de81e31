#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "core/problem/descales.h"
#include "core/problem/positions.h"
#include "dlattn/attention.h"
#include "extreme.h"
#include "reference.h"
#include "tensor.h"

namespace simt {

using dlattn::Causal;
inline constexpr Causal kFull = Causal::kNone, kCausal = Causal::kBottomRight,
                        kTopLeft = Causal::kTopLeft;

enum class Layout {
  kBshd,    // contiguous
  kBhsd,    // contiguous, heads before rows
  kPacked,  // rows of q, k and v are slices of longer rows, as in a packed QKV tensor
  kAlign8,  // rows aligned to 8, 4 or 2 bytes, and no more
  kAlign4,
  kAlign2,
  kBroadcast,  // one batch entry of k and v for all
};

enum class Bias { kNone, kOwnDType, kFloat32 };

// The layout of bias and mask.
enum class ScoreLayout {
  kRows,     // contiguous
  kAligned,  // rows begin at multiples of 16 elements
  kOneRow,   // one row for all queries
  kOneKey,   // one element for all keys of a row
  kColumns,  // transposed: queries are neighbours in memory, keys are not
};

// One attention problem.
struct Case {
  int seqlen_q = 1;
  int seqlen_k = 1;
  int head_dim = 64;
  Causal causal = kFull;
  int num_heads = 1;
  int num_heads_kv = 1;
  Layout layout = Layout::kBshd;
  int head_dim_v = 0;  // 0: head_dim
  int batch_size = 1;
  bool lse = true;
  // Score features.
  int window_left = -1;
  int window_right = -1;
  bool sinks = false;
  double softcap = 0.0;
  bool alibi = false;
  bool alibi_per_sequence = false;  // else all sequences share a head's slope
  Bias bias = Bias::kNone;
  bool mask = false;
  ScoreLayout score_layout = ScoreLayout::kRows;
  // By how much scores rise from key to key towards the first, in the middle half of the keys. If
  // negative, by how much key 127 stands out.
  double rise = 0.0;
  double bias_rise = 0.0;  // the same of the bias, not negative
  double pair = 0.0;       // the first element of the last two keys, but for its sign; k is 0 else
  // Settings of 8-bit inputs. All descales of k are `k_descale`, or drawn as the others are.
  bool descales = false;
  bool q_descale_by_kv_head = false;
  std::optional<float> k_descale = {};
  // Variable length, if any: what the kernels find in memory, of batch_size sequences in tensors of
  // total_q and total_k rows. seqlen_q and seqlen_k are what the host takes for the longest.
  std::vector<int> cu_seqlens_q = {}, cu_seqlens_k = {}, seqused_k = {};
  int total_q = 0, total_k = 0;
  std::string lengths = {};  // their description
  // The seed of a random problem, which not every family serves.
  std::optional<unsigned> seed = {};
  // The values of a test of extreme ones, which not every family serves either.
  std::optional<Extreme> extreme = {};

  int dim_v() const { return head_dim_v ? head_dim_v : head_dim; }
  double softmax_scale() const {
    return extreme && extreme->scale ? *extreme->scale : 1.0 / std::sqrt(double(head_dim));
  }
  bool varlen() const { return !cu_seqlens_q.empty(); }
  // Where a sequence's tensors stand: batch index and first row; and how many rows are its own.
  // Lengths in memory count as far as the tensors and the longest length allow.
  int batch_index(int batch) const { return varlen() ? 0 : batch; }
  int start_q(int batch) const { return varlen() ? within(cu_seqlens_q[batch], 0, total_q) : 0; }
  int start_k(int batch) const { return varlen() ? within(cu_seqlens_k[batch], 0, total_k) : 0; }
  int rows_q(int batch) const {
    if (!varlen()) return seqlen_q;
    const int start = start_q(batch), end = within(cu_seqlens_q[batch + 1], start, total_q);
    return std::min(end - start, seqlen_q);
  }
  int rows_k(int batch) const {
    if (!varlen()) return seqlen_k;
    const int start = start_k(batch), end = within(cu_seqlens_k[batch + 1], start, total_k);
    const int rows = std::min(end - start, seqlen_k);
    return seqused_k.empty() ? rows : within(seqused_k[batch], 0, rows);
  }
  // How many sequences have a row of the queries.
  int owners(int row) const {
    int count = 0;
    for (int b = 0; b < batch_size; ++b) count += row >= start_q(b) && row < start_q(b) + rows_q(b);
    return count;
  }
  // Whether sequences share rows, which cu_seqlens that decrease make them do: what these hold in
  // the end depends on the order of thread blocks.
  bool sequences_overlap() const {
    for (int row = 0; varlen() && row < total_q; ++row) {
      if (owners(row) > 1) return true;
    }
    return false;
  }

  std::string name() const;

 private:
  static int within(int x, int least, int most) { return std::max(least, std::min(x, most)); }
};

// Sets further fields of a case.
template <typename Set>
Case with(Case c, Set set) {
  set(c);
  return c;
}

// Sequences of these lengths, which are all that the tensors hold.
Case varlen(Case c, const std::vector<int>& seqlens_q, const std::vector<int>& seqlens_k);

void append(std::vector<Case>* cases, const std::vector<Case>& more);

// The tensors of a case. q, k, v and out are [batch, rows, heads, dim]. Out has a dtype of its own
// where inputs have 8 bits.
template <typename T, typename Out = T>
struct Tensors {
  Tensor<T> q, k, v, bias;
  Tensor<Out> out;
  Tensor<float> lse;  // [batch, heads, rows, 1]
  Tensor<float> bias_float32, alibi, sinks;
  Tensor<float> q_descale, k_descale, v_descale;  // [batch, heads, 1, 1]
  Tensor<std::uint8_t> mask;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k, seqused_k;
};

// Writes to every element what it holds. Not inlined: there are many tensors.
template <typename T>
[[gnu::noinline]] void rewrite(const Tensor<T>& tensor) {
  tensor.for_each([](T& x) {
    volatile unsigned char* bytes = reinterpret_cast<unsigned char*>(&x);
    for (std::size_t i = 0; i < sizeof(T); ++i) bytes[i] = bytes[i];
  });
}
inline void rewrite(const std::vector<std::int32_t>& lengths) {
  for (const std::int32_t& x : lengths) const_cast<volatile std::int32_t&>(x) = x;
}

// Does to a launch's tensors and lengths all that a grid ahead of it may do.
template <typename T, typename Out>
void rewrite_but_lengths(const Tensors<T, Out>& t) {
  rewrite(t.q), rewrite(t.k), rewrite(t.v), rewrite(t.out), rewrite(t.lse);
  rewrite(t.q_descale), rewrite(t.k_descale), rewrite(t.v_descale);
  rewrite(t.bias), rewrite(t.bias_float32), rewrite(t.mask), rewrite(t.alibi), rewrite(t.sinks);
}
template <typename T, typename Out>
void rewrite(const Tensors<T, Out>& t) {
  rewrite_but_lengths(t);
  rewrite(t.cu_seqlens_q), rewrite(t.cu_seqlens_k), rewrite(t.seqused_k);
}

// Elements from row to row that `layout` adds, and by which the first element is off its block's
// start.
inline std::int64_t misalignment(Layout layout, std::size_t element_bytes) {
  switch (layout) {
    case Layout::kAlign8:
      return 8 / element_bytes;
    case Layout::kAlign4:
      return 4 / element_bytes;
    case Layout::kAlign2:
      return 1;
    default:
      return 0;
  }
}

template <typename T>
void allocate(Tensor<T>* tensor, Layout layout, std::int64_t batch, std::int64_t rows,
              std::int64_t heads, std::int64_t dim) {
  const std::int64_t off = misalignment(layout, sizeof(T));
  std::int64_t row = heads * dim + off, head = dim;
  std::int64_t per_batch = rows * row;
  if (layout == Layout::kBhsd) row = dim, head = rows * dim;
  if (layout == Layout::kPacked) row = 3 * heads * dim + 16, per_batch = rows * row;
  if (layout == Layout::kBroadcast) per_batch = 0;
  tensor->allocate({batch, rows, heads, dim}, {per_batch, row, head, 1}, off);
}

// [batch, heads, seqlen_q, seqlen_k] with one batch entry or one head for all.
template <typename T>
void allocate_scores(Tensor<T>* tensor, const Case& c, bool per_batch, bool per_head) {
  std::int64_t row = c.seqlen_k, column = 1;
  if (c.score_layout == ScoreLayout::kAligned) row = (row + 15) / 16 * 16;
  std::int64_t matrix = c.seqlen_q * row;
  if (c.score_layout == ScoreLayout::kOneRow) matrix = row, row = 0;
  if (c.score_layout == ScoreLayout::kOneKey) matrix = c.seqlen_q, row = 1, column = 0;
  if (c.score_layout == ScoreLayout::kColumns) row = 1, column = c.seqlen_q;
  tensor->allocate(
      {c.batch_size, c.num_heads, c.seqlen_q, c.seqlen_k},
      {per_batch ? matrix * (per_head ? c.num_heads : 1) : 0, per_head ? matrix : 0, row, column});
}

// How far key j stands above the last of those that `rise` is about, in steps.
inline int steps(const Case& c, int j) {
  const int from = c.seqlen_k / 4, to = c.seqlen_k * 3 / 4;
  return to - std::clamp(j, from, to);
}

// Shapes of a problem of one batch entry and fixed length.
template <typename T, typename Out>
void raise_scores(const Case& c, const Tensors<T, Out>& t) {
  constexpr float kQuery = 2.0f;
  const double step = c.rise * std::sqrt(static_cast<double>(c.head_dim)) / kQuery;
  for (int h = 0; h < c.num_heads; ++h) {
    for (int i = 0; i < c.seqlen_q; ++i) t.q.at(0, i, h, 0) = static_cast<T>(kQuery);
  }
  for (int h = 0; h < c.num_heads_kv; ++h) {
    for (int j = 0; j < c.seqlen_k; ++j) {
      if (c.rise < 0.0) {  // one key, the last of its tile and of its slices
        t.k.at(0, j, h, 0) = static_cast<T>(j == 127 ? static_cast<float>(-step) : 0.0f);
        continue;
      }
      t.k.at(0, j, h, 0) = static_cast<T>(static_cast<float>(step * steps(c, j)));
    }
  }
}
// One row of the bias serves all rows that are the same one in memory.
template <typename T>
void raise_bias(const Case& c, const Tensor<T>& bias) {
  const int rows = c.score_layout == ScoreLayout::kOneRow ? 1 : c.seqlen_q;
  for (int i = 0; bias.data() && i < rows; ++i) {
    for (int j = 0; j < c.seqlen_k; ++j) {
      T& x = bias.at(0, 0, i, j);
      x = static_cast<T>(static_cast<float>(x) + static_cast<float>(c.bias_rise * steps(c, j)));
    }
  }
}

// A row of a varlen tensor, of all heads.
template <typename T>
void fill_row(const Tensor<T>& tensor, int row, T value) {
  for (std::int64_t h = 0; h < tensor.size(2); ++h) {
    for (std::int64_t d = 0; d < tensor.size(3); ++d) tensor.at(0, row, h, d) = value;
  }
}

// Without values: all that a plan asks for.
template <typename T, typename Out = T>
Tensors<T, Out> allocate_tensors(const Case& c) {
  Tensors<T, Out> t;
  const int batch = c.varlen() ? 1 : c.batch_size;
  const int rows_q = c.varlen() ? c.total_q : c.seqlen_q;
  const int rows_k = c.varlen() ? c.total_k : c.seqlen_k;
  const Layout layout_q = c.layout == Layout::kBroadcast ? Layout::kBshd : c.layout;
  allocate(&t.q, layout_q, batch, rows_q, c.num_heads, c.head_dim);
  allocate(&t.k, c.layout, batch, rows_k, c.num_heads_kv, c.head_dim);
  allocate(&t.v, c.layout, batch, rows_k, c.num_heads_kv, c.dim_v());
  allocate(&t.out, layout_q, batch, rows_q, c.num_heads, c.dim_v());
  allocate(&t.lse, Layout::kBshd, batch, c.num_heads, rows_q, 1);
  if (c.sinks) t.sinks.allocate({1, c.num_heads, 1, 1}, {0, 1, 0, 0});
  if (c.alibi) {
    const std::int64_t step = c.alibi_per_sequence ? c.num_heads : 0;
    t.alibi.allocate({c.batch_size, c.num_heads, 1, 1}, {step, 1, 0, 0});
  }
  if (c.bias == Bias::kOwnDType) allocate_scores(&t.bias, c, true, false);
  if (c.bias == Bias::kFloat32) allocate_scores(&t.bias_float32, c, false, true);
  if (c.mask) allocate_scores(&t.mask, c, true, true);
  if (c.descales) {
    const int heads_q = c.q_descale_by_kv_head ? c.num_heads_kv : c.num_heads;
    t.q_descale.allocate({c.batch_size, heads_q, 1, 1}, {heads_q, 1, 0, 0});
    for (Tensor<float>* descale : {&t.k_descale, &t.v_descale})
      descale->allocate({c.batch_size, c.num_heads_kv, 1, 1}, {c.num_heads_kv, 1, 0, 0});
  }
  // Copies, whose blocks end where they do.
  t.cu_seqlens_q = c.cu_seqlens_q, t.cu_seqlens_k = c.cu_seqlens_k, t.seqused_k = c.seqused_k;
  return t;
}

template <typename T, typename Out>
void fill_tensors(const Case& c, const Tensors<T, Out>& t) {
  std::mt19937 random(7 * c.seqlen_q + c.seqlen_k + 1000 * c.head_dim);
  // Wide scores: the maximum of a row keeps rising from tile to tile, and some keys weigh much more
  // than others.
  t.q.fill(&random, 1.5, 0.25);
  t.k.fill(&random, 1.5, 0.25);
  t.v.fill(&random, 1.0, 0.5);
  if (c.rise != 0.0) raise_scores(c, t);
  if (c.pair != 0.0) {
    t.k.for_each([](T& x) { x = static_cast<T>(0.0f); });
    for (int j = 1; j <= 2; ++j) {
      for (int h = 0; h < c.num_heads_kv; ++h)
        t.k.at(0, c.seqlen_k - j, h, 0) =
            static_cast<T>(static_cast<float>(j == 1 ? c.pair : -c.pair));
    }
  }
  // Rows of no sequence, and keys that are not in use, may hold anything.
  for (int row = 0; c.varlen() && row < c.total_q; ++row) {
    if (c.owners(row) == 0) fill_row(t.q, row, static_cast<T>(NAN));
  }
  for (int row = 0; c.varlen() && row < c.total_k; ++row) {
    bool in_use = false;
    for (int b = 0; b < c.batch_size; ++b)
      in_use |= row >= c.start_k(b) && row < c.start_k(b) + c.rows_k(b);
    if (in_use) continue;
    fill_row(t.k, row, static_cast<T>(NAN)), fill_row(t.v, row, static_cast<T>(NAN));
  }
  t.sinks.fill(&random, 1.0, 1.0);
  t.alibi.fill(&random, 0.05, 0.25);
  t.bias.fill(&random, 1.0, 0.5);
  t.bias_float32.fill(&random, 1.0, 0.5);
  if (c.bias_rise != 0.0) raise_bias(c, t.bias), raise_bias(c, t.bias_float32);
  t.mask.for_each([&](std::uint8_t& m) { m = random() % 4 ? 1 + random() % 255 : 0; });
  if (c.extreme) set_extremes(c, t);
  // Factors of both sizes.
  std::uniform_real_distribution<float> exponent(-1.0f, 1.0f);
  for (const Tensor<float>* descale : {&t.q_descale, &t.k_descale, &t.v_descale})
    descale->for_each([&](float& x) { x = std::exp2(exponent(random)); });
  if (c.k_descale) t.k_descale.for_each([&](float& x) { x = *c.k_descale; });
  // One row sees nothing, some see nothing in whole tiles.
  for (int i = 0; t.mask.data() && i < std::min(c.seqlen_q, 4); ++i) {
    for (int j = i == 0 ? 0 : 5; j < c.seqlen_k; ++j) t.mask.at(0, 0, i, j) = 0;
  }
}

template <typename T, typename Out = T>
Tensors<T, Out> make_tensors(const Case& c) {
  Tensors<T, Out> t = allocate_tensors<T, Out>(c);
  fill_tensors(c, t);
  return t;
}

template <typename T, typename Out>
dlattn::AttentionParams make_params(const Case& c, const Tensors<T, Out>& t, dlattn::DType dtype,
                                    dlattn::DType out_dtype) {
  dlattn::AttentionParams p;
  p.q.data = t.q.data(), p.k.data = t.k.data(), p.v.data = t.v.data(), p.out.data = t.out.data();
  p.lse.data = c.lse ? t.lse.data() : nullptr;
  p.q.dtype = p.k.dtype = p.v.dtype = dtype;
  p.out.dtype = out_dtype;
  p.device.type = dlattn::DeviceType::kCuda;
  p.batch_size = c.batch_size, p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k;
  p.num_heads = c.num_heads, p.num_heads_kv = c.num_heads_kv;
  p.head_dim = c.head_dim, p.head_dim_v = c.dim_v();
  p.q.batch_stride = t.q.stride(0), p.q.row_stride = t.q.stride(1), p.q.head_stride = t.q.stride(2);
  p.k.batch_stride = t.k.stride(0), p.k.row_stride = t.k.stride(1), p.k.head_stride = t.k.stride(2);
  p.v.batch_stride = t.v.stride(0), p.v.row_stride = t.v.stride(1), p.v.head_stride = t.v.stride(2);
  p.out.batch_stride = t.out.stride(0), p.out.row_stride = t.out.stride(1);
  p.out.head_stride = t.out.stride(2);
  p.lse.batch_stride = t.lse.stride(0), p.lse.head_stride = t.lse.stride(1);
  p.softmax_scale = c.softmax_scale();
  p.softcap = c.softcap;
  p.causal = c.causal;
  p.window_left = c.window_left, p.window_right = c.window_right;
  p.sinks.data = t.sinks.data(), p.sinks.head_stride = t.sinks.stride(1);
  p.alibi_slopes.data = t.alibi.data(), p.alibi_slopes.head_stride = t.alibi.stride(1);
  p.alibi_slopes.batch_stride = t.alibi.stride(0);
  const auto set_descale = [](auto* view, const Tensor<float>& descale) {
    view->data = descale.data();
    view->batch_stride = descale.stride(0), view->head_stride = descale.stride(1);
  };
  set_descale(&p.q_descale, t.q_descale);
  set_descale(&p.k_descale, t.k_descale);
  set_descale(&p.v_descale, t.v_descale);
  if (c.q_descale_by_kv_head) p.heads_per_q_descale = c.num_heads / c.num_heads_kv;
  const auto set_bias = [&p](const auto& bias, dlattn::DType bias_dtype) {
    p.bias.data = bias.data(), p.bias.dtype = bias_dtype;
    p.bias.batch_stride = bias.stride(0), p.bias.head_stride = bias.stride(1);
    p.bias.row_stride = bias.stride(2), p.bias.col_stride = bias.stride(3);
  };
  if (c.bias == Bias::kOwnDType) set_bias(t.bias, dtype);
  if (c.bias == Bias::kFloat32) set_bias(t.bias_float32, dlattn::DType::kFloat32);
  p.mask.data = t.mask.data();
  p.mask.batch_stride = t.mask.stride(0), p.mask.head_stride = t.mask.stride(1);
  p.mask.row_stride = t.mask.stride(2), p.mask.col_stride = t.mask.stride(3);
  if (c.varlen()) {
    p.cu_seqlens_q = t.cu_seqlens_q.data(), p.cu_seqlens_k = t.cu_seqlens_k.data();
    p.seqused_k = t.seqused_k.empty() ? nullptr : t.seqused_k.data();
    p.total_q = c.total_q, p.total_k = c.total_k;
  }
  return p;
}

template <typename T, typename Out>
reference::Problem make_problem(const Case& c, const Tensors<T, Out>& t, int batch, int head) {
  const std::int64_t seqlen_q = c.rows_q(batch), seqlen_k = c.rows_k(batch);
  const auto window = dlattn::window_of<std::int64_t>(c.causal, c.window_left, c.window_right);
  const std::int64_t shift = dlattn::position_shift(c.causal, seqlen_q, seqlen_k);
  reference::Problem p(dlattn::PositionMask<std::int64_t>(window, shift, seqlen_k));
  p.seqlen_q = c.rows_q(batch), p.seqlen_k = c.rows_k(batch);
  p.head_dim = c.head_dim, p.head_dim_v = c.dim_v();
  p.softmax_scale = c.softmax_scale();
  p.softcap = c.softcap;
  if (c.sinks) p.sink = t.sinks.at(0, head, 0, 0);
  if (c.alibi) p.alibi_slope = t.alibi.at(batch, head, 0, 0);
  const auto gather = [&c, batch](const Tensor<T>& tensor, int start, int rows, int h, int dim) {
    std::vector<double> values;
    for (int row = start; row < start + rows; ++row) {
      for (int d = 0; d < dim; ++d) {
        values.push_back(static_cast<float>(tensor.at(c.batch_index(batch), row, h, d)));
      }
    }
    return values;
  };
  const int head_kv = head / (c.num_heads / c.num_heads_kv);
  if (c.descales) {
    const auto params = make_params(c, t, dlattn::DType::kFloat8E4M3, dlattn::DType::kFloat32);
    const dlattn::Descales descales = dlattn::descales_of(params, batch, head, head_kv);
    p.softmax_scale *= descales.scores;
    p.v_descale = descales.v;
  }
  p.q = gather(t.q, c.start_q(batch), p.seqlen_q, head, c.head_dim);
  p.k = gather(t.k, c.start_k(batch), p.seqlen_k, head_kv, c.head_dim);
  p.v = gather(t.v, c.start_k(batch), p.seqlen_k, head_kv, c.dim_v());
  for (int i = 0; i < p.seqlen_q; ++i) {
    for (int j = 0; j < p.seqlen_k; ++j) {
      if (c.bias == Bias::kOwnDType) {
        p.bias.push_back(static_cast<float>(t.bias.at(batch, head, i, j)));
      }
      if (c.bias == Bias::kFloat32) p.bias.push_back(t.bias_float32.at(batch, head, i, j));
      if (c.mask) p.mask.push_back(t.mask.at(batch, head, i, j) != 0);
    }
  }
  return p;
}

}  // namespace simt
