#pragma once

#include "problem.h"

// Keys in a cache: what attention_with_kvcache and page_table bring.
namespace dlattn::python {

// How k and v lie: as q does, or in a cache, whose first dimension counts entries or pages.
enum class Keys { kAsQueries, kEntries, kChosenEntries, kPages };

Keys keys_of(const AttentionCall& call);

// How q, k or v of a problem lie.
struct QkvDims {
  const char* names;
  Dims at;   // the batch is none with variable length
  int last;  // head_dim's
};
QkvDims cache_dims(Keys keys, Layout layout);

// Refuses lists of lengths that a call must not have, and asks for those that it lacks.
void check_lengths_given(const AttentionCall& call);

// Sizes of a cache. seqlen_k of one in pages is settled when page_table comes.
void size_cache(const Tensor& q, const Tensor& k, const Tensor& v, Keys keys, Problem* problem);

// The keys of a sequence of so many pages; throws if they are more than one may have.
std::int64_t room_of_pages(std::int64_t pages, std::int64_t page_size);

void read_page_table(const Tensor& page_table, Problem* problem);
void read_max_seqlen_of_cache(nb::handle value, const char* name, Problem* problem);

}  // namespace dlattn::python
