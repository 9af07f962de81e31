#pragma once

#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "attention_test.h"
#include "core/problem/positions.h"

// Problems whose keys lie in a cache.
namespace simt {

// Where the keys of a case lie, if in a cache.
struct Cache {
  std::vector<int> used = {};     // keys of each sequence; beyond lie NaNs
  int page_size = 0;              // 0: no pages
  std::vector<int> entries = {};  // cache_batch_idx, of one entry more than there are sequences
  std::vector<int> leftpad = {};
  bool lengths = true;  // whether kernels are told `used`, which else is all that there is room for
  bool stray = false;  // whether the table has pages that there are not, for the first and the last
  bool latent = false;  // whether V is the first columns of K, as the same memory

  bool any() const { return !used.empty(); }
  std::string name() const {
    if (!any()) return {};
    std::string text = " cache";
    if (page_size) text += (stray ? " stray pages of " : " pages of ") + std::to_string(page_size);
    if (!entries.empty()) text += " entries";
    if (!leftpad.empty()) text += " leftpad";
    if (latent) text += " latent";
    return text;
  }
};

inline int within(int x, int most) {
  return std::max(0, std::min(x, most));
}

// A copy of a case's keys in a cache, with NaNs everywhere else, before leftpad_k too. Where its
// elements are of 8 bits, the case's keys become what they stand for.
template <typename T, typename KV>
struct Pool {
  Tensor<KV> k, v;
  std::vector<std::int32_t> pages, told_pages, used, entries, leftpad;
  std::vector<float> k_descale, v_descale;
  int max_pages = 0;

  Pool(const Case& c, const Cache& cache, Tensors<T>& t);

  static float scale_of(int b, int h, int least) {
    return sizeof(KV) == 1 ? std::ldexp(1.0f, -least - (b + 2 * h) % 3) : 1.0f;
  }

  void describe(const Cache& cache, dlattn::AttentionParams* p) const;
};

// A case whose keys are divided among thread blocks.
struct DividedCase {
  Case sizes;
  Cache cache = {};
  // Thread blocks; 0: a row block has one, whatever there is.
  std::vector<int> blocks = {0, 3};
  // How the keys are split, with thread blocks.
  int num_splits = 0;
  int split_size = 0;
};

struct FreeMemory {
  void operator()(unsigned char* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<unsigned char, FreeMemory>;

// A workspace as the caller's would lie.
inline Memory workspace_memory(std::int64_t bytes) {
  return Memory(static_cast<unsigned char*>(std::aligned_alloc(256, (bytes + 255) / 256 * 256)));
}

struct CachedCase {
  Case sizes;
  Cache cache;
};

// A case whose queries are of variable length: the sequences have so many.
Case varlen_queries(Case c, const std::vector<int>& queries);

// Many queries of each sequence: lengths at the edges of pages and tiles and beyond what there is,
// pages and entries that there are not, windows that hide whole pages. kAnyRows: padding and pages
// of any size too.
std::vector<CachedCase> many_query_cases(bool any_rows);

// One head of one sequence of a case, with the keys that its cache has.
template <typename T>
reference::Problem cached_problem(const Case& c, const Cache& cache, const Tensors<T>& t, int batch,
                                  int head);

// In cache_cases.cpp, as compare.h says.
#define SIMT_HOST_CACHE(declared, T)                                             \
  declared template struct Pool<T, T>;                                           \
  declared template struct Pool<T, std::int8_t>;                                 \
  declared template struct Pool<T, __nv_fp8_e4m3>;                               \
  declared template reference::Problem cached_problem(const Case&, const Cache&, \
                                                      const Tensors<T>&, int, int);
#define SIMT_HOST_CACHES(declared)         \
  SIMT_HOST_CACHE(declared, __half)        \
  SIMT_HOST_CACHE(declared, __nv_bfloat16) \
  SIMT_HOST_CACHE(declared, float)
SIMT_HOST_CACHES(extern)

}  // namespace simt
