#pragma once

#include "dlattn/forward.h"

namespace dlattn::core {

// Throws UnsupportedError unless the fields that tell of a cache of keys (is_cache()) go together,
// and with the others. Reads nothing that they point to.
void check_cache(const AttentionParams& params);

// Throws UnsupportedError unless seqused_k, leftpad_k, cache_batch_idx and page_table, which are in
// memory of the host, name keys that the cache has. Only entries of pages with a key that a query
// may see by position are read: the others may be anything, as those before a window. cu_seqlens_q
// have been checked.
void check_cached_keys(const AttentionParams& params);

}  // namespace dlattn::core
