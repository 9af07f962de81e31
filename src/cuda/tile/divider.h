#pragma once

#include <cstdint>

namespace dlattn {

// Division by a number that the host knows and a kernel does not, as a multiplication: GPUs have no
// instruction for it, and the one they do without costs a thread block its first hundreds of
// cycles.
//
// Numbers are below 2^31. With 2^s the least power of two >= d, m = ceil(2^(31 + s) / d) exceeds
// the exact quotient by less than 1, so n m / 2^(31 + s) exceeds n / d by less than n / 2^(31 + s)
// < 1 / 2^s <= 1 / d, which is too little to reach the next integer.
class Divider {
 public:
  Divider() = default;
  // 1 <= divisor < 2^31.
  constexpr explicit Divider(std::uint32_t divisor) : divisor_(divisor) {
    while ((std::uint64_t{1} << shift_) < divisor) ++shift_;
    multiplier_ =
        static_cast<std::uint32_t>(((std::uint64_t{1} << (31 + shift_)) + divisor - 1) / divisor);
  }

  constexpr std::uint32_t divisor() const { return divisor_; }
  constexpr std::uint32_t quotient(std::uint32_t n) const {
    // The high word first: 64-bit shifts take several instructions.
    return static_cast<std::uint32_t>((static_cast<std::uint64_t>(2 * n) * multiplier_) >> 32) >>
           shift_;
  }
  constexpr std::uint32_t remainder(std::uint32_t n) const { return n - quotient(n) * divisor_; }

 private:
  std::uint32_t divisor_ = 1;
  std::uint32_t multiplier_ = std::uint32_t{1} << 31;
  int shift_ = 0;
};

}  // namespace dlattn
