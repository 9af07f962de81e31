#include "core/operations/merge.h"
#include "core/operations/tensors.h"
#include "core/validate/call_memory.h"
#include "core/validate/checks.h"
#include "core/validate/fail.h"

namespace dlattn::core {

void validate(const MergeParams& p) {
  if (p.num_states < 1 || p.num_states > kMaxMergeStates) {
    fail("outs holds ", p.num_states, " parts; accepted: 1 to ", kMaxMergeStates);
  }
  check_device_type(p.device.type);
  check_known_dtype("out", p.out.dtype);
  const Operands table = operands_of(p);
  check_sizes(table, &p);
  const Sizes sizes = sizes_of(p);
  if (p.out.dtype == DType::kFloat8E4M3 || p.out.dtype == DType::kInt8) {
    fail("out: dtype is ", to_string(p.out.dtype),
         "; accepted: float16, bfloat16, float32, float64");
  }
  if (p.batch_size * p.seqlen_q == 0) return;
  const GivenTensors tensors(table, &p, sizes);
  check_elements(tensors);
  check_given(tensors);
  for (int n = 0; n < p.num_states; ++n) check_dtype("outs", p.outs[n].dtype, "out", p.out.dtype);
  check_layouts(tensors);
  check_own_memory(tensors);
}

}  // namespace dlattn::core
