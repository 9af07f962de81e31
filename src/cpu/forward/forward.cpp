#include <algorithm>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "core/util/ceil_div.h"
#include "core/util/default_floats.h"
#include "cpu/aligned_memory.h"
#include "cpu/device.h"
#include "cpu/forward/own_lengths.h"
#include "cpu/forward/quantized.h"
#include "cpu/forward/task.h"
#include "cpu/thread_pool.h"

namespace dlattn::cpu {
namespace {

using core::ceil_div;

// Query rows that share a KV head's keys, of the longest sequence.
std::int64_t rows_per_kv_head(const AttentionParams& p) {
  return p.seqlen_q * (p.num_heads / p.num_heads_kv);
}

std::int64_t num_m_blocks(const AttentionParams& p, const Plan& plan) {
  return ceil_div(rows_per_kv_head(p), plan.block_m);
}

// With few queries, as in decoding, there may be fewer tiles of queries than threads. Then the keys
// are split as well. How many ways depends on the shape alone, so that the result does not depend
// on the number of threads.
int num_splits(const AttentionParams& p, std::int64_t num_tiles) {
  constexpr std::int64_t kEnoughTasks = 16;
  constexpr std::int64_t kLeastKeys = 512;
  if (num_tiles == 0 || num_tiles >= kEnoughTasks) return 1;
  const std::int64_t wanted = ceil_div(kEnoughTasks, num_tiles);
  const std::int64_t most = p.seqlen_k / kLeastKeys;
  return static_cast<int>(most < 1 ? 1 : (most < wanted ? most : wanted));
}

// The tiles of query rows, of all KV heads and batch entries. Varlen batches have as many as
// their own lengths make, whatever the longest is said to be.
class QueryTiles {
 public:
  QueryTiles(const AttentionParams& params, const Plan& plan)
      : p_(params), plan_(plan), m_blocks_(num_m_blocks(params, plan)) {
    if (!p_.cu_seqlens_q) return;
    for (std::int64_t b = 0; b < p_.batch_size; ++b) {
      const std::int64_t rows = (p_.cu_seqlens_q[b + 1] - p_.cu_seqlens_q[b]) * group();
      end_.push_back((b ? end_.back() : 0) + ceil_div(rows, plan.block_m) * p_.num_heads_kv);
    }
  }

  std::int64_t count() const {
    if (p_.cu_seqlens_q) return end_.empty() ? 0 : end_.back();
    return m_blocks_ * p_.num_heads_kv * p_.batch_size;
  }

  Task task(std::int64_t index, int split) const {
    Task task;
    task.split = split;
    task.num_splits = plan_.num_splits;
    task.len_q = p_.seqlen_q;
    std::int64_t m_blocks = m_blocks_;
    if (p_.cu_seqlens_q) {
      const std::int64_t b = std::upper_bound(end_.begin(), end_.end(), index) - end_.begin();
      task.batch = b;
      if (b > 0) index -= end_[b - 1];
      task.first_q = p_.cu_seqlens_q[b];
      task.len_q = p_.cu_seqlens_q[b + 1] - task.first_q;
      m_blocks = ceil_div(task.len_q * group(), plan_.block_m);
    } else {
      task.batch = index / m_blocks / p_.num_heads_kv;
    }
    locate_keys(&task);
    task.head_kv = index / m_blocks % p_.num_heads_kv;
    // The last rows first: under causality they have the most keys, and a long task is better not
    // the last one.
    task.row_begin = (m_blocks - 1 - index % m_blocks) * plan_.block_m;
    task.num_rows = std::min<std::int64_t>(task.len_q * group() - task.row_begin, plan_.block_m);
    return task;
  }

 private:
  std::int64_t group() const { return p_.num_heads / p_.num_heads_kv; }

  // Where the keys of the task's sequence are, and how many.
  void locate_keys(Task* task) const {
    const std::int64_t b = task->batch;
    task->len_k = p_.seqlen_k;
    task->entry_k = p_.cache_batch_idx ? p_.cache_batch_idx[b] : b;
    if (p_.cu_seqlens_k) {
      task->entry_k = 0;
      task->first_k = p_.cu_seqlens_k[b];
      task->len_k = p_.cu_seqlens_k[b + 1] - task->first_k;
    }
    if (p_.seqused_k) task->len_k = p_.seqused_k[b];
    if (p_.leftpad_k) task->leftpad_k = p_.leftpad_k[b];
  }

