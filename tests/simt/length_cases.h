#pragma once

#include <climits>
#include <string>
#include <vector>

#include "attention_case.h"

namespace simt {

// Varlen batches whose cu_seqlens and seqused_k are not what they should be, and slices of larger
// batches, which are fine: both for every family that serves variable length. A GPU's host cannot
// look at them, so whatever they hold must not lead a kernel out of its tensors.
namespace lengths {

constexpr int kRowsQ = 150, kRowsK = 170;  // of the tensors

inline Case varlen_of(Case c, const std::string& what, std::vector<int> cu_seqlens_q,
                      std::vector<int> cu_seqlens_k) {
  c.lengths = what;
  c.cu_seqlens_q = std::move(cu_seqlens_q), c.cu_seqlens_k = std::move(cu_seqlens_k);
  c.batch_size = static_cast<int>(c.cu_seqlens_q.size()) - 1;
  c.total_q = kRowsQ, c.total_k = kRowsK;
  c.seqlen_q = 80, c.seqlen_k = 90;
  return c;
}

}  // namespace lengths

// Slices: rows before the first sequence and after the last one, of q and of k apart.
inline std::vector<Case> slice_cases(const Case& base) {
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

inline std::vector<Case> hostile_length_cases(const Case& base) {
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

// Rows of more keys than are added up in one run, beside shorter ones, where maxima rise within a
// run, from one to the next, or not at all; rows that see nothing of the first runs, or nothing.
inline std::vector<Case> run_cases(int head_dim) {
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

// Both, without bias, mask and ALiBi.
inline std::vector<Case> length_cases(int head_dim) {
  std::vector<Case> cases = slice_cases({1, 1, head_dim, kCausal, 2, 1});
  append(&cases, slice_cases(with({1, 1, head_dim, kFull, 1, 1, Layout::kBhsd},
                                  [](Case& c) { c.window_left = 30, c.sinks = true; })));
  append(&cases, hostile_length_cases({1, 1, head_dim, kCausal, 2, 1}));
  return cases;
}

// With bias, mask and ALiBi of each sequence, which are as large as the longest sequence.
inline std::vector<Case> length_and_score_cases(int head_dim) {
  const Case base = with({1, 1, head_dim, kCausal, 2, 1}, [](Case& c) {
    c.softcap = 5.0, c.alibi = true, c.bias = Bias::kFloat32, c.mask = true;
  });
  std::vector<Case> cases = slice_cases(base);
  append(&cases, hostile_length_cases(base));
  return cases;
}

}  // namespace simt
