#pragma once

#include <Python.h>

namespace dlattn::python {

// Names of attributes that are looked up on every call: made once, as Python's caches want them.
struct Names {
  PyObject* array_struct;
  PyObject* empty;
  PyObject* is_conj;
  PyObject* requires_grad;
};
extern Names names;

void register_names();

}  // namespace dlattn::python
