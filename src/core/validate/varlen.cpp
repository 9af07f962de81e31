#include "core/validate/varlen.h"

#include <limits>

#include "core/validate/cache.h"
#include "core/validate/fail.h"

namespace dlattn::core {
namespace {

// cu_seqlens count no further, and kernels hold them to it.
void check_total(const char* name, std::int64_t rows) {
  constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
  if (rows < 0) fail(name, " is ", rows, "; accepted: at least 0");
  if (rows > kMost) fail(name, " is ", rows, "; accepted: up to ", kMost);
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

void check_varlen(const AttentionParams& p) {
  if (p.cu_seqlens_k && !p.cu_seqlens_q) fail("cu_seqlens_q is null; variable length needs both");
  if (p.cu_seqlens_q && !p.cu_seqlens_k && !is_cache(p)) {
    fail("cu_seqlens_k is null; variable length needs both, or seqused_k for keys in a cache");
  }
  if (!p.cu_seqlens_q) return;
  check_total("total_q", p.total_q);
  check_total("total_k", p.total_k);
  if (p.batch_size == 0 && p.total_q > 0) {
    fail("batch_size is 0, by a cu_seqlens_q of one offset, but q has ", p.total_q,
         " tokens; accepted: at least 1 sequence, or a q without tokens");
  }
}

namespace {

// AttentionParams or QuantizeParams.
template <typename Params>
void check_key_lengths(const Params& p) {
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

}  // namespace

void check_lengths(const AttentionParams& p) {
  if (p.device.type != DeviceType::kCpu) return;
  if (p.cu_seqlens_q) {
    check_offsets("cu_seqlens_q", p.cu_seqlens_q, p.batch_size, p.total_q, "max_seqlen_q",
                  p.seqlen_q);
  }
  if (p.cu_seqlens_k) check_key_lengths(p);
  if (is_cache(p)) check_cached_keys(p);
}

void check_lengths(const QuantizeParams& p) {
  if (p.seqused_k && !p.cu_seqlens_k) fail("seqused_k needs cu_seqlens_k");
  if (!p.cu_seqlens_k) return;
  check_total("total_k", p.total_k);
  if (p.device.type == DeviceType::kCpu) check_key_lengths(p);
}

}  // namespace dlattn::core
