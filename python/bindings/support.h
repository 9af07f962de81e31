#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

// Adds `_core.refusal(kernel, dtype, head_dim, feature, compute_capability)`, from which the table
// of what is supported is generated: why the kernel would refuse such a problem on a made-up
// device, "" if it would not. Adds the names that it takes too: `_core.kernel_names` and
// `_core.feature_names`.
void register_support(nanobind::module_& module);

}  // namespace dlattn::python
