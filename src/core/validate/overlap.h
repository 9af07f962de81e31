#pragma once

#include <cstdint>

namespace dlattn::core {

// The memory of a tensor: at each index, `run` elements side by side.
struct Region {
  const void* data;
  std::int64_t element_bytes;
  std::int64_t run;
  std::int64_t sizes[4];
  std::int64_t strides[4];  // in elements; >= 0 where the size is more than 1
};

// Whether it can be shown that no byte is in both. False where they share one, and where neither
// the spans nor the strides tell.
bool disjoint(const Region& a, const Region& b);

}  // namespace dlattn::core
