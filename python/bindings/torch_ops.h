#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

namespace nb = nanobind;

// Registers the kernels of torch.ops.dlattn for a backend, "CPU" or "CUDA", with the libtorch that
// is loaded from `folder`. `schemas` are the operators' arguments, by operator: a tuple of texts
// each, as in "Optional[Tensor] bias". Returns why it cannot be done; empty if it is.
nb::str register_torch_ops(nb::handle folder, nb::handle backend, const nb::dict& schemas);
// Takes them out of the dispatcher again. For tests.
void unregister_torch_ops();

}  // namespace dlattn::python
