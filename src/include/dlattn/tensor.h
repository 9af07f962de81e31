#pragma once

#include <cstdint>

#include "dlattn/types.h"

namespace dlattn {

// A tensor that lies in the memory of a problem's device: where its elements are, and of which
// type. Strides count elements and are named after the dimension that they step through; 0
// broadcasts an input. The problem gives the sizes. A tensor without one of the dimensions leaves
// that stride alone: it is not read.
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
