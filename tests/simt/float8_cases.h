#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <vector>

#include "attention_test.h"

// Cases that the tests of families of 8-bit inputs share.
namespace simt {

// Without what is not defined for 8-bit inputs, whose bias is none of their dtype.
inline Case as_float8(Case c) {
  if (c.bias == Bias::kOwnDType) c.bias = Bias::kFloat32;
  c.alibi = false;
  if (c.seed) c.descales = *c.seed % 2 == 0, c.q_descale_by_kv_head = *c.seed % 4 == 0;
  return c;
}

// Runs each case with out of another dtype.
template <typename Tests, typename Family, typename Run>
void run_float8(Tests* tests, const std::vector<Case>& cases, const Family& family, Run run) {
  using Element = __nv_fp8_e4m3;
  int number = 0;
  for (const Case& drawn : cases) {
    const Case c = as_float8(drawn);
    switch (number++ % 3) {
      case 0:
        tests->template run<Element, __nv_bfloat16>(family, c, run);
        break;
      case 1:
        tests->template run<Element, half>(family, c, run);
        break;
      default:
        tests->template run<Element, float>(family, c, run);
    }
  }
}

}  // namespace simt
