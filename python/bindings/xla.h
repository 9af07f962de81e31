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

}  // namespace dlattn::python
