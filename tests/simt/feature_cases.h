#pragma once

#include <vector>

#include "attention_case.h"

namespace simt {

// Windows, sinks and variable length, which every family has.
inline std::vector<Case> feature_cases(int head_dim) {
  constexpr Causal kFull = Causal::kNone, kCausal = Causal::kBottomRight;
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

}  // namespace simt
