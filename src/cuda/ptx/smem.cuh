#pragma once

#include <cstdint>

namespace dlattn::ptx {

// The thread block's dynamic shared memory, aligned to 1024 bytes.
__device__ __forceinline__ unsigned char* dynamic_smem() {
  extern __shared__ __align__(1024) unsigned char dlattn_dynamic_smem[];
  return dlattn_dynamic_smem;
}

// Where something stands in shared memory, as instructions take it: 32 bits to calculate with.
using SmemAddress = std::uint32_t;

// PTX ISA, "State Spaces: shared".
__device__ __forceinline__ SmemAddress smem_address(const void* smem) {
  return static_cast<SmemAddress>(__cvta_generic_to_shared(smem));
}

}  // namespace dlattn::ptx
