// From an instance to its launcher; the table is generated from instances.cmake.
#include <type_traits>

#include "core/backend.h"
#include "core/operation.h"

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
namespace {

// The launcher of one operation; the others are null.
struct AnyLauncher {
  Launcher<AttentionParams> forward = nullptr;
  Launcher<MergeParams> merge = nullptr;
  Launcher<QuantizeTask> quantize = nullptr;
  Launcher<AppendParams> append = nullptr;
  Launcher<CombineTask> combine = nullptr;

  constexpr AnyLauncher(Launcher<AttentionParams> launch) : forward(launch) {}
  constexpr AnyLauncher(Launcher<MergeParams> launch) : merge(launch) {}
  constexpr AnyLauncher(Launcher<QuantizeTask> launch) : quantize(launch) {}
  constexpr AnyLauncher(Launcher<AppendParams> launch) : append(launch) {}
  constexpr AnyLauncher(Launcher<CombineTask> launch) : combine(launch) {}

  template <typename Params>
  Launcher<Params> of() const {
    if constexpr (std::is_same_v<Params, AttentionParams>) return forward;
    if constexpr (std::is_same_v<Params, MergeParams>) return merge;
    if constexpr (std::is_same_v<Params, QuantizeTask>) return quantize;
    if constexpr (std::is_same_v<Params, AppendParams>) return append;
    if constexpr (std::is_same_v<Params, CombineTask>) return combine;
  }
};

struct Entry {
  std::string_view family;
  DType dtype;
  int head_dim_tile;
  AnyLauncher launcher;
};

constexpr Entry kEntries[] = {
#define DLATTN_INSTANCE(operation, family, space, dtype, tile) \
  {#family, DType::dtype, tile, space::launch<DType::dtype, tile>},
#include "compiled.inc"
#undef DLATTN_INSTANCE
};

}  // namespace

template <typename Params>
Launcher<Params> find_launcher(std::string_view family, DType dtype, int head_dim_tile) {
  for (const Entry& entry : kEntries) {
    if (entry.head_dim_tile != head_dim_tile || entry.dtype != dtype || entry.family != family)
      continue;
    if (const Launcher<Params> launcher = entry.launcher.of<Params>()) return launcher;
  }
  return nullptr;
}
template Launcher<AttentionParams> find_launcher(std::string_view, DType, int);
template Launcher<MergeParams> find_launcher(std::string_view, DType, int);
template Launcher<QuantizeTask> find_launcher(std::string_view, DType, int);
template Launcher<AppendParams> find_launcher(std::string_view, DType, int);
template Launcher<CombineTask> find_launcher(std::string_view, DType, int);

}  // namespace dlattn::cuda
