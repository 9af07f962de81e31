#pragma once

#include <type_traits>
#include <vector>

#include "core/varlen.h"
#include "dlattn/forward.h"

namespace dlattn::cpu {

// A problem whose lengths nobody else can write to: they decide which memory is touched, so what
// was checked must be what is used. `Params`: AttentionParams or QuantizeParams.
template <typename Params>
class Owned {
 public:
  explicit Owned(const Params& params) : params_(params) {
    if (!params.cu_seqlens_k) return;
    if constexpr (std::is_same_v<Params, AttentionParams>)
      own(params_.cu_seqlens_q, params.batch_size + 1, &cu_seqlens_q_);
    own(params_.cu_seqlens_k, params.batch_size + 1, &cu_seqlens_k_);
    own(params_.seqused_k, params.batch_size, &seqused_k_);
    core::check_lengths(params_);
  }
  Owned(const Owned&) = delete;
  const Params& params() const { return params_; }

 private:
  static void own(const std::int32_t*& values, std::int64_t count,
                  std::vector<std::int32_t>* copy) {
    if (!values) return;
    copy->assign(values, values + count);
    values = copy->data();
  }

  Params params_;
  std::vector<std::int32_t> cu_seqlens_q_, cu_seqlens_k_, seqused_k_;
};
using OwnLengths = Owned<AttentionParams>;
using OwnKeyLengths = Owned<QuantizeParams>;

}  // namespace dlattn::cpu
