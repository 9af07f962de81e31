#pragma once

#include "cuda/device_guard.h"
#include "cuda/plan/tensor_box.h"
#include "cuda/ptx/tensor_map.cuh"
#include "dlattn/types.h"

namespace dlattn::cuda {

// Describes to TMA a tensor whose elements of 16 bits are of `dtype`; no memory if the tensor has
// no data. Encoded by the driver, which asks for a current device.
ptx::TensorMap encode_tensor_map(const DeviceGuard& device, const TensorBox& box, DType dtype);

}  // namespace dlattn::cuda
