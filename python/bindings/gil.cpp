#include "gil.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace dlattn::python {
namespace {

// Python's main thread runs the signal handlers. Asked without the GIL, so that other threads need
// not wait for it.
bool is_main_thread() {
  return syscall(SYS_gettid) == getpid();
}

}  // namespace

void stay() {
  for (;;) pause();
}

void Unlocked::take_gil() noexcept {
  guarded([&] { PyEval_RestoreThread(thread_); });
}

void Unlocked::check_signals() {
  if (!is_main_thread()) return;
  take_gil();
  const int failed = guarded([] { return PyErr_CheckSignals(); });
  thread_ = PyEval_SaveThread();
  if (failed) throw Interrupted();
}

}  // namespace dlattn::python
