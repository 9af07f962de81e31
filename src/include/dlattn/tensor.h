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

using TensorView = BasicTensorView<const void>;
using MutableTensorView = BasicTensorView<void>;

}  // namespace dlattn
