#pragma once

#include <nanobind/nanobind.h>

#include "problem.h"

// Attention as XLA calls it from compiled programs, for dlattn.jax.
namespace dlattn::python {

// XLA's handlers by the name of their platform, in capsules.
nb::dict xla_handlers();

// Describes the call of a handler. The call's tensors are pairs (dtype, shape). Returns
// (attributes, (dtype, shape) of out, shape of lse, bytes of workspace), and throws what the call
// would throw for these shapes on every device there is.
nb::object xla_call(const AttentionCall& call);

// The same of the gradients of a call of attention, or with cu_seqlens_q of attention_varlen, whose
// arguments `options` has by their names. `results` has out, lse, and dout, dlse or both; `needs`
// the names of the gradients to compute, in their order, in one text. Returns (attributes, (dtype,
// shape) of each gradient, bytes of workspace), and throws if the first GPU, or without one the
// CPU, would.
nb::dict xla_backward_handlers();
nb::object xla_call_backward(const nb::dict& options, const nb::dict& results, nb::handle needs,
                             bool deterministic);

}  // namespace dlattn::python
