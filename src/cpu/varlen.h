#pragma once

#include "dlattn/params.h"

namespace dlattn::cpu {

// Throws UnsupportedError unless cu_seqlens_q, cu_seqlens_k and seqused_k, if given, describe
// sequences that lie within q and k and are no longer than seqlen_q and seqlen_k.
void validate_varlen(const AttentionParams& params);

}  // namespace dlattn::cpu
