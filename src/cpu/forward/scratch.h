#pragma once

#include <cstdint>

#include "cpu/arena.h"
#include "dlattn/forward.h"

namespace dlattn::cpu::DLATTN_CPU_ISA {

// The state of a task's rows from tile to tile; sums may be of another type.
template <typename T, typename Sum = T>
struct State {
  State() = default;
  State(const AttentionParams& params, std::int64_t block_m, Arena* arena) {
    o_t = arena->take<Sum>(params.head_dim_v * block_m);
    row_max = arena->take<T>(block_m);
    row_sum = arena->take<Sum>(block_m);
  }
  Sum* o_t = nullptr;      // [head_dim_v, block_m], unnormalised
  T* row_max = nullptr;    // [block_m] of the scores
  Sum* row_sum = nullptr;  // [block_m] of the probabilities, unnormalised
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
