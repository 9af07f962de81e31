#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <vector>

#include "attention_test.h"

// Cases that the tests of families of 8-bit inputs share.
namespace simt {

// Without what is not defined for 8-bit inputs.
inline Case without_score_features(Case c) {
  c.bias = Bias::kNone;
  c.mask = c.alibi = false;
  c.bias_rise = 0.0;
  if (c.seed) c.descales = *c.seed % 2 == 0, c.q_descale_by_kv_head = *c.seed % 4 == 0;
  return c;
}

// Runs each case with out of another dtype.
template <typename Tests, typename Family, typename Run>
void run_float8(Tests* tests, const std::vector<Case>& cases, const Family& family, Run run) {
  using Element = __nv_fp8_e4m3;
  int number = 0;
  for (const Case& drawn : cases) {
    const Case c = without_score_features(drawn);
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
