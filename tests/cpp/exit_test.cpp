// Calls from destructors of static and of thread-local objects and from exit handlers. Each runs in
// a child process, as what comes after main() can only be seen from outside.
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "dlattn/attention.h"

using namespace dlattn;

namespace {

constexpr int kBatch = 2, kQueries = 40, kKeys = 96, kHeads = 4, kDim = 32;

// Not destroyed, as static objects' destructors use it.
std::vector<float>& numbers(int n) {
  static auto* const all = new std::vector<float>[3];
  return all[n];
}
// The result of a call in main().
std::vector<float>& expected() {
  static auto& values = *new std::vector<float>;
  return values;
}
int num_threads = 1;

void fill(int n, std::int64_t count) {
  std::mt19937 random(7u + static_cast<unsigned>(n));
  std::normal_distribution<float> normal(0.5f, 1.0f);
  for (std::int64_t i = 0; i < count; ++i) numbers(n).push_back(normal(random));
}

template <typename View>
void place(View* view, decltype(View::data) data, std::int64_t rows) {
  view->data = data;
  view->dtype = DType::kFloat32;
  view->head_stride = kDim, view->row_stride = kHeads * kDim;
  view->batch_stride = rows * view->row_stride;
}

std::vector<float> attend() {
  std::vector<float> out(kBatch * kQueries * kHeads * kDim, NAN);
  AttentionParams p;
  place(&p.q, numbers(0).data(), kQueries);
  place(&p.k, numbers(1).data(), kKeys);
  place(&p.v, numbers(2).data(), kKeys);
  place(&p.out, out.data(), kQueries);
  p.batch_size = kBatch, p.seqlen_q = kQueries, p.seqlen_k = kKeys;
  p.num_heads = p.num_heads_kv = kHeads, p.head_dim = p.head_dim_v = kDim;
  p.softmax_scale = 0.2;
  Options options;
  options.num_threads = num_threads;
  forward(p, nullptr, options);
  return out;
}

// The plain formula, in double.
bool is_attention(const std::vector<float>& out) {
  double worst = 0.0;
  for (int b = 0; b < kBatch; ++b) {
    for (int h = 0; h < kHeads; ++h) {
      for (int i = 0; i < kQueries; ++i) {
        const auto at = [&](int n, int rows, int row) {
          return numbers(n).data() + ((b * rows + row) * kHeads + h) * kDim;
        };
        double sum = 0.0, row[kDim] = {};
        for (int j = 0; j < kKeys; ++j) {
          double score = 0.0;
          for (int d = 0; d < kDim; ++d)
            score += static_cast<double>(at(0, kQueries, i)[d]) * at(1, kKeys, j)[d];
          const double weight = std::exp(0.2 * score);
          sum += weight;
          for (int d = 0; d < kDim; ++d) row[d] += weight * at(2, kKeys, j)[d];
        }
        for (int d = 0; d < kDim; ++d) {
          const double error = row[d] / sum - out[((b * kQueries + i) * kHeads + h) * kDim + d];
          worst = error == error ? std::fmax(worst, std::fabs(error)) : INFINITY;
        }
      }
    }
  }
  return worst < 1e-4;
}

// Ends the process at once where a call fails: nobody else would hear of it.
void call(const char* from) {
  const std::vector<float> out = attend();
  if (is_attention(out) && (expected().empty() || out == expected())) return;
  std::fprintf(stderr, "wrong in %s\n", from);
  std::_Exit(3);
}

struct AtEnd {
  const char* name;
  ~AtEnd() {
    if (!numbers(0).empty()) call(name);
  }
};
AtEnd before_main{"a static object that main() did not make"};

int run(const std::string& threads, const std::string& first) {
  num_threads = std::atoi(threads.c_str());
  fill(0, kBatch * kQueries * kHeads * kDim);
  fill(1, kBatch * kKeys * kHeads * kDim);
  fill(2, kBatch * kKeys * kHeads * kDim);
  std::atexit([] { call("an exit handler that came first"); });
  if (first == "main") {
    expected() = attend();
    if (!is_attention(expected())) return 2;
  }
  static AtEnd made_in_main{"a static object of main()"};
  std::atexit([] { call("an exit handler that came last"); });
  // An object that a thread made before what the library keeps for it, and so destroys after that.
  std::thread([&first] {
    thread_local AtEnd of_thread{"an object of a thread"};
    of_thread.name = "a thread's own object";
    if (first == "main") call("a thread");
  }).join();
  thread_local AtEnd of_main{"an object of the main thread"};
  of_main.name = "the main thread's own object";
  return 0;
}

std::string run_in_child(const char* threads, const char* first) {
  const pid_t child = fork();  // of a process that has called nothing of the library
  if (child == 0) std::exit(run(threads, first));
  int status = 0;
  if (child < 0 || waitpid(child, &status, 0) != child) return "no child";
  if (WIFSIGNALED(status)) return "signal " + std::to_string(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "exit status " + std::to_string(WEXITSTATUS(status));
}

}  // namespace

int main() {
  constexpr int kTimes = 8;
  for (const char* threads : {"1", "2"}) {
    for (const char* first : {"main", "end"}) {  // where the first call is
      for (int i = 0; i < kTimes; ++i) {
        const std::string what = run_in_child(threads, first);
        CHECK_FOR(what.empty(),
                  std::string(threads) + " thread(s), first call in " + first + ": " + what);
      }
    }
  }
  return test::summary();
}
