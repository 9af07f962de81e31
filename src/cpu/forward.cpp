#include <new>
#include <string>
#include <cstdlib>
#include <memory>

#include "core/backend.h"
#include "cpu/device.h"
#include "cpu/thread_pool.h"
#include "cpu/varlen.h"

namespace dlattn::cpu {
namespace {

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

// Query rows that share a KV head's keys, of the longest sequence.
std::int64_t rows_per_kv_head(const AttentionParams& p) { return p.seqlen_q * (p.num_heads / p.num_heads_kv); }

std::int64_t num_m_blocks(const AttentionParams& p, const Plan& plan) {
  return ceil_div(rows_per_kv_head(p), plan.block_m);
}

// Task `index` of plan.grid. num_rows is 0 where a sequence is shorter than the longest.
Task make_task(const AttentionParams& p, const Plan& plan, std::int64_t index) {
  const std::int64_t m_blocks = num_m_blocks(p, plan);
  Task task;
  task.batch = index / m_blocks / p.num_heads_kv;
  task.head_kv = index / m_blocks % p.num_heads_kv;
  task.len_q = p.seqlen_q;
  task.len_k = p.seqlen_k;
  if (p.cu_seqlens_q) {
    task.first_q = p.cu_seqlens_q[task.batch];
    task.first_k = p.cu_seqlens_k[task.batch];
    task.len_q = p.cu_seqlens_q[task.batch + 1] - task.first_q;
    task.len_k = p.seqused_k ? p.seqused_k[task.batch] : p.cu_seqlens_k[task.batch + 1] - task.first_k;
  }
  // The last rows first: under causality they have the most keys, and a long task is better not the last one.
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

void plan(const AttentionParams& params, const DeviceInfo& device, int num_threads, Plan* plan) {
  if (num_threads < 0) {
    throw UnsupportedError("num_threads is " + std::to_string(num_threads) + "; accepted: at least 1, or 0 for the default");
  }
  const KernelSet& kernels = kernels_for(device.isa);
  const Tiles tiles = kernels.tiles(params.dtype, rows_per_kv_head(params));
  plan->isa = device.isa;
  plan->block_m = tiles.block_m;
  plan->block_n = tiles.block_n;
  plan->grid = num_m_blocks(params, *plan) * params.num_heads_kv * params.batch_size;
  plan->num_threads = num_threads > 0 ? num_threads : device.num_threads;
  if (plan->num_threads > plan->grid) plan->num_threads = plan->grid > 0 ? static_cast<int>(plan->grid) : 1;
  plan->workspace_bytes = plan->num_threads * kernels.scratch_bytes(params, tiles);
}

void forward(const AttentionParams& params, const Plan& plan) {
  validate_varlen(params);
  const KernelSet& kernels = kernels_for(plan.isa);
  const Tiles tiles = {plan.block_m, plan.block_n};
  const std::unique_ptr<void, Free> scratch(std::aligned_alloc(64, static_cast<std::size_t>(plan.workspace_bytes)));
  if (!scratch) throw std::bad_alloc();
  const std::int64_t bytes_per_thread = plan.workspace_bytes / plan.num_threads;
  parallel_for(plan.grid, plan.num_threads, [&](std::int64_t index, int worker) {
    const Task task = make_task(params, plan, index);
    if (task.num_rows == 0) return;
    kernels.run(params, tiles, task, static_cast<char*>(scratch.get()) + worker * bytes_per_thread);
  });
}

}  // namespace dlattn::cpu
