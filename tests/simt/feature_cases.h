#pragma once

#include <vector>

#include "attention_case.h"

namespace simt {

// Nothing to compute, heads, and strides, for kernels whose rows are aligned to 16 bytes.
inline std::vector<Case> shape_cases() {
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

// Windows, sinks and variable length, which every family has.
inline std::vector<Case> feature_cases(int head_dim) {
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

// Query heads that share tiles, for the tile shapes that pack them. `head_dim` is a multiple of 8.
inline std::vector<Case> packed_cases(int head_dim) {
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

}  // namespace simt
