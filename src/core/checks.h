#pragma once

#include <cstdint>

#include "core/fail.h"
#include "dlattn/forward.h"

// What is checked of one size, stride or address. Each throws UnsupportedError.
namespace dlattn::core {

inline void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) fail(name, " is ", value, "; accepted: at least ", least);
}

// The stride of a dimension of one element is never used, so it may be anything.
inline void check_stride(const char* name, const char* dim, std::int64_t size,
                         std::int64_t stride) {
  if (size > 1 && stride < 0) {
    fail(name, ": the stride of dimension ", dim, " is ", stride,
         "; negative strides are not accepted");
  }
}

// A GPU faults at an element that lies across its own size, and takes the process' context along.
// So do the parts of a buffer of larger alignment.
inline void check_address(const char* name, const void* address, std::int64_t element_bytes) {
  const std::int64_t past =
      reinterpret_cast<std::intptr_t>(address) & (element_bytes - 1);  // a power of two
  if (past == 0) return;
  fail(name, ": its address is ", past, " byte(s) past a multiple of ", element_bytes,
       "; accepted: multiples of ",
       element_bytes == kWorkspaceAlignment ? "it" : "the element's size");
}

}  // namespace dlattn::core
