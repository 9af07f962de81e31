#pragma once

#include <cstdint>

#include "core/problem/tensor_sizes.h"
#include "cuda/forward/wmma/split_traits.h"
#include "cuda/plan/launch_shape.h"

namespace dlattn::wmma {

// The parameters of the split kernel. Its blocks are short, so that a parameter's first read and
// every instruction before the first copy count. So there are few parameters, in the order of their
// use, and offsets into q, k and v are 32-bit numbers of chunks of 16 bytes.
struct ChunkStrides {
  int batch, head, row;
};

struct SplitParams {
  const void *k, *v, *q;
  Divider num_m_blocks, num_heads;  // as in LaunchShape
  Divider heads_per_kv_head;
  ChunkStrides k_stride, v_stride, q_stride;
  int seqlen_q, seqlen_k;
  Window<int> window;
  float scale_log2;
  int head_dim, head_dim_v;
  bool longest_first;
  Causal causal;
  std::uint32_t heads_in_groups;
  Divider heads_left;
  const std::int32_t *cu_seqlens_q, *cu_seqlens_k, *seqused_k;
  int total_q, total_k;

  MutableTensorView out;
  BasicTensorView<float> lse;
  BasicTensorView<const float> sinks;
  int store_bytes;
};

constexpr int kChunkElements = 16 / kElementBytes;

// Whether 32 bits hold every offset: whether q, k and v span less than 32 GiB each.
inline bool split_offsets_fit(const AttentionParams& p) {
  const auto fits = [](const TensorView& x, const core::TensorSizes& sizes) {
    const auto span = [](std::int64_t size, std::int64_t stride) {
      const double elements = static_cast<double>(size) * static_cast<double>(stride);
      return elements < 0 ? -elements : elements;
    };
    // Row blocks and tiles reach beyond the last row.
    constexpr std::int64_t kMoreRows = 128;
    return span(sizes.batch - 1, x.batch_stride) + span(sizes.heads - 1, x.head_stride) +
               span(sizes.rows + kMoreRows, x.row_stride) <
           kChunkElements * 2147483648.0;
  };
  const core::TensorSizes keys = core::key_sizes(p);
  return fits(p.q, core::query_sizes(p)) && fits(p.k, keys) && fits(p.v, keys);
}

inline SplitParams make_split_params(const AttentionParams& p, const LaunchShape& shape) {
  const auto chunks = [&](const TensorView& x) {
    const auto of = [](std::int64_t stride) { return static_cast<int>(stride / kChunkElements); };
    return ChunkStrides{of(p.cu_seqlens_q ? 0 : x.batch_stride), of(x.head_stride),
                        of(x.row_stride)};
  };
  SplitParams s{};
  s.k = p.k.data;
  s.v = p.v.data;
  s.q = p.q.data;
  s.num_m_blocks = shape.num_m_blocks;
  s.num_heads = shape.num_heads;
  s.heads_per_kv_head = shape.heads_per_kv_head;
  s.k_stride = chunks(p.k);
  s.v_stride = chunks(p.v);
  s.q_stride = chunks(p.q);
  s.seqlen_q = static_cast<int>(p.seqlen_q);
  s.seqlen_k = static_cast<int>(p.seqlen_k);
  s.window = shape.window;
  s.scale_log2 = shape.scale_log2;
  s.head_dim = static_cast<int>(p.head_dim);
  s.head_dim_v = static_cast<int>(p.head_dim_v);
  s.longest_first = shape.longest_first;
  s.causal = p.causal;
  s.heads_in_groups = shape.heads_in_groups;
  s.heads_left = shape.heads_left;
  s.cu_seqlens_q = p.cu_seqlens_q;
  s.cu_seqlens_k = p.cu_seqlens_k;
  s.seqused_k = p.seqused_k;
  s.total_q = static_cast<int>(p.total_q);
  s.total_k = static_cast<int>(p.total_k);
  s.out = p.out;
  s.lse = p.lse;
  s.sinks = p.sinks;
  s.store_bytes = shape.store_bytes;
  return s;
}

}  // namespace dlattn::wmma
