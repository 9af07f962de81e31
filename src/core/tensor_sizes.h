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

// Of q and out.
inline TensorSizes query_sizes(const AttentionParams& p) {
  if (p.cu_seqlens_q) return {1, p.total_q, p.num_heads};
  return {p.batch_size, p.seqlen_q, p.num_heads};
}

// Of k and v.
inline TensorSizes key_sizes(const AttentionParams& p) {
  if (p.cu_seqlens_q) return {1, p.total_k, p.num_heads_kv};
  return {p.batch_size, p.seqlen_k, p.num_heads_kv};
}

}  // namespace dlattn::core
