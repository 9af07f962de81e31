#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

namespace nb = nanobind;

// Puts native kernels in the place of torch's own: of the operators of attention in `schemas`, by
// name, for a backend ("CPU" or "CUDA") of the libtorch that is loaded from `folder`. Each serves a
// call by dlattn where it can, and else hands it on to torch's kernel, which nobody else may have
// replaced. They are for as long as the process runs: other threads may be in them. Returns why it
// cannot be done; empty if it is.
//
// count_refused(name, reason) is called for each call that dlattn was to serve and did not.
nb::str register_torch_sdpa(nb::handle folder, nb::handle backend, const nb::dict& schemas,
                            nb::handle count_refused);
// Takes them out of the dispatcher again. For tests.
void unregister_torch_sdpa();

// Whether they serve calls, and which backward ones: "auto", "dlattn" or "torch".
void serve_torch_sdpa(bool serving, nb::handle gradients);
// How many calls they served, by operator. `reset`: begin to count anew.
nb::dict torch_sdpa_served(bool reset);

}  // namespace dlattn::python
