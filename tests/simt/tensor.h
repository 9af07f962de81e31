#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <random>
#include <vector>

namespace simt {

// The heap blocks of all tensors, by where they begin, with where they end.
inline std::map<const unsigned char*, const unsigned char*> tensor_blocks;

// Whether an address lies within a tensor's memory.
inline bool is_in_a_tensor(const void* address) {
  const auto* const byte = static_cast<const unsigned char*>(address);
  const auto behind = tensor_blocks.upper_bound(byte);
  return behind != tensor_blocks.begin() && byte < std::prev(behind)->second;
}

// A tensor of four dimensions in a heap block that ends where the tensor ends, so that
// AddressSanitizer sees the first element too far. Every byte that is no element stays 0xFF (a
// NaN), as do elements until they are written.
template <typename T>
class Tensor {
 public:
  using Dims = std::array<std::int64_t, 4>;

  // The element at index 0 stands `offset` elements into the block.
  void allocate(const Dims& sizes, const Dims& strides, std::int64_t offset = 0) {
    sizes_ = sizes, strides_ = strides, offset_ = offset;
    empty_ = std::count(sizes.begin(), sizes.end(), 0) > 0;
    if (empty_) return;
    std::int64_t last = offset;
    for (int i = 0; i < 4; ++i) last += (sizes[i] - 1) * strides[i];
    bytes_ = static_cast<std::size_t>(last + 1) * sizeof(T);
    block_.reset(static_cast<unsigned char*>(std::malloc(bytes_)));
    tensor_blocks[block_.get()] = block_.get() + bytes_;
    poison();
  }

  void poison() {
    if (!empty_) std::memset(block_.get(), 0xFF, bytes_);
  }

  T* data() const { return empty_ ? nullptr : reinterpret_cast<T*>(block_.get()) + offset_; }
  T& at(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) const {
    return data()[a * strides_[0] + b * strides_[1] + c * strides_[2] + d * strides_[3]];
  }
  std::int64_t size(int dim) const { return sizes_[dim]; }
  std::int64_t stride(int dim) const { return strides_[dim]; }

  // Normally distributed numbers, off zero by `offset`.
  void fill(std::mt19937* random, double deviation, double offset) const {
    std::normal_distribution<double> normal(offset, deviation);
    for_each([&](T& x) { x = static_cast<T>(static_cast<float>(normal(*random))); });
  }

  template <typename Visit>
  void for_each(Visit visit) const {
    if (empty_) return;
    for (std::int64_t a = 0; a < sizes_[0]; ++a) {
      for (std::int64_t b = 0; b < sizes_[1]; ++b) {
        for (std::int64_t c = 0; c < sizes_[2]; ++c) {
          for (std::int64_t d = 0; d < sizes_[3]; ++d) visit(at(a, b, c, d));
        }
      }
    }
  }

  std::vector<unsigned char> bytes() const {
    if (empty_) return {};
    return std::vector<unsigned char>(block_.get(), block_.get() + bytes_);
  }

  // Whether no byte but those of elements was written.
  bool gaps_intact() const {
    std::vector<unsigned char> rest = bytes();
    for_each([&](T& x) {
      const std::size_t at = reinterpret_cast<unsigned char*>(&x) - block_.get();
      std::memset(rest.data() + at, 0xFF, sizeof(T));
    });
    return std::all_of(rest.begin(), rest.end(), [](unsigned char byte) { return byte == 0xFF; });
  }

 private:
  struct Free {
    void operator()(unsigned char* p) const {
      tensor_blocks.erase(p);
      std::free(p);
    }
  };
  Dims sizes_ = {};
  Dims strides_ = {};
  std::int64_t offset_ = 0;
  bool empty_ = true;
  std::size_t bytes_ = 0;
  std::unique_ptr<unsigned char, Free> block_;
};

}  // namespace simt
