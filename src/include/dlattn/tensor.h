#pragma once

#include <cstdint>

#include "dlattn/types.h"

namespace dlattn {

// A tensor in the memory of a problem's device. Strides count elements, one for each dimension; 0
// broadcasts an input. The problem gives the sizes. Strides of dimensions that a tensor does not
// have are not read.
template <typename T>
struct BasicTensorView {
  T* data = nullptr;
  std::int64_t batch_stride = 0;
  std::int64_t row_stride = 0;
  std::int64_t head_stride = 0;
  std::int64_t col_stride = 1;
  DType dtype = DType::kFloat16;  // of the elements; read only where T is void
};

// The largest sizes that an operation accepts. Within them nothing that is computed from sizes and
// strides overflows 64 bits, on any backend.
constexpr std::int64_t kMaxCount = (std::int64_t{1} << 31) - 1;  // sequences, heads, a head dim
constexpr std::int64_t kMaxLength = std::int64_t{1} << 40;       // rows, pages, cache entries
constexpr std::int64_t kMaxElements = std::int64_t{1} << 52;     // of a tensor, shared ones too
constexpr std::int64_t kMaxTensorBytes = std::int64_t{1} << 60;  // from its first to its last one

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

}  // namespace dlattn
