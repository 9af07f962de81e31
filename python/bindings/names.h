#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

namespace nb = nanobind;

// Names of attributes that are looked up on every call: made once, as Python's caches want them.
struct Names {
  nb::handle array_struct;
  nb::handle empty;
  nb::handle is_conj;
  nb::handle requires_grad;
};
extern Names names;

void register_names();

}  // namespace dlattn::python
