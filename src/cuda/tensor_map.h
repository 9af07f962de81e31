#pragma once

#include "cuda/device_guard.h"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/tile/boxes.h"
#include "dlattn/types.h"

namespace dlattn::cuda {

// What TMA reads of a tensor, whose elements of 16 bits are of `dtype`; nothing of one
// without data. Encoded by the driver, which asks for a current device.
ptx::TensorMap encode_tensor_map(const DeviceGuard& device, const tile::TensorBox& box,
                                 DType dtype);

}  // namespace dlattn::cuda
