#include "core/validate/overlap.h"

#include <initializer_list>

namespace dlattn::core {
namespace {

// Bytes, which saturate: what an exporter claims may reach beyond the address space.
using Bytes = std::uint64_t;
constexpr Bytes kMaxBytes = UINT64_MAX;

Bytes product(Bytes a, Bytes b) {
  Bytes result;
  return __builtin_mul_overflow(a, b, &result) ? kMaxBytes : result;
}

Bytes sum(Bytes a, Bytes b) {
  Bytes result;
  return __builtin_add_overflow(a, b, &result) ? kMaxBytes : result;
}

bool empty(const Region& region) {
  bool any = region.run > 0;
  for (const std::int64_t size : region.sizes) any = any && size > 0;
  return !any;
}

Bytes run_bytes(const Region& region) {
  return product(region.run, region.element_bytes);
}

Bytes stride_bytes(const Region& region, int dim) {
  return product(region.strides[dim], region.element_bytes);
}

// How many bytes lie from the first to the last, leaving out the dimensions that step by multiples
// of `period`, if there is one.
Bytes extent(const Region& region, Bytes period) {
  Bytes bytes = run_bytes(region);
  for (int dim = 0; dim < 4; ++dim) {
    if (region.sizes[dim] <= 1) continue;
    const Bytes stride = stride_bytes(region, dim);
    if (period && stride % period == 0) continue;
    bytes = sum(bytes, product(stride, region.sizes[dim] - 1));
  }
  return bytes;
}

// Modulo `period`, the addresses of each region lie in one interval. If the two intervals have
// nothing in common, neither have the regions. So it is with slices of one buffer: the period is
// the stride of a dimension that both have whole.
bool disjoint_modulo(Bytes period, const Region& a, const Region& b, Bytes distance) {
  const Bytes from_a_to_b = distance % period;
  return extent(a, period) <= from_a_to_b && extent(b, period) <= period - from_a_to_b;
}

}  // namespace

bool disjoint(const Region& a, const Region& b) {
  const Bytes start_a = reinterpret_cast<std::uintptr_t>(a.data);
  const Bytes start_b = reinterpret_cast<std::uintptr_t>(b.data);
  if (start_a > start_b) return disjoint(b, a);
  const Bytes distance = start_b - start_a;
  if (extent(a, 0) <= distance || empty(a) || empty(b)) return true;
  for (const Region* region : {&a, &b}) {
    for (int dim = 0; dim < 4; ++dim) {
      const Bytes period = region->sizes[dim] > 1 ? stride_bytes(*region, dim) : 0;
      if (period && period != kMaxBytes && disjoint_modulo(period, a, b, distance)) return true;
    }
  }
  return false;
}

}  // namespace dlattn::core
