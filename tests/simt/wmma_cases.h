#pragma once

#include <vector>

#include "attention_case.h"
#include "feature_cases.h"
#include "length_cases.h"

namespace simt {

// For the kernels whose warps own row groups of 16 rows of a tile of 64, with tiles of 32 or 64
// keys.
inline std::vector<Case> wmma_cases(bool thread_sanitizer) {
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
      {20, 50, 32, kCausal, 2, 1, Layout::kAlign2},
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
