#pragma once

#include <cstdint>
#include <initializer_list>

#include "core/problem/tensor_sizes.h"
#include "core/util/concat.h"
#include "core/validate/fail.h"
#include "dlattn/forward.h"

// Checks of one size, stride or address. Each throws UnsupportedError.
namespace dlattn::core {

inline void check_at_least(const char* name, std::int64_t value, std::int64_t least) {
  if (value < least) fail(name, " is ", value, "; accepted: at least ", least);
}

inline void check_within(const char* name, std::int64_t value, std::int64_t least,
                         std::int64_t most) {
  check_at_least(name, value, least);
  if (value > most) fail(name, " is ", value, "; accepted: up to ", most);
}
// Counts sequences, heads and the columns of a head; rows, pages and entries.
inline void check_count(const char* name, std::int64_t value, std::int64_t least) {
  check_within(name, value, least, kMaxCount);
}
inline void check_length(const char* name, std::int64_t value, std::int64_t least) {
  check_within(name, value, least, kMaxLength);
}

// How many elements there are, of sizes that are checked. A size of 0 counts as 1, so that no part
// of the product is larger than it. `name`: the tensor's, or "".
void check_many_elements(const char* name, const char* sizes,
                         std::initializer_list<std::int64_t> values);
inline void check_elements(const char* name, const char* sizes,
                           std::initializer_list<std::int64_t> values) {
  // Small sizes, of four dimensions at most, need no product: every call comes here.
  std::int64_t bits = 0;
  for (const std::int64_t size : values) bits |= size;
  if (bits >> 13 != 0) check_many_elements(name, sizes, values);
}
inline void check_elements(const char* name, const TensorSizes& sizes, std::int64_t columns) {
  check_elements(name, "batch x seqlen x num_heads x head_dim",
                 {sizes.batch, sizes.rows, sizes.heads, columns});
}

// A value from outside of its enumeration, as a cast makes it.
template <typename Enum>
void check_enum(const char* name, Enum value, Enum last, const char* accepted) {
  const int number = static_cast<int>(value), most = static_cast<int>(last);
  if (number >= 0 && number <= most) return;
  fail(name, " is ", number, "; accepted: 0 to ", most, " (", accepted, ")");
}
inline void check_device_type(DeviceType type) {
  check_enum("device type", type, DeviceType::kCuda, "DeviceType::kCpu, kCuda");
}
inline void check_known_dtype(const char* name, DType dtype) {
  if (dtype >= DType::kFloat16 && dtype <= DType::kInt8) return;
  check_enum(concat(name, ": dtype").c_str(), dtype, DType::kInt8,
             "DType::kFloat16, kBFloat16, kFloat32, kFloat64, kFloat8E4M3, kInt8");
}

inline void check_dtype(const char* name, DType dtype, const char* other, DType expected) {
  if (dtype == expected) return;
  fail(name, ": dtype is ", to_string(dtype), "; accepted: ", to_string(expected), ", that of ",
       other);
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
