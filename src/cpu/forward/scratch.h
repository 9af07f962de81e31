#pragma once

#include <cstdint>

#include "dlattn/forward.h"

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
