#include "core/plan/family.h"

#include <atomic>
#include <type_traits>

#include "core/plan/plan.h"
#include "core/util/published.h"

// Generated from instances.cmake: DLATTN_FAMILY(operation, family, namespace) and
// DLATTN_INSTANCE(operation, family, namespace, dtype, head_dim_tile).
#define DLATTN_FAMILY(operation, family, space)                            \
  namespace space {                                                        \
  extern const core::Family<core::ParamsOf<Operation::operation>> kFamily; \
  }
namespace dlattn {
#include "families.inc"
}
#undef DLATTN_FAMILY

namespace dlattn::core {

template <typename Params>
const Instance* ListedFamily<Params>::instance(DType dtype, std::int64_t head_dim) const {
  for (const Instance& instance : instances) {
    const bool holds = instance.head_dim_tile == 0 || head_dim <= instance.head_dim_tile;
    if (instance.dtype == dtype && holds) return &instance;
  }
  return nullptr;
}

namespace {

template <typename Params>
struct FamilyList {
  std::vector<ListedFamily<Params>> list;

  template <typename Other>
  void add(const Family<Other>& record) {
    if constexpr (std::is_same_v<Other, Params>) list.push_back({&record, {}});
  }
  template <Operation operation>
  void add(std::string_view family, Instance instance) {
    if constexpr (std::is_same_v<ParamsOf<operation>, Params>) {
      for (ListedFamily<Params>& listed : list) {
        if (family == listed.record->name) listed.instances.push_back(instance);
      }
    }
  }
};

template <typename Params>
std::vector<ListedFamily<Params>> listed_families() {
  FamilyList<Params> families;
#define DLATTN_FAMILY(operation, family, space) families.add(dlattn::space::kFamily);
#include "families.inc"
#undef DLATTN_FAMILY
#define DLATTN_INSTANCE(operation, family, space, dtype, tile) \
  families.template add<Operation::operation>(#family, {DType::dtype, tile});
#include "instances.inc"
#undef DLATTN_INSTANCE
  return std::move(families.list);
}

template <typename Params>
std::atomic<const std::vector<ListedFamily<Params>>*> published_families{nullptr};

}  // namespace

template <typename Params>
const std::vector<ListedFamily<Params>>& families() {
  return published(published_families<Params>, listed_families<Params>);
}

#define DLATTN_FAMILIES(enumerator, name, Params) \
  template struct ListedFamily<Params>;           \
  template const std::vector<ListedFamily<Params>>& families();
DLATTN_OPERATIONS(DLATTN_FAMILIES)
#undef DLATTN_FAMILIES

}  // namespace dlattn::core

namespace dlattn {

namespace {

template <typename Params>
const std::vector<std::string_view>& names_of_families() {
  static std::atomic<const std::vector<std::string_view>*> names{nullptr};
  return core::published(names, [] {
    std::vector<std::string_view> all = {core::kAuto, core::kCpu};
    for (const auto& family : core::families<Params>()) all.push_back(family.record->name);
    return all;
  });
}

}  // namespace

const std::vector<std::string_view>& kernel_names() {
  return names_of_families<AttentionParams>();
}
const std::vector<std::string_view>& backward_kernel_names() {
  return names_of_families<BackwardParams>();
}

}  // namespace dlattn
