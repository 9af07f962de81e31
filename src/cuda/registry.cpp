// From a kernel's key to its launcher; the table is generated from instances.cmake.
#include "core/backend.h"

namespace dlattn {

#define DLATTN_FAMILY(family)                                     \
  namespace family {                                              \
  template <DType, int>                                           \
  void launch(const AttentionParams&, const Plan&, void* stream); \
  }
DLATTN_FAMILY(scalar)
DLATTN_FAMILY(wmma_qk)
DLATTN_FAMILY(wmma_smem)
DLATTN_FAMILY(wmma)
DLATTN_FAMILY(sm90)
#undef DLATTN_FAMILY

namespace cuda {
namespace {

template <Kernel kernel, DType dtype, int tile>
constexpr Launcher launcher() {
  if constexpr (kernel == Kernel::kWmmaQk) {
    return wmma_qk::launch<dtype, tile>;
  } else if constexpr (kernel == Kernel::kWmmaSmem) {
    return wmma_smem::launch<dtype, tile>;
  } else if constexpr (kernel == Kernel::kWmma) {
    return wmma::launch<dtype, tile>;
  } else if constexpr (kernel == Kernel::kSm90) {
#ifdef DLATTN_SM90
    return sm90::launch<dtype, tile>;
#else
    return nullptr;  // refused by the plan
#endif
  } else {
    return scalar::launch<dtype, tile>;
  }
}

struct Entry {
  Kernel kernel;
  DType dtype;
  int head_dim_tile;
  Launcher launch;
};

constexpr Entry kEntries[] = {
#define DLATTN_INSTANCE(kernel, dtype, tile) \
  {Kernel::kernel, DType::dtype, tile, launcher<Kernel::kernel, DType::dtype, tile>()},
#include "instances.inc"
#undef DLATTN_INSTANCE
};

}  // namespace

Launcher find_launcher(Kernel kernel, DType dtype, int head_dim_tile) {
  for (const Entry& entry : kEntries) {
    if (entry.kernel == kernel && entry.dtype == dtype && entry.head_dim_tile == head_dim_tile)
      return entry.launch;
  }
  return nullptr;
}

}  // namespace cuda
}  // namespace dlattn
