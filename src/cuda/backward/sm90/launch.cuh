#pragma once

#include <type_traits>

#include "cuda/backward/sm90/convert.cuh"
#include "cuda/backward/sm90/kernel.cuh"
#include "cuda/backward/sm90/shape.h"
#include "cuda/launch.cuh"
#include "cuda/tensor_map.h"

namespace dlattn::backward_sm90 {

template <DType dtype, int kTile, bool kSoftcap>
void launch_with(const BackwardParams& params, const dlattn::Launch& launch, void* stream) {
  using T = cuda::Element<dtype>;
  const cuda::DeviceGuard device(params.forward.device.index, "backward");
  if (launch.variant == kConvert) {
    cuda::launch_kernel<convert_kernel<T, kTile, kSoftcap>>(
        device, launch.grid, launch.num_warps * 32, 0, stream, query_problem(params, kTile));
    return;
  }
  const TensorBoxes boxes = tensor_boxes(params, kTile);
  const TensorMaps maps = {cuda::encode_tensor_map(device, boxes.q, dtype),
                           cuda::encode_tensor_map(device, boxes.k, dtype),
                           cuda::encode_tensor_map(device, boxes.v, dtype),
                           cuda::encode_tensor_map(device, boxes.dout, dtype)};
  cuda::launch_kernel<kernel<T, kTile, kSoftcap>>(device, launch.grid, launch.num_warps * 32,
                                                  launch.smem_bytes, stream, key_problem(params, kTile),
                                                  maps);
}

template <DType dtype, int kTile>
void launch(const BackwardParams& params, const Plan&, const dlattn::Launch& launch, void* stream) {
  if (params.forward.softcap != 0.0) {
    launch_with<dtype, kTile, true>(params, launch, stream);
  } else {
    launch_with<dtype, kTile, false>(params, launch, stream);
  }
}

}  // namespace dlattn::backward_sm90
