#pragma once

#include <algorithm>
#include <type_traits>
#include <vector>

#include "core/problem/tensor_sizes.h"
#include "core/validate/varlen.h"
#include "dlattn/forward.h"

namespace dlattn::cpu {

// A problem whose lengths nobody else can write to: they decide which memory is touched, so what
// was checked must be what is used. `Params`: AttentionParams or QuantizeParams.
template <typename Params>
class Owned {
 public:
  explicit Owned(const Params& params) : params_(params) {
    constexpr bool kAttention = std::is_same_v<Params, AttentionParams>;
    if constexpr (kAttention) {
      if (!params.cu_seqlens_k && !is_cache(params)) return;
    } else {
      if (!params.cu_seqlens_k) return;
    }
    own(params_.cu_seqlens_k, params.batch_size + 1, &cu_seqlens_k_);
    own(params_.seqused_k, params.batch_size, &seqused_k_);
    if constexpr (kAttention) {
      own(params_.cu_seqlens_q, params.batch_size + 1, &cu_seqlens_q_);
      own(params_.cache_batch_idx, params.batch_size, &cache_batch_idx_);
      own(params_.leftpad_k, params.batch_size, &leftpad_k_);
      own_pages();
    }
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

  // The columns of the page table that a sequence uses, by the lengths that are copied.
  void own_pages() {
    auto& table = params_.page_table;
    if (!table.data) return;
    std::int64_t longest = params_.seqused_k ? 0 : params_.seqlen_k;
    for (const std::int32_t length : seqused_k_)
      longest = std::max(longest, std::min<std::int64_t>(length, params_.seqlen_k));
    const std::int64_t pages = core::pages_of(params_, longest);
    page_table_.reserve(static_cast<std::size_t>(params_.batch_size * pages));
    for (std::int64_t b = 0; b < params_.batch_size; ++b) {
      const std::int32_t* const row = table.data + b * table.batch_stride;
      page_table_.insert(page_table_.end(), row, row + pages);
    }
    table.data = page_table_.data();
    table.batch_stride = pages;
  }

  Params params_;
  std::vector<std::int32_t> cu_seqlens_q_, cu_seqlens_k_, seqused_k_, cache_batch_idx_, leftpad_k_;
  std::vector<std::int32_t> page_table_;
};
using OwnLengths = Owned<AttentionParams>;
using OwnKeyLengths = Owned<QuantizeParams>;

}  // namespace dlattn::cpu
