#include "cuda/tensor_map.h"

#include <cuda.h>

#include <atomic>
#include <cstring>
#include <string>

#include "cuda/driver.h"

namespace dlattn::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode encode_function() {
  static std::atomic<Encode> known{nullptr};
  Encode function = known.load(std::memory_order_acquire);
  if (!function) {
    function = reinterpret_cast<Encode>(driver_function("cuTensorMapEncodeTiled", 12000));
    known.store(function, std::memory_order_release);
  }
  return function;
}

CUtensorMapDataType data_type(const TensorBox& box, DType dtype) {
  if (box.element_bytes == 1) return CU_TENSOR_MAP_DATA_TYPE_UINT8;
  if (box.element_bytes == 4) return CU_TENSOR_MAP_DATA_TYPE_FLOAT32;
  return dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                  : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
}

}  // namespace

ptx::TensorMap encode_tensor_map(const DeviceGuard& device, const TensorBox& box, DType dtype) {
  if (!box.data) return {};
  const Encode encode = encode_function();
  constexpr int kMaxRank = 5;
  CUtensorMap map;
  cuuint64_t sizes[kMaxRank], strides[kMaxRank - 1];
  for (int i = 0; i < box.rank; ++i) sizes[i] = static_cast<cuuint64_t>(box.sizes[i]);
  for (int i = 1; i < box.rank; ++i) strides[i - 1] = static_cast<cuuint64_t>(box.strides[i]);
  const cuuint32_t box_sizes[kMaxRank] = {static_cast<cuuint32_t>(box.box_columns),
                                          static_cast<cuuint32_t>(box.box_rows),
                                          static_cast<cuuint32_t>(box.box_depth), 1, 1};
  const CUtensorMapSwizzle swizzle = box.box_columns * box.element_bytes == kBoxRowBytes
                                         ? CU_TENSOR_MAP_SWIZZLE_128B
                                         : CU_TENSOR_MAP_SWIZZLE_64B;
  const cuuint32_t steps[kMaxRank] = {1, 1, 1, 1, 1};
  const CUresult result = encode(
      &map, data_type(box, dtype), static_cast<cuuint32_t>(box.rank), const_cast<void*>(box.data),
      sizes, strides, box_sizes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
      box.l2_bytes == 256 ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw DeviceError(std::string(device.kernel_name()) + ": cuTensorMapEncodeTiled of " +
                      box.name + " failed: error " + std::to_string(result));
  }
  ptx::TensorMap encoded;
  static_assert(sizeof encoded == sizeof map && alignof(ptx::TensorMap) >= alignof(CUtensorMap),
                "TensorMap is the driver's CUtensorMap");
  std::memcpy(&encoded, &map, sizeof map);
  return encoded;
}

}  // namespace dlattn::cuda
