#pragma once

#include <cfenv>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace dlattn::core {

// While it lives, its thread rounds to the nearest number, counts subnormal ones and traps nothing.
// A program may have set it otherwise, and threads inherit it from the one that starts them:
// results would depend on which thread computes them.
class DefaultFloats {
 public:
#if defined(__x86_64__)
  DefaultFloats() {
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(kDefault);
  }
  ~DefaultFloats() {
    if ((before_ & ~kFlags) != kDefault) _mm_setcsr(before_);
  }
#else
  DefaultFloats() {
    std::fegetenv(&before_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~DefaultFloats() { std::fesetenv(&before_); }
#endif
  DefaultFloats(const DefaultFloats&) = delete;
  DefaultFloats& operator=(const DefaultFloats&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr unsigned kFlags = 0x3F;      // exceptions that there were
  static constexpr unsigned kDefault = 0x1F80;  // Intel's manual, volume 1, 10.2.3: MXCSR
  const unsigned before_ = _mm_getcsr();
#else
  std::fenv_t before_;
#endif
};

}  // namespace dlattn::core
