#pragma once

#include <cstdint>
#include <cstring>

#include "harness/block.h"

namespace dlattn::ptx {

namespace model {

// The elements of packed registers, as numbers.
template <typename T>
void unpack(float* to, const std::uint32_t* from, int registers) {
  for (int i = 0; i < 2 * registers; ++i) {
    const auto bits = static_cast<std::uint16_t>(from[i / 2] >> (i % 2 * 16));
    T element;
    std::memcpy(static_cast<void*>(&element), &bits, sizeof element);
    to[i] = static_cast<float>(element);
  }
}

}  // namespace model

template <typename T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  simt::SmallProduct operand;
  const std::uint32_t b[2] = {b0, b1};
  model::unpack<T>(operand.a, a, 4);
  model::unpack<T>(operand.b, b, 2);
  std::memcpy(operand.d, d, sizeof d);
  simt::warp_collective("mma", 0xFFFFFFFFu, simt::combine_small_product, &operand);
  std::memcpy(d, operand.d, sizeof d);
}

}  // namespace dlattn::ptx
