#include "cache.h"

#include "errors.h"

namespace dlattn::python {
namespace {

// Settles what was asked of max_seqlen_k (kWholeCache: nothing) when it is known how many keys
// there is room for.
constexpr std::int64_t kWholeCache = -1;
template <typename... Parts>
void settle_max_seqlen_k(std::int64_t most, Problem* problem, const Parts&... room) {
  std::int64_t& seqlen_k = problem->params.seqlen_k;
  if (seqlen_k == kWholeCache) seqlen_k = most;
  if (seqlen_k > most)
    unsupported("max_seqlen_k is ", seqlen_k, "; accepted: up to ", most, ", ", room...);
}

}  // namespace

std::int64_t room_of_pages(std::int64_t pages, std::int64_t page_size) {
  std::int64_t keys;
  if (__builtin_mul_overflow(pages, page_size, &keys) || keys > kMaxLength) {
    unsupported("page_table: a sequence has ", pages, " pages of ", page_size,
                " keys; accepted: room for up to ", kMaxLength, " keys");
  }
  return keys;
}

Keys keys_of(const AttentionCall& call) {
  if (call.is_paged()) return Keys::kPages;
  if (call.function != Function::kKvcache) return Keys::kAsQueries;
  return call.cache_batch_idx.is_none() ? Keys::kEntries : Keys::kChosenEntries;
}

void check_lengths_given(const AttentionCall& call) {
  if (call.varlen() && call.cu_seqlens_k.is_none() != call.is_paged()) {
    if (call.is_paged()) {
      unsupported(
          "cu_seqlens_k is given with page_table; accepted: None, as seqused_k tells how "
          "many keys a sequence has");
    }
    unsupported("cu_seqlens_k is None; accepted: an int32 tensor, or None with page_table");
  }
  if (call.function == Function::kAttention || !call.seqused_k.is_none()) return;
  if (call.function == Function::kKvcache || call.is_paged()) {
    unsupported("seqused_k is None; accepted: an int32 tensor of shape (batch,), the keys that ",
                "each sequence has");
  }
}

QkvDims cache_dims(Keys keys, Layout layout) {
  const bool bshd = layout == Layout::kBshd;
  const char* const names = keys != Keys::kPages ? dims_text(layout)
                            : bshd               ? "(num_pages, page_size, num_heads, head_dim)"
                                                 : "(num_pages, num_heads, page_size, head_dim)";
  return {names, dims_of(layout), 3};
}

void size_cache(const Tensor& q, const Tensor& k, const Tensor& v, Keys keys, Problem* problem) {
  AttentionParams& p = problem->params;
  const Dims at = dims_of(problem->layout);
  const std::int64_t entries = k.shape[at.batch], rows = k.shape[at.row];
  check_size(v, at.batch, keys == Keys::kPages ? "num_pages" : "batch", entries, "that of k");
  if (keys == Keys::kPages) {
    p.num_pages = entries;
    p.page_size = rows;
    return;
  }
  if (keys == Keys::kChosenEntries) p.cache_batch_size = entries;
  if (keys == Keys::kEntries) check_size(k, at.batch, "batch", q.shape[at.batch], "that of q");
  settle_max_seqlen_k(rows, problem, "the seqlen of k");
}

void read_page_table(const Tensor& page_table, Problem* problem) {
  AttentionParams& p = problem->params;
  check_dtype(page_table, kInt32);
  check_rank(page_table, 2, "(batch, max_pages)");
  check_size(page_table, 0, "batch", p.batch_size, "the number of sequences");
  check_last_stride(page_table);
  static constexpr std::int32_t kNone[1] = {-1};  // of no sequence or no page
  p.page_table.data =
      page_table.num_elements() > 0 ? static_cast<const std::int32_t*>(page_table.data) : kNone;
  p.page_table.batch_stride = page_table.strides[0];
  const std::int64_t pages = page_table.shape[1];
  settle_max_seqlen_k(room_of_pages(pages, p.page_size), problem, "the keys of page_table's ",
                      pages, " pages of ", p.page_size);
}

void read_max_seqlen_of_cache(nb::handle value, const char* name, Problem* problem) {
  problem->params.seqlen_k = value.is_none() ? kWholeCache : parse_count(value, name);
}

}  // namespace dlattn::python