  const AttentionParams& p_;
  const Plan& plan_;
  const std::int64_t m_blocks_;    // fixed length: of a head
  std::vector<std::int64_t> end_;  // packed: behind the last tile of each sequence
};

struct Block {
  char* memory = nullptr;
  std::int64_t bytes = 0;
};

// The memory that a thread keeps of its last call. Nothing destroys it, so that it is there for the
// calls of static objects' destructors and of exit handlers, which come after a thread's own
// objects are gone; `ended` then says that nobody frees what is kept any more.
struct Kept {
  Block block;
  bool ended = false;
};
thread_local Kept kept;
static_assert(std::is_trivially_destructible_v<Kept>);

struct FreeAtEnd {
  bool wanted = false;  // set where a thread keeps something: the first access makes the object
  ~FreeAtEnd() {
    free_aligned(kept.block.memory);
    kept = {{}, true};
  }
};
thread_local FreeAtEnd free_at_end;

// Memory for the tasks of one call. A thread keeps it for its next one, unless it is large: of a
// few rows the computation itself takes no longer than the allocator. It is taken and put back, as
// a call's poll may run another call in the same thread.
class Workspace {
 public:
  explicit Workspace(std::int64_t bytes) : kept_(kept), block_(std::exchange(kept_.block, {})) {
    if (block_.bytes >= bytes) return;
    free_aligned(block_.memory);
    block_ = {aligned_memory(static_cast<std::size_t>(bytes)), bytes};
  }
  ~Workspace() {
    if (!kept_.ended && block_.bytes <= kMostKept) {
      free_at_end.wanted = true;
      std::swap(kept_.block, block_);  // a call that the poll made may have kept another one
    }
    free_aligned(block_.memory);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  char* get() const { return block_.memory; }

 private:
  static constexpr std::int64_t kMostKept = 1 << 20;

  Kept& kept_;  // this thread's: looking it up takes a while
  Block block_;
};

}  // namespace

void plan(const AttentionParams& params, const DeviceInfo& device, const Options& options,
          Plan* plan) {
  if (params.precision != Precision::kInputs)
    return cpu::plan(dequantized(params), device, options, plan);
  check_num_threads(options.num_threads);
  const KernelSet& kernels = kernels_for(device.isa);
  const Tiles tiles = kernels.tiles(params.q.dtype, rows_per_kv_head(params));
  plan->isa = device.isa;
  plan->block_m = tiles.block_m;
  plan->block_n = tiles.block_n;
  const std::int64_t num_tiles =
      num_m_blocks(params, *plan) * params.num_heads_kv * params.batch_size;
  plan->fixed_splits = options.num_splits > 0;
  plan->split_size = options.split_size;
  if (plan->fixed_splits) {
    const std::int64_t most = std::max<std::int64_t>(1, ceil_div(params.seqlen_k, tiles.block_n));
    plan->num_splits = static_cast<int>(std::min<std::int64_t>(options.num_splits, most));
  } else if (!options.batch_invariant && options.split_size == 0) {
    plan->num_splits = num_splits(params, num_tiles);
  }
  const std::int64_t state_bytes = plan->num_splits > 1 ? kernels.state_bytes(params, tiles) : 0;
  std::int64_t states;
  if (__builtin_mul_overflow(num_tiles, plan->num_splits, &plan->grid) ||
      __builtin_mul_overflow(plan->grid, state_bytes, &states) || states > kMaxTensorBytes) {
    throw UnsupportedError("num_splits is " + std::to_string(plan->num_splits) + " for " +
                           std::to_string(num_tiles) +
                           " tiles of queries; accepted: as many as take up to " +
                           std::to_string(kMaxTensorBytes) + " bytes, or 0 for the default");
  }
  plan->num_threads = options.num_threads > 0 ? options.num_threads : device.num_threads;
  if (plan->num_threads > plan->grid)
    plan->num_threads = plan->grid > 0 ? static_cast<int>(plan->grid) : 1;
  plan->workspace_bytes = plan->num_threads * kernels.scratch_bytes(params, tiles) + states;
}

void forward(const AttentionParams& given, const Plan& plan, Poll poll) {
  const core::DefaultFloats floats;
  if (given.precision != Precision::kInputs) return forward_quantized(given, plan, poll);
  const OwnLengths lengths(given);
  const AttentionParams& params = lengths.params();
  const KernelSet& kernels = kernels_for(plan.isa);
  const Tiles tiles = {plan.block_m, plan.block_n};
  const Workspace workspace(plan.workspace_bytes);
  const std::int64_t scratch_bytes = kernels.scratch_bytes(params, tiles);
  const std::int64_t task_bytes =
      plan.num_splits > 1 ? plan.num_splits * kernels.state_bytes(params, tiles) : 0;
  char* const all_states = workspace.get() + plan.num_threads * scratch_bytes;
  const QueryTiles query_tiles(params, plan);

  const auto work = [&](std::int64_t index, int split, int worker, auto function) {
    const Task task = query_tiles.task(index, split);
    // The last rows, or those of a short sequence, may need fewer lanes. The bits are the same.
    const Tiles own = {kernels.tiles(params.q.dtype, task.num_rows).block_m, plan.block_n};
    function(params, own, task, workspace.get() + worker * scratch_bytes,
             task_bytes ? all_states + index * task_bytes : nullptr);
  };
  const auto run = [&](std::int64_t index, int worker) {
    work(index / plan.num_splits, static_cast<int>(index % plan.num_splits), worker, kernels.run);
  };
  const auto merge = [&](std::int64_t index, int worker) { work(index, 0, worker, kernels.merge); };
  const std::int64_t num_tiles = query_tiles.count();
  parallel_for(num_tiles * plan.num_splits, plan.num_threads, run, poll);
  if (plan.num_splits > 1) parallel_for(num_tiles, plan.num_threads, merge, poll);
}

}  // namespace dlattn::cpu
