#include "core/validate/cache.h"

#include <algorithm>

#include "core/plan/plan.h"
#include "core/problem/positions.h"
#include "core/problem/tensor_sizes.h"
#include "core/validate/checks.h"
#include "core/validate/fail.h"

namespace dlattn::core {
namespace {

void check_together(const AttentionParams& p) {
  const char* const given = p.page_table.data   ? "page_table"
                            : p.cache_batch_idx ? "cache_batch_idx"
                            : p.leftpad_k       ? "leftpad_k"
                                                : nullptr;
  if (given && p.cu_seqlens_k) {
    fail(given, " is given with cu_seqlens_k; accepted: one of them, as keys in a cache have no ",
         "cu_seqlens_k");
  }
  if (p.page_table.data && p.cache_batch_idx) {
    fail("cache_batch_idx is given with page_table; accepted: one of them, as a page table tells ",
         "where a sequence's keys are");
  }
}

// Refuses dtypes and precisions that no kernel computes with keys in a cache.
void check_cache_dtypes(const AttentionParams& p) {
  const char* const feature = cache_feature(p);
  if (p.precision != Precision::kInputs) {
    fail("precision is ", to_string(p.precision), " with keys in a cache (", feature,
         "); accepted: inputs");
  }
  if (p.q.dtype == DType::kFloat8E4M3) {
    fail("q: dtype is ", to_string(p.q.dtype), " with keys in a cache (", feature,
         "); accepted: float16, bfloat16, float32, float64");
  }
}

// The keys of sequence b that one of its queries may see by position: in pages of no other keys may
// anything stand, as kernels do not read them.
Range<std::int64_t> seen_keys(const AttentionParams& p, std::int64_t b, std::int64_t length,
                              std::int64_t leftpad) {
  const std::int64_t queries =
      p.cu_seqlens_q ? std::int64_t{p.cu_seqlens_q[b + 1]} - p.cu_seqlens_q[b] : p.seqlen_q;
  if (queries <= 0) return {0, 0};
  const std::int64_t shift = position_shift(p.causal, queries, length);
  const PositionMask<std::int64_t> mask(window_of<std::int64_t>(p), shift, length);
  const Range<std::int64_t> keys = mask.any_row(0, queries - 1);
  return {std::max(keys.begin, leftpad), keys.end};
}

}  // namespace

void check_cache(const AttentionParams& p) {
  check_together(p);
  if (!is_cache(p)) return;
  check_cache_dtypes(p);
  const std::int64_t least = p.batch_size > 0 && p.seqlen_k > 0 ? 1 : 0;
  if (p.cache_batch_idx) check_length("cache_batch_size", p.cache_batch_size, least);
  if (!p.page_table.data) return;
  check_length("page_size", p.page_size, 1);
  check_length("num_pages", p.num_pages, least);
}

void check_cached_keys(const AttentionParams& p) {
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    const std::int64_t length = p.seqused_k ? p.seqused_k[b] : p.seqlen_k;
    if (length < 0 || length > p.seqlen_k) {
      fail("seqused_k[", b, "] is ", length, "; accepted: 0 to ", p.seqlen_k,
           ", the most keys that a sequence can have");
    }
    const std::int64_t leftpad = p.leftpad_k ? p.leftpad_k[b] : 0;
    if (leftpad < 0 || leftpad > length) {
      fail("leftpad_k[", b, "] is ", leftpad, "; accepted: 0 to ", length,
           ", the keys of the sequence");
    }
    if (p.cache_batch_idx &&
        (p.cache_batch_idx[b] < 0 || p.cache_batch_idx[b] >= p.cache_batch_size)) {
      fail("cache_batch_idx[", b, "] is ", p.cache_batch_idx[b], "; accepted: 0 to ",
           p.cache_batch_size - 1, ", the entries of the cache");
    }
    if (!p.page_table.data) continue;
    const Range<std::int64_t> seen = seen_keys(p, b, length, leftpad);
    if (seen.end <= seen.begin) continue;
    const std::int32_t* const pages = p.page_table.data + b * p.page_table.batch_stride;
    for (std::int64_t i = seen.begin / p.page_size; i <= (seen.end - 1) / p.page_size; ++i) {
      if (pages[i] >= 0 && pages[i] < p.num_pages) continue;
      fail("page_table[", b, "][", i, "] is ", pages[i], "; accepted: 0 to ", p.num_pages - 1,
           ", as the sequence has ", length, " keys in pages of ", p.page_size);
    }
  }
}

}  // namespace dlattn::core
