#include "cache_cases.h"

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

namespace simt {
namespace {

template <typename T>
float as_float(T x) {
  return static_cast<float>(x);
}

// Elements of a cache. Of 8 bits they count a power of two, so that T has what they stand for.
template <typename KV>
KV element(float x, float scale) {
  if constexpr (std::is_same_v<KV, std::int8_t>) {
    return static_cast<KV>(std::nearbyint(std::fmax(std::fmin(x / scale, 127.0f), -128.0f)));
  } else {
    return KV(x / scale);
  }
}

}  // namespace

template <typename T, typename KV>
Pool<T, KV>::Pool(const Case& c, const Cache& cache, Tensors<T>& t)
    : used(cache.used.begin(), cache.used.end()),
      entries(cache.entries.begin(), cache.entries.end()),
      leftpad(cache.leftpad.begin(), cache.leftpad.end()) {
  const int rows = cache.page_size ? cache.page_size : c.seqlen_k;
  int count = c.batch_size + (entries.empty() ? 0 : 1);
  if (cache.page_size) {
    max_pages = (c.seqlen_k + rows - 1) / rows;
    count = cache.stray ? 0 : 1;
    // Backwards, so that neighbours are none. Behind a sequence's last page stands anything.
    pages.assign(c.batch_size * max_pages, -1);
    for (int b = 0; b < c.batch_size; ++b) {
      const int in_use = (within(used[b], c.seqlen_k) + rows - 1) / rows;
      for (int i = 0; i < in_use; ++i) pages[b * max_pages + i] = count++;
      for (int i = in_use; i < max_pages; ++i) pages[b * max_pages + i] = i % 2 ? -1 : 0x7fffffff;
    }
    for (std::int32_t& page : pages) {
      if (page > 0 && page < count) page = count - page;
    }
    told_pages = pages;
    for (std::int32_t& page : told_pages) {
      if (cache.stray && page == 0) page = std::numeric_limits<std::int32_t>::min();
      if (cache.stray && page == count - 1) page = count;
    }
    // Pages that no query sees by position need not be there, though a tile of keys begins with
    // them.
    for (int b = 0; b < c.batch_size; ++b) {
      const int length = within(used[b], c.seqlen_k), queries = c.rows_q(b);
      const auto window = dlattn::window_of<int>(c.causal, c.window_left, c.window_right);
      const int shift = dlattn::position_shift(c.causal, queries, length);
      const dlattn::PositionMask<int> mask(window, shift, length);
      for (int i = 0; queries > 0 && i < mask.any_row(0, queries - 1).begin / rows; ++i)
        told_pages[b * max_pages + i] = i % 2 ? -1 : 0x7fffffff;
    }
  }
  allocate(&k, c.layout, count, rows, c.num_heads_kv, c.head_dim);
  allocate(&v, c.layout, count, rows, c.num_heads_kv, c.dim_v());
  for (int b = 0; b < c.batch_size; ++b) {
    const int length = within(used[b], c.seqlen_k);
    for (int j = leftpad.empty() ? 0 : within(leftpad[b], length); j < length; ++j) {
      const int entry = cache.page_size   ? pages[b * max_pages + j / rows]
                        : entries.empty() ? b
                                          : within(entries[b], c.batch_size);
      for (int h = 0; h < c.num_heads_kv; ++h) {
        const auto set = [&](KV* to, T* from, float scale) {
          *to = element<KV>(as_float(*from), scale);
          if constexpr (sizeof(KV) == 1) *from = T(as_float(*to) * scale);
        };
        const float of_k = scale_of(b, h, 5), of_v = scale_of(b, h, 4);
        for (int d = 0; d < c.head_dim; ++d)
          set(&k.at(entry, j % rows, h, d), &t.k.at(c.batch_index(b), c.start_k(b) + j, h, d),
              of_k);
        for (int d = 0; d < c.dim_v() && cache.latent; ++d) {
          T& value = t.v.at(c.batch_index(b), c.start_k(b) + j, h, d);
          if constexpr (sizeof(KV) == 1) {
            value = T(as_float(k.at(entry, j % rows, h, d)) * of_v);
          } else {
            value = t.k.at(c.batch_index(b), c.start_k(b) + j, h, d);
          }
        }
        for (int d = 0; d < c.dim_v() && !cache.latent; ++d)
          set(&v.at(entry, j % rows, h, d), &t.v.at(c.batch_index(b), c.start_k(b) + j, h, d),
              of_v);
      }
    }
  }
  for (int b = 0; b < c.batch_size; ++b) {
    for (int h = 0; h < c.num_heads_kv; ++h) {
      k_descale.push_back(scale_of(b, h, 5));
      v_descale.push_back(scale_of(b, h, 4));
    }
  }
}

template <typename T, typename KV>
void Pool<T, KV>::describe(const Cache& cache, dlattn::AttentionParams* p) const {
  const auto set = [](dlattn::TensorView* view, const Tensor<KV>& tensor) {
    view->data = tensor.data();
    view->dtype = DTypeOf<KV>::value;
    view->batch_stride = tensor.stride(0), view->row_stride = tensor.stride(1);
    view->head_stride = tensor.stride(2);
  };
  set(&p->k, k), set(&p->v, cache.latent ? k : v);
  if (sizeof(KV) == 1) {
    p->k_descale.data = k_descale.data(), p->v_descale.data = v_descale.data();
    p->k_descale.batch_stride = p->v_descale.batch_stride = p->num_heads_kv;
    p->k_descale.head_stride = p->v_descale.head_stride = 1;
  }
  p->cu_seqlens_k = nullptr, p->total_k = 0;
  if (cache.lengths) p->seqused_k = used.data();
  if (!entries.empty()) p->cache_batch_idx = entries.data(), p->cache_batch_size = k.size(0);
  if (!leftpad.empty()) p->leftpad_k = leftpad.data();
  if (!cache.page_size) return;
  p->page_table.data = told_pages.data(), p->page_table.batch_stride = max_pages;
  p->page_size = cache.page_size, p->num_pages = k.size(0);
}

template <typename T>
reference::Problem cached_problem(const Case& c, const Cache& cache, const Tensors<T>& t, int batch,
                                  int head) {
  Case own = c;
  if (cache.any()) own.seqlen_k = within(cache.used[batch], c.seqlen_k);
  reference::Problem problem = make_problem(own, t, batch, head);
  if (cache.leftpad.empty()) return problem;
  if (problem.mask.empty()) problem.mask.assign(problem.seqlen_q * problem.seqlen_k, true);
  for (int i = 0; i < problem.seqlen_q; ++i) {
    for (int j = 0; j < within(cache.leftpad[batch], problem.seqlen_k); ++j)
      problem.mask[i * problem.seqlen_k + j] = false;
  }
  return problem;
}

SIMT_HOST_CACHES()

Case varlen_queries(Case c, const std::vector<int>& queries) {
  return varlen(c, queries, std::vector<int>(queries.size(), c.seqlen_k));
}

std::vector<CachedCase> many_query_cases(bool any_rows) {
  const auto window = [](int left, int right) {
    return [=](Case& c) { c.window_left = left, c.window_right = right; };
  };
  std::vector<CachedCase> cases = {
      {{130, 200, 64, kCausal, 2, 1, Layout::kBshd, 0, 3}, {{17, 0, 200}, 16}},
      {{40, 300, 128, kCausal, 4, 2, Layout::kBhsd, 0, 2}, {{300, 129}, 64}},
      {{70, 270, 128, kFull, 2, 1, Layout::kBshd, 0, 2}, {{270, 100}, 256}},
      {{5, 90, 64, kFull, 2, 1, Layout::kBshd, 0, 2}, {{90, 33}, 16, {}, {}, true, true}},
      {{33, 150, 64, kCausal, 2, 1, Layout::kBshd, 0, 3}, {{150, 60, INT32_MAX}, 0, {-5, 7, 1}}},
      {{20, 130, 128, kTopLeft, 2, 1, Layout::kPacked, 104, 2}, {{130, -3}, 24}},
      // Pages that are not there within the first tile of keys.
      {with({150, 330, 64, kCausal, 2, 2, Layout::kBshd, 40, 2}, window(20, -1)), {{330, 177}, 8}},
      {with({40, 400, 128, kTopLeft, 1, 1, Layout::kBshd, 0, 2}, window(9, 5)), {{400, 90}, 16}},
      {with(varlen_queries({1, 200, 64, kCausal, 2, 1}, {3, 0, 140, 33}),
            [](Case& c) { c.sinks = true; }),
       {{200, 90, 170, 2}, 32}},
      {with(varlen_queries({1, 260, 128, kCausal, 2, 1}, {60, 1}), window(70, -1)),
       {{260, 30}, 0, {1, 0}}},
      // More than eight heads, of several row blocks each.
      {{260, 70, 64, kCausal, 9, 3}, {{70}, 16}},
      // Row maxima that outgrow those before them.
      {with({20, 600, 128, kFull}, [](Case& c) { c.rise = 1.0; }), {{600}, 16}},
  };
  if (any_rows) {
    const std::vector<CachedCase> more = {
        {{40, 150, 64, kCausal, 2, 1, Layout::kBshd, 0, 2}, {{150, 61}, 7}},
        {with({20, 150, 128, kCausal, 1, 1, Layout::kBshd, 0, 2}, window(30, -1)), {{150, 99}, 1}},
        {{40, 100, 64, kCausal, 2, 1, Layout::kBshd, 0, 3}, {{100, 60, 9}, 16, {}, {33, 0, 20}}},
        {{9, 70, 128, kFull, 2, 1, Layout::kBshd, 0, 2}, {{70, 70}, 0, {}, {65, INT32_MIN}, false}},
    };
    cases.insert(cases.end(), more.begin(), more.end());
  }
  return cases;
}

}  // namespace simt
