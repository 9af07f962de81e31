#pragma once

#include <nanobind/nanobind.h>

// Registers dlattn._core.HostBuffer: new CPU memory, aligned as JAX wants it, that exports itself
// by DLPack.
namespace dlattn::python {

void register_host_buffer(nanobind::module_& module);

}  // namespace dlattn::python
