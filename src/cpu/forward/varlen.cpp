#include "cpu/forward/varlen.h"

#include <sstream>

namespace dlattn::cpu {
namespace {

template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  throw UnsupportedError(message.str());
}

void check_offsets(const char* name, const std::int32_t* offsets, std::int64_t batch_size,
                   std::int64_t total, const char* max_name, std::int64_t max_seqlen) {
  if (offsets[0] < 0) fail(name, "[0] is ", offsets[0], "; accepted: 0 or more");
  for (std::int64_t b = 0; b < batch_size; ++b) {
    const std::int64_t length = static_cast<std::int64_t>(offsets[b + 1]) - offsets[b];
    if (length < 0) {
      fail(name, "[", b + 1, "] is ", offsets[b + 1], ", less than ", name, "[", b,
           "] = ", offsets[b], "; accepted: offsets that do not decrease");
    }
    if (length > max_seqlen) {
      fail(name, ": sequence ", b, " has ", length, " tokens; accepted: up to ", max_name, " = ",
           max_seqlen);
    }
  }
  if (offsets[batch_size] > total) {
    fail(name, "[", batch_size, "] is ", offsets[batch_size], "; accepted: up to the ", total,
         " tokens of the tensor");
  }
}

}  // namespace

void validate_varlen(const AttentionParams& p) {
  if (!p.cu_seqlens_q) return;
  check_offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch_size, p.total_q, "max_seqlen_q",
                p.seqlen_q);
  check_offsets("cu_seqlens_k", p.cu_seqlens_k, p.batch_size, p.total_k, "max_seqlen_k",
                p.seqlen_k);
  if (!p.seqused_k) return;
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    const std::int64_t length =
        static_cast<std::int64_t>(p.cu_seqlens_k[b + 1]) - p.cu_seqlens_k[b];
    if (p.seqused_k[b] < 0 || p.seqused_k[b] > length) {
      fail("seqused_k[", b, "] is ", p.seqused_k[b], "; accepted: 0 to ", length,
           ", the length of the sequence");
    }
  }
}

OwnLengths::OwnLengths(const AttentionParams& params) : params_(params) {
  if (!params.cu_seqlens_q) return;
  const auto own = [&](const std::int32_t*& values, std::int64_t count,
                       std::vector<std::int32_t>* copy) {
    if (!values) return;
    copy->assign(values, values + count);
    values = copy->data();
  };
  own(params_.cu_seqlens_q, params.batch_size + 1, &cu_seqlens_q_);
  own(params_.cu_seqlens_k, params.batch_size + 1, &cu_seqlens_k_);
  own(params_.seqused_k, params.batch_size, &seqused_k_);
  validate_varlen(params_);
}

}  // namespace dlattn::cpu
