// Keys in a cache on the CPU: the bits of the same keys in a varlen batch, wherever they lie and
// whatever lies about them.
#include <algorithm>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "check.h"
#include "core/backend.h"
#include "problem.h"

using namespace dlattn;
using test::Buffer;
using test::Problem;
using test::Spec;

namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

enum class Where { kBatch, kChosen, kPages };

struct Cache {
  Where where;
  std::int64_t page_size = 0;
  bool leftpad = false;
  bool heads_first = false;    // [heads][rows] within an entry or a page
  bool fixed_queries = false;  // q without cu_seqlens_q
};

// The problem with its keys moved to a cache, which is NaN elsewhere.
class Cached {
 public:
  Cached(const Problem& problem, const Cache& cache) : params(problem.params) {
    AttentionParams& p = params;
    const std::int64_t batch = p.batch_size;
    std::mt19937 random(99);
    for (std::int64_t b = 0; b < batch; ++b) {
      leftpads.push_back(cache.leftpad ? static_cast<std::int32_t>(random() % 7) : 0);
      used.push_back(static_cast<std::int32_t>(problem.keys(b)) + leftpads.back());
      entries.push_back(static_cast<std::int32_t>(batch - b));  // of batch + 1
      queries_of.push_back(problem.cu_seqlens_q[b + 1] - problem.cu_seqlens_q[b]);
      p.seqlen_k = std::max<std::int64_t>(p.seqlen_k, used.back());
    }
    p.cu_seqlens_k = nullptr, p.total_k = 0;
    p.seqused_k = used.data();
    if (cache.leftpad) p.leftpad_k = leftpads.data();
    if (cache.fixed_queries) fix_queries();
    const bool paged = cache.where == Where::kPages;
    const std::int64_t rows = paged ? cache.page_size : p.seqlen_k;
    std::int64_t count = batch + 1;
    if (paged) {
      count = lay_out_pages(cache.page_size, random);
    } else if (cache.where == Where::kChosen) {
      p.cache_batch_idx = entries.data(), p.cache_batch_size = count;
    }
    move(problem, problem.k, problem.params.k, p.head_dim, rows, count, cache.heads_first, &k,
         &p.k);
    move(problem, problem.v, problem.params.v, p.head_dim_v, rows, count, cache.heads_first, &v,
         &p.v);
  }

  AttentionParams params;
  std::vector<std::int32_t> used, leftpads, entries, table, told, queries_of;
  Buffer k, v;

 private:
  void fix_queries() {
    params.q.batch_stride = params.seqlen_q * params.q.row_stride;
    params.out.batch_stride = params.seqlen_q * params.out.row_stride;
    params.lse.batch_stride = params.seqlen_q;  // of (num_heads, total_q)
    params.cu_seqlens_q = nullptr, params.total_q = 0;
  }

  // Pages of each sequence in any order, with -1 behind its last one.
  std::int64_t lay_out_pages(std::int64_t page_size, std::mt19937& random) {
    AttentionParams& p = params;
    const std::int64_t columns = (p.seqlen_k + page_size - 1) / page_size;
    p.page_table.batch_stride = columns + 2;
    p.page_size = page_size;
    table.assign(p.batch_size * p.page_table.batch_stride, -1);
    std::int32_t pages = 1;  // page 0 is nobody's
    for (std::int64_t b = 0; b < p.batch_size; ++b) {
      const std::int64_t own = (used[b] + page_size - 1) / page_size;
      for (std::int64_t i = 0; i < own; ++i) table[b * p.page_table.batch_stride + i] = pages++;
    }
    const std::vector<bool> seen = seen_pages(page_size);
    std::vector<std::int32_t> order(pages);
    for (std::int32_t i = 0; i < pages; ++i) order[i] = i;
    std::shuffle(order.begin(), order.end(), random);
    for (std::int32_t& page : table) page = page < 0 ? -1 : order[page];
    told = table;
    constexpr std::int32_t kNoPages[] = {-1, std::numeric_limits<std::int32_t>::max()};
    for (std::size_t i = 0; i < told.size(); ++i) {
      if (!seen[i]) told[i] = kNoPages[i % 2];
    }
    p.page_table.data = told.data();
    p.num_pages = pages;
    return pages;
  }

  // Whether a query sees a key of each page of the table. Pages that no query sees need not be
  // there.
  std::vector<bool> seen_pages(std::int64_t page_size) const {
    const AttentionParams& p = params;
    std::vector<bool> seen(table.size());
    for (std::int64_t b = 0; b < p.batch_size; ++b) {
      const std::int64_t queries = queries_of[b];
      for (std::int64_t j = leftpads[b]; j < used[b]; ++j) {
        for (std::int64_t i = 0; i < queries; ++i) {
          const std::int64_t at = i + used[b] - queries;
          const bool hidden = (p.causal == Causal::kBottomRight && j > at) ||
                              (p.window_left >= 0 && j < at - p.window_left) ||
                              (p.window_right >= 0 && j > at + p.window_right);
          if (!hidden) seen[b * p.page_table.batch_stride + j / page_size] = true;
        }
      }
    }
    return seen;
  }

  std::int64_t index(std::int64_t b, std::int64_t j, const TensorView& x) const {
    const AttentionParams& p = params;
    if (p.page_table.data) {
      const std::int32_t page = table[b * p.page_table.batch_stride + j / p.page_size];
      return page * x.batch_stride + j % p.page_size * x.row_stride;
    }
    return (p.cache_batch_idx ? entries[b] : b) * x.batch_stride + j * x.row_stride;
  }

