#pragma once

#include <vector>

#include "dlattn/merge.h"
#include "options.h"
#include "problem.h"

namespace dlattn::python {

// A merge of tensors that have come in, checked against each other, and the shapes of its results.
struct Merge {
  MergeParams params;
  Layout layout;
  Shape out;
  Shape lse;
};

// Neither needs the GIL.
Merge read_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses, Layout layout,
                 Device device);
void set_results(const Tensor& out, const Tensor& lse, Merge* merge);

}  // namespace dlattn::python
