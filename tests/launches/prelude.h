#pragma once

// Included before everything else: the launchers' source as host C++. Kernels' pieces are parsed,
// and no instruction of theirs is compiled.
#include "../simt/model/mma.h"
#include "../simt/prelude.h"

// Members of cudaLaunchConfig_t have these names too.
#undef gridDim
#undef blockDim
inline const dim3 gridDim, blockDim;

std::size_t __cvta_generic_to_shared(const void* address);
