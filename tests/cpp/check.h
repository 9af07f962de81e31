#pragma once

#include <cstdio>
#include <string>

// A test framework of four macros. A test is a main() that calls CHECK and returns test::summary().
namespace test {

inline int passed = 0;
inline int failed = 0;

inline void report(bool ok, const char* file, int line, const std::string& what) {
  if (ok) {
    ++passed;
    return;
  }
  ++failed;
  if (failed <= 50) std::fprintf(stderr, "%s:%d: FAILED: %s\n", file, line, what.c_str());
}

inline int summary() {
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace test

#define CHECK(condition) test::report((condition), __FILE__, __LINE__, #condition)
// With words of what was computed, for checks within a loop.
#define CHECK_FOR(condition, what) \
  test::report((condition), __FILE__, __LINE__, std::string(#condition " for ") + (what))
#define CHECK_EQ(a, b)                \
  test::report(                       \
      (a) == (b), __FILE__, __LINE__, \
      std::string(#a " == " #b ", got ") + std::to_string(a) + " and " + std::to_string(b))
// `statement` must throw `Exception` with exactly this message.
#define CHECK_THROWS(statement, Exception, message)                                          \
  do {                                                                                       \
    std::string got_ = "(nothing thrown)";                                                   \
    try {                                                                                    \
      statement;                                                                             \
    } catch (const Exception& error_) {                                                      \
      got_ = error_.what();                                                                  \
    }                                                                                        \
    test::report(                                                                            \
        got_ == (message), __FILE__, __LINE__,                                               \
        std::string(#statement) + "\n    throws:  " + got_ + "\n    instead: " + (message)); \
  } while (false)
