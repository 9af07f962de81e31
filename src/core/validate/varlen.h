#pragma once

#include "dlattn/forward.h"
#include "dlattn/quantize.h"

namespace dlattn::core {

// Throws UnsupportedError unless the fields of a problem of variable length go together. Reads
// nothing that they point to.
void check_varlen(const AttentionParams& params);

// Throws UnsupportedError unless cu_seqlens_q, cu_seqlens_k and seqused_k, if given and in memory
// of the host, describe sequences that lie within q and k and are no longer than seqlen_q and
// seqlen_k, and unless keys in a cache lie within it (cache.h). cu_seqlens may begin after 0 and
// end before the last token, as those of a slice of a larger tensor do. Lengths on a device cannot
// be refused: kernels clamp them (cuda/tile/seqlen.cuh).
void check_lengths(const AttentionParams& params);
void check_lengths(const QuantizeParams& params);

}  // namespace dlattn::core
