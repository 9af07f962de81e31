#include "core/registry.h"

namespace dlattn::core {
namespace {

struct Instance {
  Kernel kernel;
  DType dtype;
  int head_dim_tile;
};

// Generated from instances.cmake, tiles ascending within a kernel and dtype.
constexpr Instance kInstances[] = {
#define DLATTN_INSTANCE(kernel, dtype, tile) {Kernel::kernel, DType::dtype, tile},
#include "instances.inc"
#undef DLATTN_INSTANCE
};

}  // namespace

int head_dim_tile(Kernel kernel, DType dtype, std::int64_t head_dim) {
  for (const Instance& instance : kInstances) {
    if (instance.kernel == kernel && instance.dtype == dtype &&
        head_dim <= instance.head_dim_tile) {
      return instance.head_dim_tile;
    }
  }
  return 0;
}

}  // namespace dlattn::core
