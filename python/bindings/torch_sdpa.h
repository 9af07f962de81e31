#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

namespace nb = nanobind;

// Puts native kernels in the place of torch's own: of the operators of attention in `schemas`, by
// name, for a key ("CPU" or "CUDA") of the dispatcher of the libtorch that is loaded from `folder`.
// Each serves a call by dlattn where it can. Else the CPU's hand it on to torch's kernel, which
// nobody else may have replaced, and those of CUDA to the operator of the same name in `dlattn`,
// whose kernel in Python raises exceptions of any class. They are for as long as the process runs:
// other threads may be in them. Returns why it cannot be done; empty if it is.
//
// count_refused(name, reason) is called for each call that the CPU's were to serve and did not.
nb::str register_torch_sdpa(nb::handle folder, nb::handle key, const nb::dict& schemas,
                            nb::handle count_refused);
// Lets raise.__float__() raise what a kernel in Python raised last on this thread: CUDA's kernels
// need it. Gives dlattn::_raise(Tensor x) -> Tensor a kernel for the CPU, which fails so. Returns
// why it cannot be done.
nb::str register_torch_raise(nb::handle folder, nb::handle raise);
// Takes them out of the dispatcher again, which no other thread may be calling.
void unregister_torch_sdpa();

// Whether they serve calls, and which backward ones: "auto", "dlattn" or "torch".
void serve_torch_sdpa(bool serving, nb::handle gradients);
// How many calls they served, by operator. `reset`: begin to count anew.
nb::dict torch_sdpa_served(bool reset);
// is_as_fast() of torch_sdpa_choice.h; torchs: one of kTorchKernels.
bool torch_gradients_are_as_fast(nb::handle torchs, nb::handle kernel, bool has_bias,
                                 bool wants_dbias, bool deterministic, std::int64_t seqlen_q,
                                 std::int64_t head_dim);

}  // namespace dlattn::python
