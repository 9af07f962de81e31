#include "core/backend.h"
#include "cuda/launch.cuh"
#include "cuda/merge/kernel.cuh"

namespace dlattn::cuda {
namespace {

constexpr std::int64_t kMaxBlocks = 1 << 20;  // each takes further rows where there are more

template <DType dtype>
void launch_merge(const MergeParams& params, void* stream) {
  const std::int64_t rows = params.batch_size * params.seqlen_q * params.num_heads;
  const std::int64_t blocks = (rows + merge::kNumWarps - 1) / merge::kNumWarps;
  launch_kernel<merge::kernel<Element<dtype>>>(DeviceGuard(params.device.index, "merge_states"),
                                               blocks < kMaxBlocks ? blocks : kMaxBlocks,
                                               merge::kNumThreads, 0, stream, params);
}

}  // namespace

void merge_states(const MergeParams& params, void* stream) {
  switch (params.out.dtype) {
    case DType::kFloat16:
      return launch_merge<DType::kFloat16>(params, stream);
    case DType::kBFloat16:
      return launch_merge<DType::kBFloat16>(params, stream);
    case DType::kFloat32:
      return launch_merge<DType::kFloat32>(params, stream);
    case DType::kFloat64:
      break;
  }
  throw UnsupportedError(
      "merge_states: dtype of outs is float64; accepted on a GPU: float16, bfloat16, float32");
}

}  // namespace dlattn::cuda
