#pragma once

#include "dlattn/types.h"

// The instances that src/cuda/instances.cmake lists, known to the plan in every build, with CUDA or
// without.
namespace dlattn::core {

// The smallest tile of an instance of `kernel` and `dtype` that holds `head_dim`, 0 if none does.
int head_dim_tile(Kernel kernel, DType dtype, std::int64_t head_dim);

}  // namespace dlattn::core
