#pragma once

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

// Small kernels, each right or with one bug. A bug must end the program, so each case runs in a
// process of its own: this program, called again with the case's name.
namespace simt::self_test {

#if defined(SIMT_ASAN)
constexpr bool kAsan = true, kTsan = false;
#elif defined(SIMT_TSAN)
constexpr bool kAsan = false, kTsan = true;
#else
constexpr bool kAsan = false, kTsan = false;
#endif

[[noreturn]] inline void fail(const char* what) {
  std::printf("wrong result: %s\n", what);
  std::exit(1);
}

struct Case {
  std::string name;
  void (*run)();
  const char* expected;  // in the output; null: ends well
  bool applies = true;
};

constexpr const char* kRace = "ThreadSanitizer: data race";
constexpr const char* kWrong = "wrong result";

// Output and exit status of this program run for one case.
struct Outcome {
  std::string output;
  int status;
};

inline Outcome run_case(const std::string& program, const std::string& name) {
  std::FILE* pipe = popen(("'" + program + "' '" + name + "' 2>&1").c_str(), "r");
  if (!pipe) std::abort();
  Outcome outcome{};
  char buffer[4096];
  for (std::size_t n; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;)
    outcome.output.append(buffer, n);
  outcome.status = pclose(pipe);
  return outcome;
}

inline int run_self_tests(const std::vector<Case>& cases, int argc, char** argv) {
  if (argc > 1) {
    for (const Case& c : cases) {
      if (c.name == argv[1]) return c.run(), 0;
    }
    std::printf("no case is called %s\n", argv[1]);
    return 2;
  }
  int passed = 0, failed = 0;
  for (const Case& c : cases) {
    // Processes start slowly under ThreadSanitizer, which adds nothing to what the others find.
    const bool slow = kTsan && c.expected && c.expected != kRace;
    if (!c.applies || slow) continue;
    const Outcome outcome = run_case(argv[0], c.name);
    const bool ok =
        c.expected ? outcome.status != 0 && outcome.output.find(c.expected) != std::string::npos
                   : outcome.status == 0;
    std::printf("%s %s\n", ok ? "ok  " : "FAIL", c.name.c_str());
    if (!ok) {
      std::printf("  expected: %s\n  status %d, output: %s\n",
                  c.expected ? c.expected : "a good end", outcome.status, outcome.output.c_str());
    }
    ++(ok ? passed : failed);
  }
  std::printf("%d passed, %d failed\n", passed, failed);
  return failed != 0;
}

}  // namespace simt::self_test
