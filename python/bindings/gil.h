#pragma once

#include <nanobind/nanobind.h>

#include <type_traits>

#include "dlattn/types.h"

// Python's global interpreter lock: where this module gives it up, and where it may lose it.
//
// No C++ lock is held across either, the guard of a static included. Otherwise one thread could
// hold the lock and wait for the GIL while another holds the GIL and waits for the lock.
//
// A thread that asks for the GIL while the interpreter is being finalised does not get it: CPython
// before 3.14 ends that thread by unwinding its stack, on which C++ frames end the process, or let
// go of Python objects without the GIL. Here such a thread stays where it is, as it does in 3.14.
namespace dlattn::python {

namespace nb = nanobind;

[[noreturn]] void stay();

// Runs `code`, which may run Python code: that may give up the GIL and never get it back. `code`
// calls Python's C API and owns nothing.
template <typename Code>
auto guarded(Code&& code) noexcept {
  try {
    return code();
  } catch (...) {  // C code throws no exception: CPython is unwinding the stack
    stay();
  }
}

// Owns the result of a function of Python's C API. Throws if it is null, as an exception is set
// then.
inline nb::object checked(PyObject* result) {
  if (!result) throw nb::python_error();
  return nb::steal<nb::object>(result);
}

// A name of which there is one object in the process, as Python's caches of attributes want it.
inline nb::object interned(const char* name) {
  return checked(PyUnicode_InternFromString(name));
}

// object.name
inline nb::object attribute(nb::handle object, nb::handle name) {
  return checked(guarded([&] { return PyObject_GetAttr(object.ptr(), name.ptr()); }));
}

// function() and function(argument)
inline nb::object call(nb::handle function) {
  return checked(guarded([&] { return PyObject_CallNoArgs(function.ptr()); }));
}
inline nb::object call(nb::handle function, nb::handle argument) {
  return checked(guarded(
      [&] { return PyObject_CallFunctionObjArgs(function.ptr(), argument.ptr(), nullptr); }));
}

// object.name(arguments...)
template <typename... Arguments>
nb::object call_method(nb::handle object, nb::handle name, const Arguments&... arguments) {
  const auto call_with = [&](const auto&... held) {
    return guarded([&] {
      return PyObject_CallMethodObjArgs(object.ptr(), name.ptr(), held.ptr()..., nullptr);
    });
  };
  return checked(call_with(nb::cast(arguments)...));
}
template <typename... Arguments>
nb::object call_method(nb::handle object, const char* name, const Arguments&... arguments) {
  return call_method(object, interned(name), arguments...);
}

struct Interrupted {};  // a Python exception is set

// Runs code() with the GIL, on a thread that need not be one of Python's; not at all once Python
// has ended. `code` calls Python's C API, leaves no exception and owns nothing.
template <typename Code>
void with_gil_on_any_thread(Code&& code) noexcept {
  guarded([&] {
    if (!Py_IsInitialized()) return;
    const PyGILState_STATE state = PyGILState_Ensure();
    code();
    PyGILState_Release(state);
  });
}

// Holds the GIL for its lifetime, on a thread that need not be one of Python's. An exception of
// Python's that is set then stays so: it lies in the thread's state, which outlives this.
class GilOnAnyThread {
 public:
  GilOnAnyThread() {
    guarded([&] {
      if (!PyGILState_GetThisThreadState()) {  // makes a state that stays
        PyGILState_Ensure();
        PyEval_SaveThread();
      }
      state_ = PyGILState_Ensure();
    });
  }
  ~GilOnAnyThread() { PyGILState_Release(state_); }
  GilOnAnyThread(const GilOnAnyThread&) = delete;
  GilOnAnyThread& operator=(const GilOnAnyThread&) = delete;

 private:
  PyGILState_STATE state_;
};

// Gives up the GIL for its lifetime.
class Unlocked {
 public:
  Unlocked() : thread_(PyEval_SaveThread()) {}
  ~Unlocked() { take_gil(); }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

  // On Python's main thread, runs the handlers of signals that have come; throws Interrupted if one
  // of them raises.
  void check_signals();

  // Runs code(), which may use Python, with the GIL. Throws Interrupted where it throws Python's
  // exception.
  template <typename Code>
  auto with_gil(Code&& code) {
    take_gil();
    const GiveUp give_up{this};
    try {
      return code();
    } catch (nb::python_error& error) {
      error.restore();
    }
    throw Interrupted();
  }

 private:
  struct GiveUp {
    Unlocked* unlocked;
    ~GiveUp() { unlocked->thread_ = PyEval_SaveThread(); }
  };

  void take_gil() noexcept;

  PyThreadState* thread_;
};

// Runs compute(poll), or compute(poll, unlocked), without the GIL. Where a signal's handler raises
// meanwhile, as Ctrl-C's does, that ends the computation and is raised here.
template <typename Compute>
void without_gil(Compute&& compute) {
  try {
    Unlocked unlocked;
    const Poll poll{[](void* self) { static_cast<Unlocked*>(self)->check_signals(); }, &unlocked};
    if constexpr (std::is_invocable_v<Compute, Poll, Unlocked&>) {
      compute(poll, unlocked);
    } else {
      compute(poll);
    }
  } catch (const Interrupted&) {
    throw nb::python_error();
  }
}

}  // namespace dlattn::python
