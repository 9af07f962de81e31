// Sets the options of the sanitizers in these programs, whatever the environment says.

extern "C" const char* __asan_default_options() {
  return "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0:exitcode=1";
}

extern "C" const char* __ubsan_default_options() {
  return "halt_on_error=1:print_stacktrace=1";
}

// The first race ends the program. Stack traces of both sides stay available over a whole tile.
extern "C" const char* __tsan_default_options() {
  return "halt_on_error=1:exitcode=1:history_size=4:atexit_sleep_ms=0";
}
