// The cases that tests share, compiled once for all of them and without sanitizers.
#include <algorithm>
#include <climits>
#include <numeric>
#include <sstream>
#include <string>
#include <vector>

#include "attention_case.h"
#include "feature_cases.h"
#include "length_cases.h"
#include "wmma_cases.h"

namespace simt {

Case varlen(Case c, const std::vector<int>& seqlens_q, const std::vector<int>& seqlens_k) {
  const auto starts = [](const std::vector<int>& lengths) {
    std::vector<int> sums(lengths.size() + 1);
    std::partial_sum(lengths.begin(), lengths.end(), sums.begin() + 1);
    return sums;
  };
  c.cu_seqlens_q = starts(seqlens_q), c.cu_seqlens_k = starts(seqlens_k);
  c.total_q = c.cu_seqlens_q.back(), c.total_k = c.cu_seqlens_k.back();
  c.batch_size = static_cast<int>(seqlens_q.size());
  c.seqlen_q = *std::max_element(seqlens_q.begin(), seqlens_q.end());
  c.seqlen_k = *std::max_element(seqlens_k.begin(), seqlens_k.end());
  return c;
}

void append(std::vector<Case>* cases, const std::vector<Case>& more) {
  cases->insert(cases->end(), more.begin(), more.end());
}

std::string Case::name() const {
  static const char* const kMasks[] = {"full", "causal", "top-left"};
  static const char* const kLayout[] = {"bshd",   "bhsd",   "packed",   "align8",
                                        "align4", "align2", "broadcast"};
  std::ostringstream out;
  out << "b" << batch_size << " q" << seqlen_q << " k" << seqlen_k << " h" << num_heads << "/"
      << num_heads_kv << " d" << head_dim;
  if (head_dim_v) out << "/" << head_dim_v;
  out << " " << kMasks[static_cast<int>(causal)] << " " << kLayout[static_cast<int>(layout)];
  if (!lse) out << " no-lse";
  if (window_left >= 0 || window_right >= 0) {
    out << " window " << window_left << ":" << window_right;
  }
  if (sinks) out << " sinks";
  if (softcap != 0.0) out << " softcap";
  if (extreme && softcap != 0.0) out << "=" << softcap;
  if (alibi) out << (alibi_per_sequence ? " alibi-per-sequence" : " alibi");
  if (bias != Bias::kNone) out << (bias == Bias::kFloat32 ? " bias-float32" : " bias");
  if (mask) out << " mask";
  static const char* const kScores[] = {"", " aligned", " one-row", " one-key", " columns"};
  out << kScores[static_cast<int>(score_layout)];
  if (varlen()) out << (seqused_k.empty() ? " varlen" : " varlen seqused");
  if (!lengths.empty()) out << " " << lengths;
  if (rise != 0.0) out << " rising";
  if (bias_rise != 0.0) out << " bias rising";
  if (pair != 0.0) out << " pair";
  if (descales) out << (q_descale_by_kv_head ? " descales by kv head" : " descales");
  if (k_descale) out << " k=" << *k_descale;
  if (seed) out << " seed " << *seed;
  if (extreme) out << extreme->name();
  return out.str();
}

std::vector<Case> shape_cases() {
  return {
      // No keys, no queries, an empty batch.
      {20, 0, 64, kCausal},
      {0, 20, 64, kFull},
      {20, 20, 64, kFull, 1, 1, Layout::kBshd, 0, 0},
      // Heads, and v wider or narrower than q.
      {40, 70, 32, kCausal, 4, 2, Layout::kBshd, 8},
      {20, 70, 16, kFull, 3, 1, Layout::kBhsd, 112, 2},
      // Other strides.
      {20, 50, 32, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
}

std::vector<Case> feature_cases(int head_dim) {
  const Case heads = {40, 90, head_dim, kFull, 2, 1};
  const Case causal_heads = {40, 90, head_dim, kCausal, 2, 1};
  return {
      with(heads, [](Case& c) { c.window_left = 20; }),
      with(heads, [](Case& c) { c.window_left = 10, c.window_right = 5; }),
      with(heads, [](Case& c) { c.window_right = 0; }),
      with(causal_heads, [](Case& c) { c.window_left = 0; }),
      with(causal_heads, [](Case& c) { c.sinks = true; }),
      with({70, 20, head_dim, kCausal, 2, 1}, [](Case& c) { c.sinks = true; }),
      with({5, 0, head_dim, kFull, 2, 1}, [](Case& c) { c.sinks = true; }),
      varlen(causal_heads, {1, 33, 0, 70, 5}, {40, 17, 8, 65, 0}),
      with(varlen(heads, {3, 70}, {65, 31}),
           [](Case& c) { c.seqused_k = {40, 0}, c.sinks = true; }),
  };
}

std::vector<Case> packed_cases(int head_dim) {
  const Case one = {1, 90, head_dim, kCausal, 4, 1};
  const Case few = {3, 90, head_dim, kCausal, 8, 2};
  std::vector<Case> cases = {
      // One query: groups of 2, 4, 8 and 7, and more rows than a tile has.
      {1, 70, head_dim, kFull, 4, 2, Layout::kBshd, 0, 2},
      {1, 170, head_dim, kCausal, 7, 1, Layout::kBhsd},
      {1, 33, head_dim, kTopLeft, 8, 1, Layout::kPacked},
      {1, 65, head_dim, kCausal, 70, 1, Layout::kBshd, 16},
      {1, 0, head_dim, kCausal, 4, 1},
      with(one, [](Case& c) { c.window_left = 20; }),
      with(one, [](Case& c) { c.window_left = 3, c.causal = kTopLeft; }),
      with(one, [](Case& c) { c.window_right = 5, c.causal = kFull; }),
      with(one, [](Case& c) { c.sinks = true, c.lse = false; }),
      // A few.
      {2, 70, head_dim, kCausal, 4, 2, Layout::kBshd, 0, 2},
      {3, 170, head_dim, kCausal, 7, 1, Layout::kBhsd, 40},
      {17, 100, head_dim, kTopLeft, 8, 1, Layout::kPacked},
      {33, 70, head_dim, kFull, 4, 2, Layout::kBroadcast, 0, 2},
      // Rows that see nothing, whole blocks of them.
      {40, 5, head_dim, kCausal, 4, 1},
      with(few, [](Case& c) { c.window_left = 20; }),
      with(few, [](Case& c) { c.window_left = 10, c.window_right = 5, c.causal = kFull; }),
      with(few, [](Case& c) { c.sinks = true; }),
      varlen(few, {1, 17, 0, 3, 5}, {40, 17, 8, 65, 0}),
      with(varlen(few, {2, 40}, {65, 31}),
           [](Case& c) { c.seqused_k = {40, 0}, c.sinks = true, c.window_left = 9; }),
  };
  return cases;
}

namespace lengths {

Case varlen_of(Case c, const std::string& what, std::vector<int> cu_seqlens_q,
               std::vector<int> cu_seqlens_k) {
  c.lengths = what;
  c.cu_seqlens_q = std::move(cu_seqlens_q), c.cu_seqlens_k = std::move(cu_seqlens_k);
  c.batch_size = static_cast<int>(c.cu_seqlens_q.size()) - 1;
  c.total_q = kRowsQ, c.total_k = kRowsK;
  c.seqlen_q = 80, c.seqlen_k = 90;
  return c;
}

}  // namespace lengths

std::vector<Case> slice_cases(const Case& base) {
  using lengths::varlen_of;
  return {
      varlen_of(base, "slice", {37, 50, 50, 120}, {20, 60, 63, 140}),
      varlen_of(base, "slice of k alone", {0, 13, 80}, {100, 120, 170}),
      with(varlen_of(base, "slice", {64, 128, 150}, {5, 90, 100}),
           [](Case& c) { c.seqused_k = {70, 3}; }),
      // The first sequence begins after more rows than any tile has.
      with(varlen_of(base, "late slice", {600, 601, 680}, {300, 340, 425}),
           [](Case& c) { c.total_q = 700, c.total_k = 430; }),
  };
}

std::vector<Case> hostile_length_cases(const Case& base) {
  using lengths::varlen_of;
  return {
      varlen_of(base, "decreasing", {50, 20, 80, 10}, {90, 40, 100, 5}),
      varlen_of(base, "decreasing q", {150, 100, 50, 0}, {0, 40, 80, 120}),
      varlen_of(base, "beyond the end", {0, 40, 1000}, {0, 60, 1000}),
      varlen_of(base, "all beyond the end", {1000, 2000, 3000}, {171, 172, 400}),
      varlen_of(base, "k beyond the end", {0, 40, 70}, {1000, 1030, 1100}),
      varlen_of(base, "largest", {0, 40, INT_MAX}, {0, 60, INT_MAX}),
      varlen_of(base, "all largest", {INT_MAX, INT_MAX, INT_MAX}, {INT_MAX, INT_MAX, INT_MAX}),
      varlen_of(base, "negative", {-5, 20, 40}, {-70, 10, 40}),
      varlen_of(base, "from the smallest", {INT_MIN, 30, 60}, {INT_MIN, 30, 60}),
      varlen_of(base, "smallest and largest", {INT_MIN, INT_MAX, INT_MIN, INT_MAX},
                {INT_MAX, INT_MIN, INT_MAX, INT_MIN}),
      varlen_of(base, "to the smallest", {10, INT_MIN}, {10, INT_MIN}),
      with(varlen_of(base, "seqused", {0, 20, 40, 60, 80}, {0, 30, 60, 90, 120}),
           [](Case& c) { c.seqused_k = {-3, 1000, INT_MIN, INT_MAX}; }),
      // Sequences longer than what the host takes for the longest.
      with(varlen_of(base, "longer than max_seqlen", {0, 100, 150}, {0, 120, 170}),
           [](Case& c) { c.seqlen_q = 33, c.seqlen_k = 47; }),
      with(varlen_of(base, "max_seqlen of 0", {0, 100, 150}, {0, 120, 170}),
           [](Case& c) { c.seqlen_q = 0, c.seqlen_k = 0; }),
      // A max_seqlen longer than the tensors, with an end beyond them.
      with(varlen_of(base, "long max_seqlen", {0, 5000}, {0, 5000}),
           [](Case& c) { c.seqlen_q = 400, c.seqlen_k = 600; }),
      with(varlen_of(base, "no keys in memory", {0, 40, 70}, {0, 60, 1000}),
           [](Case& c) { c.total_k = 0; }),
      with(varlen_of(base, "no queries in memory", {0, 40, 70}, {0, 60, 100}),
           [](Case& c) { c.total_q = 0; }),
      with(varlen_of(base, "no sequences", {0}, {0}), [](Case& c) { c.total_q = 0; }),
  };
}

std::vector<Case> run_cases(int head_dim) {
  const Case base = {20, 300, head_dim, kFull, 2, 1};
  std::vector<Case> cases = {
      base,
      {20, 128, head_dim, kFull},
      {20, 129, head_dim, kFull},
      {330, 300, head_dim, kCausal},
      with(base, [](Case& c) { c.window_left = 40, c.window_right = 30, c.causal = kTopLeft; }),
      with(base, [](Case& c) { c.sinks = true, c.rise = 1.0; }),
      with({1, 1, head_dim, kCausal, 2, 1},
           [](Case& c) {
             c.cu_seqlens_q = {0, 9, 40, 60}, c.cu_seqlens_k = {0, 100, 400, 700}, c.batch_size = 3;
             c.total_q = 60, c.total_k = 700, c.seqlen_q = 31, c.seqlen_k = 300;
             c.seqused_k = {100, 300, 90};
             c.lengths = "long and short";
           }),
  };
  for (const double rise : {0.3, 4.0, -200.0})
    cases.push_back(with(base, [=](Case& c) { c.rise = rise; }));
  return cases;
}

std::vector<Case> length_cases(int head_dim) {
  std::vector<Case> cases = slice_cases({1, 1, head_dim, kCausal, 2, 1});
  append(&cases, slice_cases(with({1, 1, head_dim, kFull, 1, 1, Layout::kBhsd},
                                  [](Case& c) { c.window_left = 30, c.sinks = true; })));
  append(&cases, hostile_length_cases({1, 1, head_dim, kCausal, 2, 1}));
  return cases;
}

std::vector<Case> length_and_score_cases(int head_dim) {
  const Case base = with({1, 1, head_dim, kCausal, 2, 1}, [](Case& c) {
    c.softcap = 5.0, c.alibi = true, c.bias = Bias::kFloat32, c.mask = true;
  });
  std::vector<Case> cases = slice_cases(base);
  append(&cases, hostile_length_cases(base));
  return cases;
}

std::vector<Case> wmma_cases(bool thread_sanitizer) {
  std::vector<Case> cases = {
      // Every head_dim once, with lengths at the edges of row groups and tiles.
      {1, 1, 16, kFull},
      {17, 31, 32, kCausal},
      {16, 33, 48, kFull},
      {65, 130, 64, kCausal},
      {15, 64, 80, kTopLeft},
      {33, 65, 96, kCausal},
      {31, 63, 112, kFull},
      {66, 97, 128, kCausal},
      // Rows that see nothing: some of a row group, whole row groups, a whole tile.
      {100, 40, 32, kCausal},
      // No keys, no queries, an empty batch.
      {20, 0, 64, kCausal},
      {0, 20, 64, kFull},
      {20, 20, 64, kFull, 1, 1, Layout::kBshd, 0, 0},
      // Heads, and v wider or narrower than q.
      {40, 70, 32, kCausal, 4, 2, Layout::kBshd, 16},
      {20, 70, 16, kFull, 3, 1, Layout::kBhsd, 64, 2},
      // Rows that are aligned to less than 16 bytes, and other strides.
      {20, 50, 32, kCausal, 2, 1, Layout::kAlign8},
      {20, 50, 32, kFull, 2, 1, Layout::kAlign4},
      {20, 50, 32, kCausal, 2, 1, Layout::kAlign2, 64},
      {20, 50, 32, kCausal, 2, 2, Layout::kPacked, 0, 2, false},
      {20, 50, 32, kTopLeft, 2, 1, Layout::kBroadcast, 0, 2},
  };
  append(&cases, feature_cases(32));
  append(&cases, length_cases(32));
  if (thread_sanitizer) return cases;
  const std::vector<Case> more = {
      {15, 15, 64, kFull},
      {16, 16, 64, kCausal},
      {17, 17, 64, kTopLeft},
      {63, 31, 64, kFull},
      {64, 32, 64, kCausal},
      {65, 33, 64, kFull},
      {1, 200, 64, kCausal},
      {200, 1, 64, kFull},
      {3, 300, 128, kFull},
      {100, 173, 64, kCausal, 4, 2},
      {173, 100, 64, kCausal, 2, 1},
      {173, 100, 64, kTopLeft, 2, 1},
      {100, 173, 128, kTopLeft, 2, 2},
      {100, 173, 96, kFull, 4, 1},
      {50, 90, 128, kCausal, 2, 1, Layout::kBshd, 16},
      {50, 90, 16, kCausal, 2, 1, Layout::kBshd, 128},
      {70, 90, 112, kCausal, 2, 1, Layout::kAlign8, 80},
      {70, 90, 80, kFull, 2, 1, Layout::kAlign2, 112},
      {70, 90, 64, kCausal, 2, 2, Layout::kPacked, 0, 2},
      {70, 90, 64, kCausal, 2, 2, Layout::kBhsd, 0, 2, false},
  };
  append(&cases, more);
  return cases;
}

}  // namespace simt
