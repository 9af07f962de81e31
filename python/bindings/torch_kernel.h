#pragma once

#include <nanobind/nanobind.h>

#include "dlattn/plan.h"
#include "torch_functions.h"

// Native kernels of torch's operators have this in common. Torch runs them without the GIL, on any
// thread: nothing that serves a call touches Python.
namespace dlattn::python {

namespace nb = nanobind;

// Between them, code that may throw: see run_or_throw.
void forget_failure() noexcept;
void keep_failure() noexcept;  // of the exception that is being handled
void throw_failure();

// Torch throws the exception that leaves this, and no object of this module's is alive then: its
// C++ runtime and this module's need not be the same.
template <typename Code>
void run_or_throw(Code&& code) {
  forget_failure();
  bool failed = false;
  try {
    code();
  } catch (...) {
    keep_failure();
    failed = true;
  }
  if (failed) throw_failure();
}

// Returns the failure of this thread's last call of such a kernel, or None: the name of the
// exception's class, and its message. Torch's RuntimeError has the message alone.
nb::object torch_ops_failure();

// Gives a plan the memory of torch's that it asks for. It may be let go of when the work is
// enqueued: what gets it next runs behind that, on the same stream.
struct TorchWorkspace {
  Device device;
  OwnedTensor memory;

  WorkspaceAllocator allocator();
};

void* stream_of(Device device);  // torch's current one

}  // namespace dlattn::python
