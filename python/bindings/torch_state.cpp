#include "torch_state.h"

#include "gil.h"

namespace dlattn::python {
namespace {

// A module's variable, or null.
PyObject* variable(const nb::object& dict, const nb::object& name) {
  return PyDict_GetItemWithError(dict.ptr(), name.ptr());
}

}  // namespace

TorchState::TorchState(nb::handle adapter)
    : adapter_(nb::borrow(adapter)),
      current_level_(interned("_current_level")),
      is_in_mode_(interned("_is_in_torch_dispatch_mode")) {
  const nb::object watched = call_method(adapter, "watched");
  count_modes_ = watched[0];
  is_tracing_ = watched[1];
  increment_version_ = watched[2];
  forward_ad_ = watched[3];
  dispatch_ = watched[4];
  is_neg_ = watched[5];
}

void TorchState::check_modes(const char* name) const {
  // The flag is true while any thread is in a mode; check_modes looks at this thread's.
  PyObject* flag = variable(dispatch_, is_in_mode_);
  const bool in_mode = flag ? flag != Py_False : PyLong_AsLong(call(count_modes_).ptr()) != 0;
  if (in_mode || call(is_tracing_).ptr() == Py_True) call_method(adapter_, "check_modes", name);
}

bool TorchState::in_forward_ad() const {
  PyObject* level = variable(forward_ad_, current_level_);
  return level && PyLong_AsLong(level) >= 0;
}

void TorchState::check_tangent(nb::handle tensor, const char* name) const {
  call_method(adapter_, "check_tangent", tensor, name);
}

bool TorchState::is_negated(nb::handle tensor) const {
  return call(is_neg_, tensor).ptr() == Py_True;
}

void TorchState::increment_version(nb::handle tensor) const {
  call(increment_version_, nb::make_tuple(tensor));
}

}  // namespace dlattn::python
