#pragma once

#include <algorithm>
#include <cstdint>

#include "core/operations/operation.h"
#include "core/problem/alignment.h"
#include "core/problem/tensor_sizes.h"
#include "dlattn/forward.h"

// Options::batch_invariant: the problem that choices are made for. Kernel, variant, packing and
// parts of the keys are chosen for it alone, so that they cannot follow what it does not have: the
// lengths, the number of sequences or of heads. Grids, TMA boxes and the workspace are those of the
// real problem, which is planned afterwards with the choices made (choose.h).
namespace dlattn::core {

// A tensor of one row whose address is aligned as all rows of the real one are.
template <typename T>
void keep_alignment(BasicTensorView<T>* x, int bytes) {
  constexpr std::uintptr_t kAddress = 4096;
  x->data = reinterpret_cast<T*>(kAddress + static_cast<std::uintptr_t>(bytes) % 16);
  x->batch_stride = x->row_stride = x->head_stride = 0;
}

// The same for bias and mask, whose rows no choice follows. Keys that are no neighbours in memory
// stay so; how far apart they are does not matter.
template <typename T>
void keep_layout(BasicTensorView<T>* x, std::int64_t seqlen_k) {
  if (!x->data) return;
  if (seqlen_k <= 1) x->col_stride = 1;
  keep_alignment(x, 16);
}

// A large batch of long sequences with the features, head dims and alignment of `p`, and as many
// query heads for each KV head. Its rows fill any device. However many heads share a KV head, there
// are about as many rows, so that none of its sizes is beyond what kernels count.
inline AttentionParams problem_for_choice(const AttentionParams& p) {
  constexpr std::int64_t kSeqlen = 4096, kSequences = 1024;  // of one head
  AttentionParams choice = p;
  choice.num_heads = p.num_heads / p.num_heads_kv;
  choice.num_heads_kv = 1;
  choice.batch_size = std::max<std::int64_t>(kSequences / choice.num_heads, 1);
  choice.seqlen_q = choice.seqlen_k = kSeqlen;
  keep_alignment(&choice.q, row_alignment(p.q, query_sizes(p), size_of(p.q.dtype)));
  keep_alignment(&choice.k, row_alignment(p.k, key_sizes(p), size_of(p.k.dtype)));
  keep_alignment(&choice.v, row_alignment(p.v, key_sizes(p), size_of(p.v.dtype)));
  keep_alignment(&choice.out, row_alignment(p.out, query_sizes(p), size_of(p.out.dtype)));
  keep_layout(&choice.bias, p.seqlen_k);
  keep_layout(&choice.mask, p.seqlen_k);
  // attention() and attention_varlen() choose alike. Keys in a cache stay in it.
  const bool cache = is_cache(p);
  choice.cu_seqlens_q = choice.cu_seqlens_k = nullptr;
  choice.total_q = choice.total_k = 0;
  if (!cache) choice.seqused_k = nullptr;
  // So many queries with windows would be for kernels that are slow with the few of a cache.
  if (cache) choice.window_left = choice.window_right = -1;
  return choice;
}

}  // namespace dlattn::core
