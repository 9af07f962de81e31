#include "core/family.h"

#include <atomic>

#include "core/plan.h"
#include "core/published.h"

// Generated from instances.cmake: DLATTN_FAMILY(operation, family) and
// DLATTN_INSTANCE(operation, family, dtype, head_dim_tile).
#define DLATTN_FAMILY(operation, family)    \
  namespace dlattn::family {                \
  extern const core::ForwardFamily kFamily; \
  }
#include "families.inc"
#undef DLATTN_FAMILY

namespace dlattn::core {

int ListedFamily::head_dim_tile(DType dtype, std::int64_t head_dim) const {
  for (const Instance& instance : instances) {
    if (instance.dtype == dtype && head_dim <= instance.head_dim_tile)
      return instance.head_dim_tile;
  }
  return 0;
}

const std::vector<ListedFamily>& forward_families() {
  static std::atomic<const std::vector<ListedFamily>*> families{nullptr};
  return published(families, [] {
    std::vector<ListedFamily> list = {
#define DLATTN_FAMILY(operation, family) {&dlattn::family::kFamily, {}},
#include "families.inc"
#undef DLATTN_FAMILY
    };
    const struct {
      std::string_view family;
      Instance instance;
    } instances[] = {
#define DLATTN_INSTANCE(operation, family, dtype, tile) {#family, {DType::dtype, tile}},
#include "instances.inc"
#undef DLATTN_INSTANCE
    };
    for (const auto& x : instances) {
      for (ListedFamily& listed : list) {
        if (x.family == listed.record->name) listed.instances.push_back(x.instance);
      }
    }
    return list;
  });
}

}  // namespace dlattn::core

namespace dlattn {

const std::vector<std::string_view>& kernel_names() {
  static std::atomic<const std::vector<std::string_view>*> names{nullptr};
  return core::published(names, [] {
    std::vector<std::string_view> all = {core::kAuto, core::kCpu};
    for (const core::ListedFamily& family : core::forward_families())
      all.push_back(family.record->name);
    return all;
  });
}

}  // namespace dlattn
