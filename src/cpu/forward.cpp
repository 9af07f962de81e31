#include <cstdlib>
#include <memory>
#include <new>
#include <string>

#include "core/backend.h"
#include "cpu/device.h"
#include "cpu/thread_pool.h"
#include "cpu/varlen.h"

namespace dlattn::cpu {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) {
  return (a + b - 1) / b;
}

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

// Tile `index` of the query rows of all KV heads. num_rows is 0 where a sequence is shorter than
// the longest.
Task make_task(const AttentionParams& p, const Plan& plan, std::int64_t index) {
  const std::int64_t m_blocks = num_m_blocks(p, plan);
  Task task;
  task.num_splits = plan.num_splits;
  task.batch = index / m_blocks / p.num_heads_kv;
  task.head_kv = index / m_blocks % p.num_heads_kv;
  task.len_q = p.seqlen_q;
  task.len_k = p.seqlen_k;
  if (p.cu_seqlens_q) {
    task.first_q = p.cu_seqlens_q[task.batch];
    task.first_k = p.cu_seqlens_k[task.batch];
    task.len_q = p.cu_seqlens_q[task.batch + 1] - task.first_q;
    task.len_k =
        p.seqused_k ? p.seqused_k[task.batch] : p.cu_seqlens_k[task.batch + 1] - task.first_k;
  }
  // The last rows first: under causality they have the most keys, and a long task is better not the
  // last one.
  const std::int64_t m_block = m_blocks - 1 - index % m_blocks;
  task.row_begin = m_block * plan.block_m;
  const std::int64_t rows = task.len_q * (p.num_heads / p.num_heads_kv) - task.row_begin;
  task.num_rows = rows < 0 ? 0 : (rows < plan.block_m ? rows : plan.block_m);
  return task;
}

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};

}  // namespace

void plan(const AttentionParams& params, const DeviceInfo& device, const Options& options,
          Plan* plan) {
  const int num_threads = options.num_threads;
  if (num_threads < 0 || num_threads > 4096) {
    throw UnsupportedError("num_threads is " + std::to_string(num_threads) +
                           "; accepted: 1 to 4096, or 0 for the default");
  }
  const KernelSet& kernels = kernels_for(device.isa);
  const Tiles tiles = kernels.tiles(params.dtype, rows_per_kv_head(params));
  plan->isa = device.isa;
  plan->block_m = tiles.block_m;
  plan->block_n = tiles.block_n;
  const std::int64_t num_tiles =
      num_m_blocks(params, *plan) * params.num_heads_kv * params.batch_size;
  plan->num_splits = options.batch_invariant ? 1 : num_splits(params, num_tiles);
  plan->grid = num_tiles * plan->num_splits;
  plan->num_threads = num_threads > 0 ? num_threads : device.num_threads;
  if (plan->num_threads > plan->grid)
    plan->num_threads = plan->grid > 0 ? static_cast<int>(plan->grid) : 1;
  plan->workspace_bytes = plan->num_threads * kernels.scratch_bytes(params, tiles);
  if (plan->num_splits > 1)
    plan->workspace_bytes += plan->grid * kernels.state_bytes(params, tiles);
}

void forward(const AttentionParams& params, const Plan& plan) {
  validate_varlen(params);
  const KernelSet& kernels = kernels_for(plan.isa);
  const Tiles tiles = {plan.block_m, plan.block_n};
  const std::unique_ptr<char, Free> workspace(
      static_cast<char*>(std::aligned_alloc(64, static_cast<std::size_t>(plan.workspace_bytes))));
  if (!workspace) throw std::bad_alloc();
  const std::int64_t scratch_bytes = kernels.scratch_bytes(params, tiles);
  const std::int64_t task_bytes =
      plan.num_splits > 1 ? plan.num_splits * kernels.state_bytes(params, tiles) : 0;
  char* const all_states = workspace.get() + plan.num_threads * scratch_bytes;

  const auto work = [&](std::int64_t index, int split, int worker, auto function) {
    Task task = make_task(params, plan, index);
    task.split = split;
    if (task.num_rows == 0) return;
    function(params, tiles, task, workspace.get() + worker * scratch_bytes,
             task_bytes ? all_states + index * task_bytes : nullptr);
  };
  parallel_for(plan.grid, plan.num_threads, [&](std::int64_t index, int worker) {
    work(index / plan.num_splits, static_cast<int>(index % plan.num_splits), worker, kernels.run);
  });
  if (plan.num_splits == 1) return;
  parallel_for(plan.grid / plan.num_splits, plan.num_threads,
               [&](std::int64_t index, int worker) { work(index, 0, worker, kernels.merge); });
}

}  // namespace dlattn::cpu
