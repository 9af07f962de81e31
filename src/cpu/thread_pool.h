#pragma once

#include <cstdint>
#include <functional>

#include "dlattn/types.h"

namespace dlattn::cpu {

// Calls body(task, worker) for every task in [0, num_tasks), on up to num_threads threads, the
// caller's among them, and returns when all are done. worker is in [0, num_threads) and belongs to
// one thread at a time. Tasks are handed out in order, one at a time. If a body throws, tasks not
// yet begun are dropped and the first exception is rethrown here. The poll's counts as one.
//
// The threads belong to one pool per process, made on first use, joined at exit and made anew after
// a fork. Several callers may be in here at once; they share the threads. Those that are in here
// while the process exits go on alone, and so do calls from exit handlers and from destructors of
// static objects that come later.
void parallel_for(std::int64_t num_tasks, int num_threads,
                  const std::function<void(std::int64_t task, int worker)>& body, Poll poll = {});

}  // namespace dlattn::cpu
