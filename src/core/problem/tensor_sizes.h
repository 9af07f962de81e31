#pragma once

#include <cstdint>

#include "dlattn/forward.h"

namespace dlattn::core {

// How many batch entries, rows and heads a tensor of a problem has. With variable length the
// sequences lie one behind the other, as the rows of one batch entry.
struct TensorSizes {
  std::int64_t batch;
  std::int64_t rows;
  std::int64_t heads;
};

// The sizes of q and out.
inline TensorSizes query_sizes(const AttentionParams& p) {
  if (p.cu_seqlens_q) return {1, p.total_q, p.num_heads};
  return {p.batch_size, p.seqlen_q, p.num_heads};
}

// The sizes of k and v. Those of a cache have its entries or its pages for the batch.
inline TensorSizes key_sizes(const AttentionParams& p) {
  if (p.cu_seqlens_k) return {1, p.total_k, p.num_heads_kv};
  if (p.page_table.data) return {p.num_pages, p.page_size, p.num_heads_kv};
  return {p.cache_batch_idx ? p.cache_batch_size : p.batch_size, p.seqlen_k, p.num_heads_kv};
}

// The pages of so many keys.
inline std::int64_t pages_of(const AttentionParams& p, std::int64_t keys) {
  return (keys + p.page_size - 1) / p.page_size;
}

}  // namespace dlattn::core
