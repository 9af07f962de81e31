#pragma once

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "dlattn/attention.h"
#include "reference.h"
#include "tensor.h"

namespace simt {

using dlattn::Causal;

enum class Layout {
  kBshd,    // contiguous
  kBhsd,    // contiguous, heads before rows
  kPacked,  // rows of q, k and v are slices of longer rows, as in a packed QKV tensor
  kAlign8,  // rows aligned to 8, 4 or 2 bytes, and no more
  kAlign4,
  kAlign2,
  kBroadcast,  // one batch entry of k and v for all
};

// One attention problem.
struct Case {
  int seqlen_q = 1;
  int seqlen_k = 1;
  int head_dim = 64;
  Causal causal = Causal::kNone;
  int num_heads = 1;
  int num_heads_kv = 1;
  Layout layout = Layout::kBshd;
  int head_dim_v = 0;  // 0: head_dim
  int batch_size = 1;
  bool lse = true;

  int dim_v() const { return head_dim_v ? head_dim_v : head_dim; }

  std::string name() const {
    static const char* const kCausal[] = {"full", "causal", "top-left"};
    static const char* const kLayout[] = {"bshd",   "bhsd",   "packed",   "align8",
                                          "align4", "align2", "broadcast"};
    std::ostringstream out;
    out << "b" << batch_size << " q" << seqlen_q << " k" << seqlen_k << " h" << num_heads << "/"
        << num_heads_kv << " d" << head_dim;
    if (head_dim_v) out << "/" << head_dim_v;
    out << " " << kCausal[static_cast<int>(causal)] << " " << kLayout[static_cast<int>(layout)];
    if (!lse) out << " no lse";
    return out.str();
  }
};

// The tensors of a case, all [batch, rows, heads, dim].
template <typename T>
struct Tensors {
  Tensor<T> q, k, v, out;
  Tensor<float> lse;  // [batch, heads, rows, 1]
};

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
  const std::int64_t sizes[] = {batch, rows, heads, dim};
  std::int64_t row = heads * dim + off, head = dim;
  std::int64_t per_batch = rows * row;
  if (layout == Layout::kBhsd) row = dim, head = rows * dim;
  if (layout == Layout::kPacked) row = 3 * heads * dim + 16, per_batch = rows * row;
  if (layout == Layout::kBroadcast) per_batch = 0;
  const std::int64_t strides[] = {per_batch, row, head, 1};
  tensor->allocate(sizes, strides, off);
}

template <typename T>
Tensors<T> make_tensors(const Case& c) {
  Tensors<T> t;
  allocate(&t.q, c.layout == Layout::kBroadcast ? Layout::kBshd : c.layout, c.batch_size,
           c.seqlen_q, c.num_heads, c.head_dim);
  allocate(&t.k, c.layout, c.batch_size, c.seqlen_k, c.num_heads_kv, c.head_dim);
  allocate(&t.v, c.layout, c.batch_size, c.seqlen_k, c.num_heads_kv, c.dim_v());
  allocate(&t.out, c.layout == Layout::kBroadcast ? Layout::kBshd : c.layout, c.batch_size,
           c.seqlen_q, c.num_heads, c.dim_v());
  allocate(&t.lse, Layout::kBshd, c.batch_size, c.num_heads, c.seqlen_q, 1);
  std::mt19937 random(7 * c.seqlen_q + c.seqlen_k + 1000 * c.head_dim);
  // Wide scores: the maximum of a row keeps rising from tile to tile, and some keys weigh much more
  // than others.
  t.q.fill(&random, 1.5, 0.25);
  t.k.fill(&random, 1.5, 0.25);
  t.v.fill(&random, 1.0, 0.5);
  return t;
}

template <typename T>
dlattn::AttentionParams make_params(const Case& c, const Tensors<T>& t, dlattn::DType dtype) {
  dlattn::AttentionParams p;
  p.q = t.q.data(), p.k = t.k.data(), p.v = t.v.data(), p.out = t.out.data();
  p.lse = c.lse ? t.lse.data() : nullptr;
  p.dtype = dtype;
  p.device.type = dlattn::DeviceType::kCuda;
  p.batch_size = c.batch_size, p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k;
  p.num_heads = c.num_heads, p.num_heads_kv = c.num_heads_kv;
  p.head_dim = c.head_dim, p.head_dim_v = c.dim_v();
  p.q_batch_stride = t.q.stride(0), p.q_row_stride = t.q.stride(1), p.q_head_stride = t.q.stride(2);
  p.k_batch_stride = t.k.stride(0), p.k_row_stride = t.k.stride(1), p.k_head_stride = t.k.stride(2);
  p.v_batch_stride = t.v.stride(0), p.v_row_stride = t.v.stride(1), p.v_head_stride = t.v.stride(2);
  p.out_batch_stride = t.out.stride(0), p.out_row_stride = t.out.stride(1),
  p.out_head_stride = t.out.stride(2);
  p.lse_batch_stride = t.lse.stride(0), p.lse_head_stride = t.lse.stride(1);
  p.softmax_scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  p.causal = c.causal;
  return p;
}

template <typename T>
reference::Problem make_problem(const Case& c, const Tensors<T>& t, int batch, int head) {
  reference::Problem p;
  p.seqlen_q = c.seqlen_q, p.seqlen_k = c.seqlen_k, p.head_dim = c.head_dim,
  p.head_dim_v = c.dim_v();
  p.causal = c.causal != Causal::kNone;
  p.shift = c.causal == Causal::kTopLeft ? 0 : c.seqlen_k - c.seqlen_q;
  p.softmax_scale = 1.0 / std::sqrt(static_cast<double>(c.head_dim));
  const auto gather = [batch](const Tensor<T>& tensor, int rows, int h, int dim) {
    std::vector<double> values;
    for (int row = 0; row < rows; ++row) {
      for (int d = 0; d < dim; ++d)
        values.push_back(static_cast<double>(static_cast<float>(tensor.at(batch, row, h, d))));
    }
    return values;
  };
  const int head_kv = head / (c.num_heads / c.num_heads_kv);
  p.q = gather(t.q, c.seqlen_q, head, c.head_dim);
  p.k = gather(t.k, c.seqlen_k, head_kv, c.head_dim);
  p.v = gather(t.v, c.seqlen_k, head_kv, c.dim_v());
  return p;
}

}  // namespace simt
