// The CPU backend's threads: every task once, exceptions, concurrent and nested callers, fork.
#include "cpu/thread_pool.h"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>
#include <vector>

#include "check.h"

using dlattn::cpu::parallel_for;

namespace {

// True if every task ran exactly once and no two threads were the same worker at a time.
bool runs_all(std::int64_t num_tasks, int num_threads) {
  std::vector<std::atomic<int>> runs(num_tasks);
  std::vector<std::atomic<bool>> busy(num_threads > 0 ? num_threads : 1);
  std::atomic<bool> good{true};
  parallel_for(num_tasks, num_threads, [&](std::int64_t task, int worker) {
    if (worker < 0 || worker >= static_cast<int>(busy.size()) || busy[worker].exchange(true))
      good = false;
    ++runs[task];
    busy[worker] = false;
  });
  for (const auto& count : runs) {
    if (count != 1) good = false;
  }
  return good;
}

void every_task_once() {
  for (const int threads : {1, 2, 5, 16}) {
    for (const std::int64_t tasks : {0, 1, 2, 7, 1000}) {
      CHECK_FOR(runs_all(tasks, threads),
                std::to_string(tasks) + " tasks, " + std::to_string(threads) + " threads");
    }
  }
}

// With tasks that wait for each other, all the threads asked for must be there.
void as_many_threads_as_asked() {
  constexpr int kThreads = 4;
  std::atomic<int> arrived{0};
  std::mutex mutex;
  std::set<std::thread::id> ids;
  parallel_for(kThreads, kThreads, [&](std::int64_t, int) {
    {
      const std::lock_guard<std::mutex> lock(mutex);
      ids.insert(std::this_thread::get_id());
    }
    ++arrived;
    while (arrived < kThreads) std::this_thread::yield();
  });
  CHECK_EQ(static_cast<int>(ids.size()), kThreads);
}

void exceptions() {
  for (const int threads : {1, 3}) {
    std::string got;
    try {
      parallel_for(100, threads, [](std::int64_t task, int) {
        if (task == 10) throw std::runtime_error("task 10");
      });
    } catch (const std::runtime_error& error) {
      got = error.what();
    }
    CHECK(got == "task 10");
    CHECK(runs_all(50, threads));  // the pool goes on
  }
}

void concurrent_callers() {
  std::atomic<int> good{0};
  std::vector<std::thread> callers;
  for (int c = 0; c < 6; ++c) {
    callers.emplace_back([&] {
      for (int round = 0; round < 50; ++round) good += runs_all(40, 3);
    });
  }
  for (std::thread& caller : callers) caller.join();
  CHECK_EQ(good.load(), 6 * 50);
}

// The poll runs on the caller's thread; what it throws ends the tasks and is thrown here.
void polls() {
  for (const int threads : {1, 3}) {
    struct Watch {
      std::thread::id caller = std::this_thread::get_id();
      int polls = 0;
      bool elsewhere = false;
      int last = 3;
    } watch;
    const dlattn::Poll poll = {[](void* context) {
                                 auto* seen = static_cast<Watch*>(context);
                                 if (std::this_thread::get_id() != seen->caller)
                                   seen->elsewhere = true;
                                 if (++seen->polls == seen->last) throw std::runtime_error("stop");
                               },
                               &watch};
    std::atomic<int> tasks{0};
    const auto nap = [&](std::int64_t, int) {
      ++tasks;
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    };
    std::string got;
    try {
      parallel_for(1000, threads, nap, poll);
    } catch (const std::runtime_error& error) {
      got = error.what();
    }
    CHECK(got == "stop" && watch.polls == watch.last && !watch.elsewhere && tasks < 1000);
    watch.polls = 100;
    parallel_for(20, threads, nap, poll);  // one that does not throw changes nothing
    CHECK(runs_all(50, threads));
  }
}

// A process may end while threads that it does not wait for are in calls.
void exit_during_calls() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(60);
    for (int c = 0; c < 3; ++c) {
      std::thread([] {
        for (;;) runs_all(40, 3);
      }).detach();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::exit(0);
  }
  int status = -1;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void nested_callers() {
  std::atomic<int> good{0};
  parallel_for(4, 2, [&](std::int64_t, int) { good += runs_all(10, 3); });
  CHECK_EQ(good.load(), 4);
}

// ThreadSanitizer does not support threads started after a fork.
#if !defined(__SANITIZE_THREAD__)
void fork_gets_fresh_threads() {
  CHECK(runs_all(100, 3));
  const pid_t child = fork();
  if (child == 0) {
    // Without a fresh pool the two tasks would wait for each other for good, and alarm would end
    // the process.
    alarm(20);
    std::atomic<int> arrived{0};
    parallel_for(2, 2, [&](std::int64_t, int) {
      ++arrived;
      while (arrived < 2) std::this_thread::yield();
    });
    _exit(runs_all(100, 3) ? 17 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 17);
  CHECK(runs_all(100, 3));  // and the parent's are untouched
}

// A child that leaves through exit() joins its own threads and nobody else's.
void fork_then_exit() {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    std::exit(runs_all(100, 3) ? 18 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 18);
}
#endif

}  // namespace

int main() {
  every_task_once();
  as_many_threads_as_asked();
  exceptions();
  concurrent_callers();
  nested_callers();
  polls();
#if !defined(__SANITIZE_THREAD__)
  fork_gets_fresh_threads();
  fork_then_exit();
#if !defined(__SANITIZE_ADDRESS__)  // takes for leaks what is on the stacks of running threads
  exit_during_calls();
#endif
#endif
  return test::summary();
}
