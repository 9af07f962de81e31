#pragma once

#include <cstdint>
#include <string>

#include "core/operations/operations.h"
#include "core/operations/tasks.h"
#include "core/problem/alignment.h"
#include "core/problem/quantized.h"
#include "dlattn/attention.h"

// The parameters of each operation, and the questions by which plan/choose.h finds a family's
// instance for them: dtype_of(), head_dims_of(), copy_bytes() and positions_fit(). Templates answer
// for the operations that have no answer of their own. Those of forward, backward and quantize,
// which plan each other's launches, are here, others beside the operation's table (merge.h), in
// namespace dlattn, where templates find them by their argument.
namespace dlattn::core {

template <Operation operation>
struct ParamsOfOperation;
template <Operation operation>
using ParamsOf = typename ParamsOfOperation<operation>::Type;

#define DLATTN_PARAMS(enumerator, name, Params)     \
  template <>                                       \
  struct ParamsOfOperation<Operation::enumerator> { \
    using Type = Params;                            \
  };                                                \
  inline Operation operation_of(const Params&) {    \
    return Operation::enumerator;                   \
  }
DLATTN_OPERATIONS(DLATTN_PARAMS)
#undef DLATTN_PARAMS

// The dtype of the factors of q.k in a precision other than kInputs.
inline DType dtype_of(Precision precision) {
  return multiplies_integers(precision) ? DType::kInt8 : DType::kFloat8E4M3;
}

// The dtype and the head dims by which a problem finds its instance of a family.
inline DType dtype_of(const AttentionParams& p) {
  if (is_8_bit_cache(p)) return p.k.dtype;
  return p.precision == Precision::kInputs ? p.q.dtype : dtype_of(p.precision);
}
inline DType dtype_of(const BackwardParams& p) {
  return p.forward.q.dtype;
}
inline DType dtype_of(const QuantizeTask& p) {
  return dtype_of(p.precision);
}

struct NamedSize {
  const char* name;
  std::int64_t value;
};
struct HeadDims {
  NamedSize first, second;
};
template <typename Params>
HeadDims head_dims_of(const Params& p) {
  return {{"head_dim", p.head_dim}, {"head_dim of v", p.head_dim_v}};
}
inline HeadDims head_dims_of(const BackwardParams& p) {
  return head_dims_of(p.forward);
}

// Bytes per copy of rows to shared memory; 0 where kernels copy none.
template <typename Params>
int copy_bytes(const Params&) {
  return 0;
}
inline int copy_bytes(const BackwardParams& p) {
  return copy_bytes(p.forward);
}

// Whether kernels can count a problem's positions; if not, `why`, unless it is null, says why not.
template <typename Params>
bool positions_fit(const Params&, std::string*) {
  return true;
}
bool positions_fit(const AttentionParams& p, std::string* why);
inline bool positions_fit(const BackwardParams& p, std::string* why) {
  return positions_fit(p.forward, why);
}
bool positions_fit(const QuantizeTask& p, std::string* why);

}  // namespace dlattn::core
