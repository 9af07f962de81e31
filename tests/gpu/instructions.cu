// The instructions' tests on a GPU of compute capability 9.0, or those of them whose name contains
// the argument. Prints 'N passed, N failed'; exit code 77 where there is no such GPU.
#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdlib>

#include "instructions_wgmma.h"

namespace {

template <typename Kernel>
__global__ void __launch_bounds__(Kernel::kThreads, 1)
    entry(const __grid_constant__ Kernel kernel) {
  kernel();
}

void require(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

struct Gpu {
  template <typename T>
  T* allocate(std::int64_t count) {
    void* memory = nullptr;
    require(cudaMallocManaged(&memory, count * sizeof(T)));
    return static_cast<T*>(memory);
  }

  template <typename Kernel>
  void launch(const Kernel& kernel) {
    require(cudaFuncSetAttribute(entry<Kernel>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 kernel.smem_bytes()));
    entry<Kernel><<<1, Kernel::kThreads, kernel.smem_bytes()>>>(kernel);
    require(cudaGetLastError());
    require(cudaDeviceSynchronize());
  }

  void encode(dlattn::ptx::TensorMap* map, const dlattn::test::TestTensor& t) {
    static const auto encode_tiled = [] {
      void* function = nullptr;
      cudaDriverEntryPointQueryResult found;
      require(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                               cudaEnableDefault, &found));
      return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
    }();
    CUtensorMap encoded;
    cuuint64_t sizes[5], strides[4];
    cuuint32_t box[5], steps[5] = {1, 1, 1, 1, 1};
    for (int i = 0; i < t.rank; ++i) {
      sizes[i] = static_cast<cuuint64_t>(t.sizes[i]);
      box[i] = static_cast<cuuint32_t>(t.box[i]);
      if (i > 0) strides[i - 1] = static_cast<cuuint64_t>(t.stride(i) * 2);
    }
    const CUtensorMapSwizzle swizzle = t.swizzle == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
                                       : t.swizzle == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                                       : t.swizzle == 32 ? CU_TENSOR_MAP_SWIZZLE_32B
                                                         : CU_TENSOR_MAP_SWIZZLE_NONE;
    const CUresult result =
        encode_tiled(&encoded, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, t.rank, t.data, sizes, strides, box,
                     steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                     CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS) {
      std::fprintf(stderr, "no tensor map: error %d\n", static_cast<int>(result));
      std::exit(1);
    }
    static_assert(sizeof encoded == sizeof *map, "a tensor map has 128 bytes");
    std::memcpy(map, &encoded, sizeof encoded);
  }
};

}  // namespace

int main(int argc, char** argv) {
  int devices = 0, major = 0;
  if (cudaGetDeviceCount(&devices) == cudaSuccess && devices > 0)
    cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0);
  if (major != 9) {
    std::printf("skipped: no GPU of compute capability 9.0\n");
    return 77;
  }
  Gpu gpu;
  return dlattn::test::test_instructions(gpu, argc > 1 ? argv[1] : "");
}
