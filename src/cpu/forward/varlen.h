#pragma once

#include <vector>

#include "dlattn/forward.h"

namespace dlattn::cpu {

// Throws UnsupportedError unless cu_seqlens_q, cu_seqlens_k and seqused_k, if given, describe
// sequences that lie within q and k and are no longer than seqlen_q and seqlen_k. cu_seqlens may
// begin after 0 and end before the last token, as those of a slice of a larger batch do.
void validate_varlen(const AttentionParams& params);

// A problem whose lengths nobody else can write to: they decide which memory is touched, so what
// was checked must be what is used.
class OwnLengths {
 public:
  explicit OwnLengths(const AttentionParams& params);  // checks them
  OwnLengths(const OwnLengths&) = delete;
  const AttentionParams& params() const { return params_; }

 private:
  AttentionParams params_;
  std::vector<std::int32_t> cu_seqlens_q_, cu_seqlens_k_, seqused_k_;
};

}  // namespace dlattn::cpu
