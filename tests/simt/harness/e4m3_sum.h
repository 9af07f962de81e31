#pragma once

#include <cstdint>

// How tensor cores of compute capability 8.9 and 9.0 add up products of e4m3, as Microsoft's
// MMA-Sim describes them (arXiv 2511.10909).
namespace simt {

// The accumulator plus the products of `count` pairs of bytes: all of them are aligned to the
// largest of their exponents and cut to 13 bits of fraction, added, and the sum is cut to 13 bits
// of fraction. An accumulator is fp32.
float add_e4m3_products(float accumulator, const std::uint8_t* a, const std::uint8_t* b, int count);

// The same with an accumulator of fp16: the sum is rounded to it, to nearest even, after each so
// many products. From 65520 on it is infinity.
float add_e4m3_products_to_half(float accumulator, const std::uint8_t* a, const std::uint8_t* b,
                                int count);

}  // namespace simt
