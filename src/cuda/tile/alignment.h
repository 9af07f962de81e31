#pragma once

#include <cstdint>

// Plain C++, shared by the plan and the launchers.
namespace dlattn {

// To how many bytes, up to 16, everything that has been added is aligned: the widest access to it.
class Alignment {
 public:
  // No access is narrower than one element.
  explicit Alignment(std::int64_t element_bytes) : element_bytes_(element_bytes) {}

  void add_address(const void* data) { bits_ |= reinterpret_cast<std::uintptr_t>(data); }
  void add_length(std::int64_t elements) {
    bits_ |= static_cast<std::uint64_t>(elements * element_bytes_);
  }
  // The stride of a dimension, in elements; that of a single element is never taken.
  void add_stride(std::int64_t size, std::int64_t stride) {
    if (size > 1) add_length(stride);
  }

  int bytes() const {
    int width = 16;
    while (width > element_bytes_ && bits_ % width != 0) width /= 2;
    return width;
  }

 private:
  std::int64_t element_bytes_;
  std::uint64_t bits_ = 0;
};

}  // namespace dlattn
