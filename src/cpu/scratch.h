#pragma once

#include <cstdint>

#include "dlattn/params.h"

namespace dlattn::cpu::DLATTN_CPU_ISA {

// Scratch memory of one thread, dealt out in order. With a null base it only adds up sizes.
class Arena {
 public:
  explicit Arena(void* base) : base_(static_cast<char*>(base)) {}
  template <typename U>
  U* take(std::int64_t count) {
    U* result = base_ ? reinterpret_cast<U*>(base_ + used_) : nullptr;
    used_ += (count * static_cast<std::int64_t>(sizeof(U)) + 63) / 64 * 64;
    return result;
  }
  std::int64_t used() const { return used_; }

 private:
  char* base_;
  std::int64_t used_ = 0;
};

// What a task's rows carry from tile to tile.
template <typename T>
struct State {
  State(const AttentionParams& params, std::int64_t block_m, Arena* arena) {
    o_t = arena->take<T>(params.head_dim_v * block_m);
    row_max = arena->take<T>(block_m);
    row_base = arena->take<T>(block_m);
    row_sum = arena->take<T>(block_m);
  }
  T* o_t;       // [head_dim_v, block_m], unnormalised
  T* row_max;   // [block_m] of the scores
  T* row_base;  // [block_m] the same as a power of two
  T* row_sum;   // [block_m] of 2^(score - row_base)
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
