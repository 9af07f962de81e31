#pragma once

namespace dlattn::ptx {

// The thread block's dynamic shared memory, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char dlattn_dynamic_smem[];
  return dlattn_dynamic_smem;
}

}  // namespace dlattn::ptx
