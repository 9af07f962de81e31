#pragma once

#include <cstdint>

#include "core/util/inline.h"
#include "cuda/tile/divider.h"

// Heads that are walked together under causality, the longest walks of all of them first, so that a
// grid ends with the short ones: plain host code, shared by the launchers and by the tests that run
// kernels on the CPU.
namespace dlattn {

struct HeadGroups {
  Divider together;         // heads of a full group
  std::uint32_t in_groups;  // heads of all batch entries that are in full ones
  Divider left;             // those that are not: a group too, behind the others
};

// Groups of `together` of all `heads` of all batch entries; no heads are a group of one.
inline HeadGroups make_head_groups(std::int64_t heads, std::int64_t together) {
  const auto all = static_cast<std::uint32_t>(greater<std::int64_t>(heads, 1));
  const auto group =
      static_cast<std::uint32_t>(greater<std::int64_t>(lesser<std::int64_t>(together, all), 1));
  const std::uint32_t left = all % group;
  return {Divider(group), all - left, Divider(greater(left, 1u))};
}

}  // namespace dlattn
