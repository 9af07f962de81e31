// From an instance to its launcher; the list is generated from instances.cmake.
#include <type_traits>

#include "core/backend.h"
#include "core/operations/operation.h"

// Declared once for each instance, which does no harm.
#define DLATTN_INSTANCE(operation, family, space, dtype, tile)                         \
  namespace space {                                                                    \
  template <DType, int>                                                                \
  void launch(const core::ParamsOf<Operation::operation>&, const Plan&, const Launch&, \
              void* stream);                                                           \
  }
namespace dlattn {
#include "compiled.inc"
}
#undef DLATTN_INSTANCE

namespace dlattn::cuda {

template <typename Params>
Launcher<Params> find_launcher(std::string_view family, DType dtype, int head_dim_tile) {
#define DLATTN_INSTANCE(operation, name, space, type, tile)                     \
  if constexpr (std::is_same_v<core::ParamsOf<Operation::operation>, Params>) { \
    if (head_dim_tile == tile && dtype == DType::type && family == #name)       \
      return space::launch<DType::type, tile>;                                  \
  }
#include "compiled.inc"
#undef DLATTN_INSTANCE
  return nullptr;
}

#define DLATTN_FIND(enumerator, name, Params) \
  template Launcher<Params> find_launcher(std::string_view, DType, int);
DLATTN_OPERATIONS(DLATTN_FIND)
#undef DLATTN_FIND

}  // namespace dlattn::cuda
