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

// An output must not map two elements to one address. `accepted` comes before the least stride.
// Strides of an injective layout, sorted, each reach past all that the smaller ones span.
inline void check_output_layout(const char* name, const char* accepted, std::int64_t inner,
                                const std::int64_t (&sizes)[3], const std::int64_t (&strides)[3]) {
  std::int64_t extent = inner;
  bool used[3] = {sizes[0] <= 1, sizes[1] <= 1, sizes[2] <= 1};
  for (;;) {
    int next = -1;
    for (int i = 0; i < 3; ++i) {
      if (!used[i] && (next < 0 || strides[i] < strides[next])) next = i;
    }
    if (next < 0) return;
    if (strides[next] < extent) {
      fail(name, ": a stride of ", strides[next], " elements makes elements share memory; ",
           accepted, extent, " there");
    }
    extent += strides[next] * (sizes[next] - 1);
    used[next] = true;
  }
}

}  // namespace dlattn::core
