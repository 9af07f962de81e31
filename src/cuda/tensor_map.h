#pragma once

#include "cuda/ptx/tensor_map.cuh"
#include "cuda/tile/boxes.h"
#include "dlattn/types.h"

namespace dlattn::cuda {

// What the copy engine reads of a tensor, whose elements of 16 bits are of `dtype`; nothing of one
// without data. Encoded by the driver, without which it throws.
ptx::TensorMap encode_tensor_map(const tile::TensorBox& box, DType dtype);

}  // namespace dlattn::cuda
