#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <cstring>

#include "harness/bulk_copy.h"

namespace dlattn::ptx {

struct alignas(16) Float4 {
  float x[4];
};

inline void reduce_add(float* to, const Float4& numbers) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    simt::die("red.v4 at %p, which is not a multiple of 16", static_cast<void*>(to));
  simt::check_global_access();
  for (int i = 0; i < 4; ++i) simt::add_atomically(to + i, numbers.x[i]);
}

// Not atomic: whoever adds at the same time is a race.
inline void reduce_add_alone(float* to, const Float4& numbers) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    simt::die("red.v4 at %p, which is not a multiple of 16", static_cast<void*>(to));
  simt::check_global_access();
  for (int i = 0; i < 4; ++i) to[i] += numbers.x[i];
}

template <typename T>
void reduce_add_alone(T* to, const std::uint32_t (&pairs)[4]) {
  if (reinterpret_cast<std::uintptr_t>(to) % 16 != 0)
    simt::die("red.v4 at %p, which is not a multiple of 16", static_cast<void*>(to));
  simt::check_global_access();
  T numbers[8];
  std::memcpy(static_cast<void*>(numbers), pairs, sizeof numbers);
  for (int i = 0; i < 8; ++i)
    to[i] = static_cast<T>(static_cast<float>(to[i]) + static_cast<float>(numbers[i]));
}

}  // namespace dlattn::ptx
