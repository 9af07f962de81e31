#pragma once

#include <cstdint>

namespace dlattn::cpu::DLATTN_CPU_ISA {

// Scratch memory of one thread, given out in order. With a null base it only adds up sizes.
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

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
