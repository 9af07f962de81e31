// Checks backward()'s parameters before anything is launched.
#include "core/operations/backward.h"
#include "core/operations/tensors.h"
#include "core/plan/plan.h"
#include "core/problem/tensor_sizes.h"
#include "core/validate/call_memory.h"
#include "core/validate/checks.h"
#include "core/validate/fail.h"
#include "core/validate/validate.h"

namespace dlattn::core {
namespace {

// The tensors of forward() that the table of gradients lacks, as bits in the order of forward()'s.
constexpr std::uint64_t kWithoutGradients = [] {
  const Operands all(kForwardOperands);
  std::uint64_t bits = 0;
  for (const Operand* operand = all.tensors; operand < all.end; ++operand) {
    if (!find(kBackwardOperands, operand->name)) bits |= 1ull << (operand - all.tensors);
  }
  return bits;
}();

// Refuses arguments of forward() that have no gradients.
void check_forward(const AttentionParams& p) {
  check_enum("precision", p.precision, Precision::kInt8Fp16,
             "Precision::kInputs, kInt8Fp8, kFp8, kInt8Fp16");
  if (p.precision != Precision::kInputs) {
    fail("precision is ", to_string(p.precision),
         "; accepted: inputs, as gradients are those of products of q, k and v as they are");
  }
  if (is_cache(p)) {
    fail(cache_feature(p), " is given; accepted: none, as keys in a cache have no gradients");
  }
  const Operand* const tensors = Operands(kForwardOperands).tensors;
  for (std::uint64_t bits = kWithoutGradients, i = 0; bits >> i; ++i) {
    if ((bits >> i & 1) && load<const void*>(&p, tensors[i].offset)) {
      fail(tensors[i].name, " is given; accepted: none, as it has no gradients");
    }
  }
  check_known_dtype("q", p.q.dtype);
  if (size_of(p.q.dtype) == 1) {
    fail("q: dtype is ", to_string(p.q.dtype),
         "; accepted: float16, bfloat16, float32, float64, as 8-bit elements have no gradients");
  }
}

// Whether there are no queries or no keys.
bool has_empty_tensors(const AttentionParams& p) {
  const TensorSizes queries = query_sizes(p), keys = key_sizes(p);
  return queries.batch * queries.rows == 0 || keys.batch * keys.rows == 0;
}

struct Gradient {
  const char *name, *of;
  const void *data, *input;
  DType dtype, expected;  // equal where elements have one type
};

void check_gradients(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  constexpr DType kFixed = DType::kFloat32;
  const Gradient gradients[] = {
      {"dout", "out", b.dout.data, p.out.data, b.dout.dtype, p.out.dtype},
      {"dq", "q", b.dq.data, b.dq.data, b.dq.dtype, p.q.dtype},
      {"dk", "k", b.dk.data, b.dk.data, b.dk.dtype, p.k.dtype},
      {"dv", "v", b.dv.data, b.dv.data, b.dv.dtype, p.v.dtype},
      {"dbias", "bias", b.dbias.data, p.bias.data, b.dbias.dtype, p.bias.dtype},
      {"dalibi_slopes", "alibi_slopes", b.dalibi_slopes.data, p.alibi_slopes.data, kFixed, kFixed},
      {"dsinks", "sinks", b.dsinks.data, p.sinks.data, kFixed, kFixed},
  };
  for (const Gradient& gradient : gradients) {
    if (!gradient.data) continue;
    if (&gradient != gradients && !gradient.input) {
      fail(gradient.name, " is given and ", gradient.of, " is null; accepted: none");
    }
    check_known_dtype(gradient.name, gradient.dtype);
    if (gradient.dtype == gradient.expected) continue;
    fail(gradient.name, ": dtype is ", to_string(gradient.dtype),
         "; accepted: ", to_string(gradient.expected), ", that of ", gradient.of);
  }
  if (has_empty_tensors(p)) return;  // which may be null
  if (!b.dout.data && !b.dlse.data) fail("dout and dlse are null; accepted: at least one of them");
  for (const Gradient& gradient : gradients) {
    if (&gradient != gradients && gradient.data) return;
  }
  fail("dq, dk, dv, dbias, dalibi_slopes and dsinks are null; accepted: at least one of them");
}

}  // namespace

void validate(const BackwardParams& params) {
  check_forward(params.forward);
  check_numbers(params.forward);
  const Sizes sizes = sizes_of(params);
  check_tensors(params.forward, GivenTensors(operands_of(params), &params, sizes), sizes);
  check_gradients(params);
}

}  // namespace dlattn::core
