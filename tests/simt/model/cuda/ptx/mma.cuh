#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "harness/block.h"

namespace dlattn::ptx {

template <typename T>
void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0, std::uint32_t b1) {
  constexpr bool kHalf = std::is_same_v<T, __half>;
  simt::SmallProduct operand{{a[0], a[1], a[2], a[3]}, {b0, b1}, {d[0], d[1], d[2], d[3]}};
  simt::warp_collective("mma", 0xFFFFFFFFu,
                        kHalf ? simt::combine_half_product : simt::combine_bfloat16_product,
                        &operand);
  std::memcpy(d, operand.d, sizeof d);
}

}  // namespace dlattn::ptx
