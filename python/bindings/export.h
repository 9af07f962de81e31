#pragma once

#include <memory>

#include "tensor.h"

// Memory on its way out through DLPack. Whoever takes a capsule may let go of it in any thread,
// with the GIL or without.
namespace dlattn::python {

// A capsule of a tensor's memory, which `memory` keeps alive.
nb::object make_capsule(const Tensor& tensor, std::shared_ptr<void> memory, bool versioned);

// A capsule of the memory of another one, which is used up. That one is let go of with the GIL
// held, soon after the new one: exporters need not be ready for other threads, and JAX is not.
nb::object relay(const nb::object& capsule);

}  // namespace dlattn::python
