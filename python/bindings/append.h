#pragma once

#include <nanobind/nanobind.h>

// dlattn.append_kv: new keys and values, written into a cache.
namespace dlattn::python {

namespace nb = nanobind;

void register_append_kv(nb::module_& module);

}  // namespace dlattn::python
