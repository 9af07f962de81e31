#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "core/operations/operation.h"
#include "core/util/concat.h"

// The record of a family of kernels for GPUs. It knows no more of any of them: the list is made
// from src/cuda/instances.cmake, and each family's record stands beside its kernels.
namespace dlattn::core {

// A family of an operation, which takes `Params`.
template <typename Params>
struct Family {
  const char* name;
  int capability;     // the one compute capability it is for, times ten; 0: any
  int head_dim_step;  // all head dims are multiples of it, but in another precision than kInputs
  // The tile shapes that Options::variant may name, for messages; null: there is one shape.
  std::string (*accepted_variants)();
  // Whether the family can run a valid problem as `options` ask, on a GPU that the build has
  // kernels for, of a dtype and head dims that it has an instance of. If so, `plan`, whose
  // operation, kernel, dtype, head_dim_tile and copy_bytes are set, is how, with predicted_ns; if
  // not, `why` says why not, without the family's name, unless it is null. Of several variants it
  // is the one that is predicted to be the fastest. Core compares the times of families. A family
  // may list launches of other operations after its own (Plan::after).
  bool (*plan)(const Params& params, const DeviceInfo& device, const Options& options, Plan* plan,
               std::string* why);
  bool reads_caches = false;  // whether it takes keys in a cache (is_cache())
  // The Options::variant that asks for all that was chosen in a plan; null: there is one shape.
  std::string (*request_of)(const Plan& plan) = nullptr;
  // Why the family is no choice for a problem with Options::batch_invariant, "" if it may be one.
  // null: it always may. It is none where the same sequence may come in a form that the family does
  // not take, as in a varlen batch: there it would get another kernel's bits. A caller who names
  // the family gets it all the same.
  std::string (*varies_with_batch)(const Params& params) = nullptr;
};
using ForwardFamily = Family<AttentionParams>;
using BackwardFamily = Family<BackwardParams>;

// For what returns whether it accepts: false, and why, if anybody asks.
template <typename... Parts>
bool refuse(std::string* why, const Parts&... parts) {
  if (why) *why = concat(parts...);
  return false;
}

struct Instance {
  DType dtype;
  int head_dim_tile;  // 0: any head dims
};

template <typename Params>
struct ListedFamily {
  const Family<Params>* record;
  std::vector<Instance> instances;  // tiles ascending within a dtype

  // The first instance of `dtype` that holds `head_dim`; null if none does.
  const Instance* instance(DType dtype, std::int64_t head_dim) const;
};

// Those of the operation that takes Params, in the order of instances.cmake.
template <typename Params>
const std::vector<ListedFamily<Params>>& families();

}  // namespace dlattn::core
