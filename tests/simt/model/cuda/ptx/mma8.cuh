#pragma once

#include <cstdint>
#include <cstring>

#include "harness/block.h"

namespace dlattn::ptx {

namespace model {

template <typename Accumulator, int kRegisters>
void byte_product(Accumulator (&d)[kRegisters], const std::uint32_t (&a)[4], std::uint32_t b0,
                  std::uint32_t b1, simt::Combine combine) {
  simt::ByteProduct operand;
  const std::uint32_t b[2] = {b0, b1};
  std::memcpy(operand.a, a, sizeof a);
  std::memcpy(operand.b, b, sizeof b);
  std::memcpy(operand.d, d, sizeof d);
  simt::warp_collective("mma of bytes", 0xFFFFFFFFu, combine, &operand);
  std::memcpy(d, operand.d, sizeof d);
}

}  // namespace model

inline void mma_e4m3(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                     std::uint32_t b1) {
  model::byte_product(d, a, b0, b1, simt::combine_e4m3_product);
}

inline void mma_e4m3(std::uint32_t (&d)[2], const std::uint32_t (&a)[4], std::uint32_t b0,
                     std::uint32_t b1) {
  model::byte_product(d, a, b0, b1, simt::combine_e4m3_half_product);
}

inline void mma_s8(std::int32_t (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                   std::uint32_t b1) {
  model::byte_product(d, a, b0, b1, simt::combine_s8_product);
}

}  // namespace dlattn::ptx
