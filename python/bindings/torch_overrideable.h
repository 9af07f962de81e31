#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

namespace nb = nanobind;

// Gives torch's operator of attention for other backends than its own, and that of its gradients,
// kernels for a key ("CPU" or "CUDA") of the dispatcher of the libtorch that is loaded from
// `folder`. Torch has their derivative in C++, so a call of dlattn's that goes by them needs no
// Python on its way back. `schemas` has both, by name. They are for as long as the process runs.
// Returns why it cannot be done; empty if it is.
nb::str register_torch_overrideable(nb::handle folder, nb::handle key, const nb::dict& schemas);

}  // namespace dlattn::python
