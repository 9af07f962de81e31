#include "cpu/thread_pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <list>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "core/util/default_floats.h"

namespace dlattn::cpu {
namespace {

// Calls a Poll between tasks of one thread, where there are several.
class Poller {
 public:
  Poller(Poll poll, std::int64_t num_tasks) : poll_(num_tasks > 1 ? poll : Poll{}) {
    if (poll_.function) last_ = Clock::now();
  }

  void before_task() {
    if (!poll_.function || Clock::now() - last_ < kInterval) return;
    poll_.function(poll_.context);
    last_ = Clock::now();
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kInterval = std::chrono::milliseconds(100);

  Poll poll_;
  Clock::time_point last_;
};

// One parallel_for. It lives on its caller's stack; the pool's mutex guards all but next_task.
struct Job {
  const std::function<void(std::int64_t, int)>* body;
  Poll poll;  // the caller's alone
  std::int64_t num_tasks;
  int helpers_wanted;   // threads that may still join
  int next_worker = 1;  // 0 is the caller
  int helpers_inside = 0;
  std::exception_ptr error;
  std::atomic<std::int64_t> next_task{0};
  std::condition_variable helper_left;
};

// Whether the process ends. No thread is started then: callers, which may be destructors of static
// objects, exit handlers and threads that the process does not wait for, compute alone.
std::atomic<bool> ending{false};

class ThreadPool {
 public:
  // Ends the threads, of each at the end of its task, when `ending` is set. Callers are served on,
  // so the pool itself must stay.
  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
    }  // a thread is waiting now, or sees `ending`
    job_added_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

  void run(Job& job) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      grow(job.helpers_wanted);
      jobs_.push_back(&job);
    }
    job_added_.notify_all();
    work(job, 0);
    std::unique_lock<std::mutex> lock(mutex_);
    jobs_.remove(&job);
    job.helper_left.wait(lock, [&] { return job.helpers_inside == 0; });
  }

 private:
  // With the mutex held. A system that grants no more threads only makes the call slower.
  void grow(int helpers) {
    try {
      while (!ending && static_cast<int>(threads_.size()) < helpers)
        threads_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
    }
  }

  Job* next_job() {
    for (Job* job : jobs_) {
      if (job->helpers_wanted > 0) return job;
    }
    return nullptr;
  }

  void serve() {
    const core::DefaultFloats floats;
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      Job* job = nullptr;
      job_added_.wait(lock, [&] { return ending || (job = next_job()) != nullptr; });
      if (!job) return;
      --job->helpers_wanted;
      ++job->helpers_inside;
      const int worker = job->next_worker++;
      lock.unlock();
      work(*job, worker);
      lock.lock();
      // Under the mutex, since the job is gone as soon as its caller sees the count.
      if (--job->helpers_inside == 0) job->helper_left.notify_one();
    }
  }

  void work(Job& job, int worker) {
    try {
      Poller poller(worker == 0 ? job.poll : Poll{}, job.num_tasks);
      for (;;) {
        if (worker != 0 && ending) return;
        const std::int64_t task = job.next_task.fetch_add(1, std::memory_order_relaxed);
        if (task >= job.num_tasks) return;
        poller.before_task();
        (*job.body)(task, worker);
      }
    } catch (...) {
      job.next_task.store(job.num_tasks, std::memory_order_relaxed);
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!job.error) job.error = std::current_exception();
    }
  }

  std::mutex mutex_;
  std::condition_variable job_added_;
  std::list<Job*> jobs_;
  std::vector<std::thread> threads_;
};

std::atomic<ThreadPool*> current_pool{nullptr};

// The child has none of the pool's threads, and its mutex may be held by one that is not there:
// leave it alone.
void forget_pool() {
  current_pool.store(nullptr, std::memory_order_relaxed);
}

struct AtForkAndExit {
  AtForkAndExit() { pthread_atfork(nullptr, nullptr, forget_pool); }
  ~AtForkAndExit() {
    ending = true;
    if (ThreadPool* pool = current_pool.load()) pool->stop();
  }
} at_fork_and_exit;

ThreadPool& pool() {
  ThreadPool* pool = current_pool.load(std::memory_order_acquire);
  if (!pool) {
    auto* fresh = new ThreadPool;  // starts no thread yet
    if (current_pool.compare_exchange_strong(pool, fresh)) return *fresh;
    delete fresh;
  }
  return *pool;
}

}  // namespace

void parallel_for(std::int64_t num_tasks, int num_threads,
                  const std::function<void(std::int64_t task, int worker)>& body, Poll poll) {
  if (num_threads > num_tasks) num_threads = static_cast<int>(num_tasks);
  if (num_threads <= 1) {
    Poller poller(poll, num_tasks);
    for (std::int64_t task = 0; task < num_tasks; ++task) {
      poller.before_task();
      body(task, 0);
    }
    return;
  }
  Job job;
  job.body = &body;
  job.poll = poll;
  job.num_tasks = num_tasks;
  job.helpers_wanted = num_threads - 1;
  pool().run(job);
  if (job.error) std::rethrow_exception(job.error);
}

}  // namespace dlattn::cpu
