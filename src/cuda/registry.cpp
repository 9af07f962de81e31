// From an instance to its launcher; the table is generated from instances.cmake.
#include "core/backend.h"

#define DLATTN_FAMILY(operation, family)                          \
  namespace dlattn::family {                                      \
  template <DType, int>                                           \
  void launch(const AttentionParams&, const Plan&, void* stream); \
  }
#include "families.inc"
#undef DLATTN_FAMILY

namespace dlattn::cuda {
namespace {

struct Entry {
  std::string_view family;
  DType dtype;
  int head_dim_tile;
  Launcher launch;
};

constexpr Entry kEntries[] = {
#define DLATTN_INSTANCE(operation, family, dtype, tile) \
  {#family, DType::dtype, tile, family::launch<DType::dtype, tile>},
#include "compiled.inc"
#undef DLATTN_INSTANCE
};

}  // namespace

Launcher find_launcher(std::string_view family, DType dtype, int head_dim_tile) {
  for (const Entry& entry : kEntries) {
    if (entry.head_dim_tile == head_dim_tile && entry.dtype == dtype && entry.family == family)
      return entry.launch;
  }
  return nullptr;
}

}  // namespace dlattn::cuda
