#pragma once

#include "cache.h"
#include "problem.h"

// q, k and v of a problem: dtypes, sizes and strides, checked against each other, and the sizes of
// the results.
namespace dlattn::python {

// Takes them in.
void read_qkv(const AttentionCall& call, const Target& target, Problem* problem);
void read_qkv(const Tensor& q, const Tensor& k, const Tensor& v, bool varlen, Keys keys,
              Problem* problem);

}  // namespace dlattn::python