  void move(const Problem& problem, const Buffer& from, const TensorView& view, std::int64_t width,
            std::int64_t rows, std::int64_t count, bool heads_first, Buffer* to, TensorView* x) {
    const std::int64_t heads = params.num_heads_kv, gap = 3;
    x->row_stride = heads_first ? width + gap : heads * width + gap;
    x->head_stride = heads_first ? rows * x->row_stride : width;
    x->batch_stride = (heads_first ? heads * rows : rows) * x->row_stride + gap;
    *to = Buffer(view.dtype, count * x->batch_stride);
    x->data = to->data();
    for (std::int64_t b = 0; b < params.batch_size; ++b) {
      for (std::int64_t j = leftpads[b]; j < used[b]; ++j) {
        const std::int64_t row = problem.cu_seqlens_k[b] + j - leftpads[b];
        for (std::int64_t h = 0; h < heads; ++h) {
          for (std::int64_t d = 0; d < width; ++d) {
            to->set(index(b, j, *x) + h * x->head_stride + d,
                    from.get(row * view.row_stride + h * view.head_stride + d));
          }
        }
      }
    }
  }
};

std::vector<double> numbers(const Buffer& buffer) {
  std::vector<double> all;
  for (std::int64_t i = 0; i < buffer.size(); ++i) all.push_back(buffer.get(i));
  for (double& x : all) x = x == x ? x : 12345.0;  // NaN: not written
  return all;
}

void check(const Spec& spec, const std::vector<Cache>& caches) {
  Problem problem(spec);
  const test::Reference reference(problem);
  for (const char* isa : test::isas()) {
    const std::string wrong = test::run_and_judge(problem, reference, isa, 2);
    CHECK_FOR(wrong.empty(), wrong);
    for (const bool batch_invariant : {true, false}) {
      Options options;
      options.num_threads = 2;
      options.batch_invariant = batch_invariant;
      const auto run = [&](AttentionParams p) {
        problem.poison();
        p.out.data = problem.out.data();
        if (p.lse.data) p.lse.data = static_cast<float*>(problem.lse.data());
        CHECK(supported(p, test::cpu_device(isa), options).ok);
        cpu::forward(p, plan(p, test::cpu_device(isa), options));
        CHECK_EQ(problem.out.stray_writes(), 0);
        CHECK_EQ(problem.lse.stray_writes(), 0);
        return numbers(problem.out);
      };
      const std::vector<double> out = run(problem.params), lse = numbers(problem.lse);
      for (const Cache& cache : caches) {
        const Cached cached(problem, cache);
        const std::string what = spec.describe() + ", pages of " + std::to_string(cache.page_size) +
                                 (cache.leftpad ? ", leftpad" : "");
        // In how many parts the keys are computed may follow how many there can be.
        const bool same_plan =
            batch_invariant || plan(cached.params, test::cpu_device(isa), options).num_splits ==
                                   plan(problem.params, test::cpu_device(isa), options).num_splits;
        const bool same = run(cached.params) == out && numbers(problem.lse) == lse;
        CHECK_FOR(same || !same_plan, what);
        const test::Errors errors = test::errors_of(problem, reference);
        CHECK_FOR(errors.out <= 2 * reference.plain_error + 8 * 0x1p-23, what);
        CHECK_FOR(errors.lse <= 2 * reference.plain_lse_error + 8 * 0x1p-23, what);
      }
    }
  }
}

const std::vector<Cache> kCaches = {
    {Where::kBatch},
    {Where::kBatch, 0, true, true},
    {Where::kChosen},
    {Where::kChosen, 0, true},
    {Where::kPages, 1},
    {Where::kPages, 3, true, true},
    {Where::kPages, 16},
    {Where::kPages, 16, true},
    {Where::kPages, 256, false, true},
};

void results() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const Causal causal : {Causal::kNone, Causal::kBottomRight}) {
      Spec spec;
      spec.dtype = dtype;
      spec.causal = causal;
      spec.seqlen_q = spec.seqlen_k = 0;
      spec.lengths_q = {5, 0, 40, 1, 33, 3};
      spec.lengths_k = {9, 4, 160, 0, 15, 17};
      spec.alibi = spec.sinks = true;
      check(spec, kCaches);
      spec.window_left = 30;
      spec.softcap = 4.0;
      spec.sinks = false;
      check(spec, kCaches);
    }
  }
}

// Bias and mask count keys from the sequence's first.
void scores() {
  Spec spec;
  spec.seqlen_q = spec.seqlen_k = 0;
  spec.lengths_q = {5, 40, 1};
  spec.lengths_k = {9, 160, 32};
  spec.bias = spec.mask = true;
  check(spec, {{Where::kBatch}, {Where::kChosen}, {Where::kPages, 3}, {Where::kPages, 16}});
}

// One query, and few of them with so many keys that the plan splits these.
void decoding() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
    for (const std::int32_t queries : {1, 3, 8}) {
      Spec spec;
      spec.dtype = dtype;
      spec.causal = Causal::kBottomRight;
      spec.seqlen_q = spec.seqlen_k = 0;
      spec.lengths_q = {queries, queries, queries, queries};
      spec.lengths_k = {0, 1, 511, 16};
      std::vector<Cache> caches = kCaches;
      for (Cache& cache : caches) cache.fixed_queries = true;
      check(spec, caches);
    }
    Spec split;
    split.dtype = dtype;
    split.seqlen_q = split.seqlen_k = 0;
    split.lengths_q = {1, 3};
    split.lengths_k = {2100, 40};
    CHECK(plan(Problem(split).params, test::cpu_device("portable")).num_splits > 1);
    check(split, kCaches);
  }
}

}  // namespace

int main() {
  results();
  scores();
  decoding();
  return test::summary();
}
