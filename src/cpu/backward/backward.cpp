#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/backend.h"
#include "core/problem/tensor_sizes.h"
#include "core/util/ceil_div.h"
#include "core/util/default_floats.h"
#include "cpu/aligned_memory.h"
#include "cpu/backward/task.h"
#include "cpu/device.h"
#include "cpu/forward/own_lengths.h"
#include "cpu/thread_pool.h"

namespace dlattn::cpu {
namespace {

using core::ceil_div;

std::int64_t compute_bytes(const AttentionParams& p) {
  return p.q.dtype == DType::kFloat64 ? 8 : 4;
}

// Bytes of the numbers that all threads share: one a row of q.
std::int64_t delta_bytes(const AttentionParams& p) {
  const core::TensorSizes rows = core::query_sizes(p);
  return ceil_div(rows.batch * rows.rows * rows.heads * compute_bytes(p), 64) * 64;
}

// Tensors that repeat one element may have more rows than any machine has memory for: what a call
// keeps of each sequence and of each row of a head is refused before the rest is worked out.
void check_memory(const AttentionParams& p) {
  const core::TensorSizes rows = core::query_sizes(p);
  if (rows.rows == 0 && core::key_sizes(p).rows == 0) return;
  const double elements = static_cast<double>(rows.batch) * static_cast<double>(rows.rows) *
                          static_cast<double>(rows.heads);
  const double bytes = elements * static_cast<double>(compute_bytes(p)) +
                       static_cast<double>(p.batch_size) * sizeof(SequenceRows);
  const std::int64_t most = machine_memory();
  if (bytes <= static_cast<double>(most)) return;
  throw UnsupportedError("batch_size is " + std::to_string(p.batch_size) + ", num_heads " +
                         std::to_string(p.num_heads) + ", and q has " + std::to_string(rows.rows) +
                         " rows; accepted: as many as a backward pass has memory for, a number "
                         "for each row of a head and " +
                         std::to_string(sizeof(SequenceRows)) + " bytes for each sequence, in " +
                         std::to_string(most) + " bytes");
}

std::vector<SequenceRows> sequences_of(const AttentionParams& p) {
  // Tensors without elements may have any number of sequences.
  if (!p.cu_seqlens_q && !p.cu_seqlens_k && p.seqlen_q == 0 && p.seqlen_k == 0) return {};
  std::vector<SequenceRows> all(static_cast<std::size_t>(p.batch_size));
  for (std::int64_t b = 0; b < p.batch_size; ++b) {
    SequenceRows& one = all[static_cast<std::size_t>(b)];
    one.batch = b, one.len_q = p.seqlen_q, one.len_k = p.seqlen_k;
    if (p.cu_seqlens_q) {
      one.first_q = p.cu_seqlens_q[b];
      one.len_q = p.cu_seqlens_q[b + 1] - one.first_q;
    }
    if (p.cu_seqlens_k) {
      one.first_k = p.cu_seqlens_k[b];
      one.len_k = p.cu_seqlens_k[b + 1] - one.first_k;
    }
    if (p.seqused_k) one.len_k = p.seqused_k[b];
  }
  return all;
}

// Blocks of rows of all heads and sequences.
class Blocks {
 public:
  Blocks(const std::vector<SequenceRows>& sequences, std::int64_t heads, std::int64_t block,
         std::int64_t SequenceRows::* length)
      : sequences_(sequences), heads_(heads), block_(block), length_(length) {
    for (const SequenceRows& one : sequences)
      ends_.push_back(count() + ceil_div(one.*length, block) * heads);
  }

  std::int64_t count() const { return ends_.empty() ? 0 : ends_.back(); }

  BackwardTask task(std::int64_t index) const {
    const std::size_t b = std::upper_bound(ends_.begin(), ends_.end(), index) - ends_.begin();
    if (b > 0) index -= ends_[b - 1];
    BackwardTask task;
    task.sequence = sequences_[b];
    const std::int64_t blocks = ceil_div(task.sequence.*length_, block_);
    task.head = index / blocks;
    task.begin = index % blocks * block_;
    return task;
  }

 private:
  const std::vector<SequenceRows>& sequences_;
  const std::int64_t heads_, block_;
  std::int64_t SequenceRows::* const length_;
  std::vector<std::int64_t> ends_;  // behind the last block of each sequence
};

// The number of tasks from which on the threads of most machines are busy.
constexpr std::int64_t kManyTasks = 16;

// The KV heads of all batch entries; where there are kManyTasks or more, any number of these.
std::int64_t heads_up_to_many(const AttentionParams& p) {
  return std::min(p.batch_size, kManyTasks) * std::min(p.num_heads_kv, kManyTasks);
}

// Into how many parts the queries that share a KV head are divided, each of which has sums for dk
// and dv of its own. By the shape alone, whatever the threads, so that the bits do not depend on
// them; and one where they must not depend on the batch either.
std::int64_t num_parts(const BackwardParams& b, const Options& options, std::int64_t block_m) {
  const AttentionParams& p = b.forward;
  if (options.batch_invariant || b.deterministic) return 1;
  const std::int64_t heads = std::max<std::int64_t>(1, heads_up_to_many(p));
  const std::int64_t tiles = ceil_div(p.seqlen_q, block_m) * (p.num_heads / p.num_heads_kv);
  return std::clamp<std::int64_t>(ceil_div(kManyTasks, heads), 1, std::max<std::int64_t>(1, tiles));
}

// Sums of dk and dv take at most this much memory: 32,768 keys of 16 heads at head_dim 64.
constexpr std::int64_t kMostSumBytes = std::int64_t{1} << 28;

// The sums of dk and dv, for all keys of a head each, if dq, dk and dv are computed together, by
// tasks that own a head or a part of one. None: by other tasks, with the same bits.
struct Sums {
  std::int64_t count = 0;
  std::int64_t bytes = 0;  // of each
};
Sums sums_of(const BackwardParams& b, const BackwardKernels& kernels, std::int64_t parts,
             int threads, std::int64_t keys) {
  const std::int64_t heads = heads_up_to_many(b.forward);
  const bool wanted = b.dq.data && (b.dk.data || b.dv.data) && !b.dalibi_slopes.data;
  if (!wanted || heads == 0 || (parts == 1 && heads < kManyTasks)) return {};
  const Sums sums{parts > 1 ? heads * parts : threads, kernels.sums_bytes(b, keys)};
  return sums.bytes > kMostSumBytes / sums.count ? Sums{} : sums;
}

// dbias has one element along a dimension of stride 0.
BiasDims dims_of(const BackwardParams& b) {
  const AttentionParams& p = b.forward;
  const auto has = [](std::int64_t stride, std::int64_t size) { return stride != 0 || size == 1; };
  return {has(b.dbias.batch_stride, p.batch_size), has(b.dbias.head_stride, p.num_heads),
          has(b.dbias.row_stride, p.seqlen_q), has(b.dbias.col_stride, p.seqlen_k)};
}

// Whether the owners of queries, who meet each score once, write dbias: an element for each.
bool owners_write_bias(const BackwardParams& b, bool has_rows) {
  if (!b.dbias.data || !has_rows || !(b.dq.data || b.dalibi_slopes.data)) return false;
  const BiasDims dims = dims_of(b);
  const AttentionParams& p = b.forward;
  return dims.batches && dims.heads && dims.queries && dims.keys && !p.cu_seqlens_q &&
         !p.cu_seqlens_k && !p.seqused_k;
}

class Backward {
 public:
  Backward(const BackwardParams& params, const Plan& plan, Poll poll)
      : b_(params),
        p_(params.forward),
        kernels_(backward_kernels_for(plan.isa, p_.q.dtype)),
        threads_(plan.num_threads),
        parts_(plan.parts_per_head),
        poll_(poll),
        sequences_(sequences_of(p_)),
        queries_(sequences_, p_.num_heads, kernels_.block_m, &SequenceRows::len_q),
        keys_(sequences_, p_.num_heads_kv, kernels_.block_n, &SequenceRows::len_k),
        scratch_bytes_(kernels_.scratch_bytes(params)),
        sums_(sums_of(b_, kernels_, parts_, threads_, longest())),
        writes_bias_(owners_write_bias(b_, !sequences_.empty())),
        memory_(aligned_memory(static_cast<std::size_t>(
                    delta_bytes(p_) + threads_ * scratch_bytes_ + sums_.count * sums_.bytes)),
                free_aligned) {}

  void run() {
    if (p_.cu_seqlens_q || p_.cu_seqlens_k) clear_rows();
    compute_delta();
    if (b_.dsinks.data) compute_sinks();
    if (sums_.count > 0) {
      compute_heads();
    } else {
      if (b_.dk.data || b_.dv.data) compute_keys();
      if (b_.dq.data || b_.dalibi_slopes.data) compute_queries();
    }
    if (b_.dbias.data && !writes_bias_) compute_bias();
  }

 private:
  template <typename Function>
  void each(std::int64_t count, const Function& function) {
    each_of_worker(count,
                   [&](std::int64_t index, int, char* scratch) { function(index, scratch); });
  }

  template <typename Function>
  void each_of_worker(std::int64_t count, const Function& function) {
    parallel_for(
        count, threads_,
        [&](std::int64_t index, int worker) {
          function(index, worker, memory_.get() + delta_bytes(p_) + worker * scratch_bytes_);
        },
        poll_);
  }

  const void* delta() const { return memory_.get(); }
  char* sums(std::int64_t index) const {
    return memory_.get() + delta_bytes(p_) + threads_ * scratch_bytes_ + index * sums_.bytes;
  }

  std::int64_t longest() const {
    std::int64_t keys = 0;
    for (const SequenceRows& one : sequences_) keys = std::max(keys, one.len_k);
    return keys;
  }

  // With variable length there may be rows that no sequence has.
  void clear_rows() {
    const core::TensorSizes queries = core::query_sizes(p_), keys = core::key_sizes(p_);
    const auto clear = [](const MutableTensorView& view, const core::TensorSizes& sizes,
                          std::int64_t columns) {
      if (!view.data) return;
      const std::int64_t bytes = size_of(view.dtype);
      for (std::int64_t b = 0; b < sizes.batch; ++b) {
        for (std::int64_t i = 0; i < sizes.rows; ++i) {
          for (std::int64_t h = 0; h < sizes.heads; ++h) {
            std::memset(
                static_cast<char*>(view.data) +
                    (b * view.batch_stride + i * view.row_stride + h * view.head_stride) * bytes,
                0, static_cast<std::size_t>(columns * bytes));
          }
        }
      }
    };
    clear(b_.dq, queries, p_.head_dim);
    clear(b_.dk, keys, p_.head_dim);
    clear(b_.dv, keys, p_.head_dim_v);
  }

  void compute_delta() {
    const std::int64_t rows = core::query_sizes(p_).rows, bytes = compute_bytes(p_);
    each(queries_.count(), [&](std::int64_t index, char* scratch) {
      const BackwardTask task = queries_.task(index);
      const SequenceRows& one = task.sequence;
      const std::int64_t entry = p_.cu_seqlens_q ? 0 : one.batch;
      const std::int64_t row = one.first_q + task.begin;
      const std::int64_t count = std::min<std::int64_t>(kernels_.block_m, one.len_q - task.begin);
      kernels_.delta(b_, entry, task.head, row, count, scratch,
                     memory_.get() + ((entry * p_.num_heads + task.head) * rows + row) * bytes);
    });
  }

  double delta_at(std::int64_t index) const {
    return compute_bytes(p_) == 8 ? reinterpret_cast<const double*>(memory_.get())[index]
                                  : reinterpret_cast<const float*>(memory_.get())[index];
  }

  // dsinks_h = - sum of the sink's probability times delta.
  void compute_sinks() {
    const std::int64_t rows = core::query_sizes(p_).rows;
    each(p_.num_heads, [&](std::int64_t h, char*) {
      const double sink = p_.sinks.data[h * p_.sinks.head_stride];
      double sum = 0.0;
      for (const SequenceRows& one : sequences_) {
        const std::int64_t entry = p_.cu_seqlens_q ? 0 : one.batch;
        for (std::int64_t i = one.first_q; i < one.first_q + one.len_q; ++i) {
          const double lse = p_.lse.data[entry * p_.lse.batch_stride + h * p_.lse.head_stride + i];
          if (sink == -INFINITY || lse == -INFINITY) continue;
          const double probability = sink >= lse ? 1.0 : std::exp(sink - lse);
          sum -= probability * delta_at((entry * p_.num_heads + h) * rows + i);
        }
      }
      b_.dsinks.data[h * b_.dsinks.head_stride] = static_cast<float>(sum);
    });
  }

  void compute_keys() {
    each(keys_.count(), [&](std::int64_t index, char* scratch) {
      kernels_.keys(b_, keys_.task(index), static_cast<int>(parts_), delta(), scratch);
    });
  }

  void compute_heads() {
    const std::int64_t count = static_cast<std::int64_t>(sequences_.size()) * p_.num_heads_kv;
    each_of_worker(count * parts_, [&](std::int64_t index, int worker, char* scratch) {
      HeadTask task;
      task.part = static_cast<int>(index % parts_), task.num_parts = static_cast<int>(parts_);
      task.head = index / parts_ % p_.num_heads_kv;
      task.sequence = sequences_[static_cast<std::size_t>(index / parts_ / p_.num_heads_kv)];
      if (parts_ > 1) return kernels_.head(b_, task, writes_bias_, delta(), scratch, sums(index));
      kernels_.head(b_, task, writes_bias_, delta(), scratch, sums(worker));
      for (std::int64_t key = 0; key < task.sequence.len_k; key += kernels_.block_n)
        kernels_.finish(b_, {task.sequence, task.head, key}, 1, scratch, sums(worker), sums_.bytes);
    });
    if (parts_ == 1) return;
    each(keys_.count(), [&](std::int64_t index, char* scratch) {
      const BackwardTask task = keys_.task(index);
      const std::int64_t head = task.sequence.batch * p_.num_heads_kv + task.head;
      kernels_.finish(b_, task, static_cast<int>(parts_), scratch, sums(head * parts_),
                      sums_.bytes);
    });
  }

  void compute_queries() {
    std::vector<double> parts(b_.dalibi_slopes.data ? static_cast<std::size_t>(queries_.count())
                                                    : 0);
    each(queries_.count(), [&](std::int64_t index, char* scratch) {
      const double part =
          kernels_.queries(b_, queries_.task(index), writes_bias_, delta(), scratch);
      if (!parts.empty()) parts[static_cast<std::size_t>(index)] = part;
    });
    if (b_.dalibi_slopes.data) add_slopes(parts);
  }

  void add_slopes(const std::vector<double>& parts) {
    const BasicTensorView<float>& view = b_.dalibi_slopes;
    const bool per_batch = view.batch_stride != 0 || p_.batch_size == 1;
    const bool per_head = view.head_stride != 0 || p_.num_heads == 1;
    const std::int64_t batches = per_batch ? p_.batch_size : 1;
    const std::int64_t heads = per_head ? p_.num_heads : 1;
    std::vector<double> sums(static_cast<std::size_t>(batches * heads));
    for (std::size_t i = 0; i < parts.size(); ++i) {
      const BackwardTask task = queries_.task(static_cast<std::int64_t>(i));
      const std::int64_t b = per_batch ? task.sequence.batch : 0, h = per_head ? task.head : 0;
      sums[static_cast<std::size_t>(b * heads + h)] += parts[i];
    }
    for (std::int64_t b = 0; b < batches; ++b) {
      for (std::int64_t h = 0; h < heads; ++h) {
        view.data[b * view.batch_stride + h * view.head_stride] =
            static_cast<float>(sums[static_cast<std::size_t>(b * heads + h)]);
      }
    }
  }

  void compute_bias() {
    const BiasDims dims = dims_of(b_);
    const std::int64_t query_tiles = dims.queries ? ceil_div(p_.seqlen_q, kernels_.block_m) : 1;
    const std::int64_t key_tiles = dims.keys ? ceil_div(p_.seqlen_k, kernels_.block_n) : 1;
    const std::int64_t batches = dims.batches ? p_.batch_size : 1;
    const std::int64_t heads = dims.heads ? p_.num_heads : 1;
    each(batches * heads * query_tiles * key_tiles, [&](std::int64_t index, char* scratch) {
      BiasTask task;
      task.key_tile = index % key_tiles;
      task.query_tile = index / key_tiles % query_tiles;
      task.head = index / key_tiles / query_tiles % heads;
      task.batch = index / key_tiles / query_tiles / heads;
      kernels_.bias(b_, task, dims, sequences_.data(), delta(), scratch);
    });
  }

  const BackwardParams& b_;
  const AttentionParams& p_;
  const BackwardKernels& kernels_;
  const int threads_;
  const std::int64_t parts_;
  const Poll poll_;
  const std::vector<SequenceRows> sequences_;
  const Blocks queries_, keys_;
  const std::int64_t scratch_bytes_;
  const Sums sums_;
  const bool writes_bias_;  // beside dq; else by tasks of its own
  const std::unique_ptr<char, void (*)(void*)> memory_;
};

}  // namespace

void plan(const BackwardParams& params, const DeviceInfo& device, const Options& options,
          Plan* plan) {
  const AttentionParams& p = params.forward;
  check_num_threads(options.num_threads);
  check_memory(p);
  const BackwardKernels& kernels = backward_kernels_for(device.isa, p.q.dtype);
  plan->isa = device.isa;
  plan->block_m = kernels.block_m;
  plan->block_n = kernels.block_n;
  const std::int64_t by_keys = ceil_div(p.seqlen_k, plan->block_n) * p.num_heads_kv * p.batch_size;
  const std::int64_t by_queries = ceil_div(p.seqlen_q, plan->block_m) * p.num_heads * p.batch_size;
  plan->grid = std::max<std::int64_t>({by_keys, by_queries, 1});
  const int most = options.num_threads > 0 ? options.num_threads : device.num_threads;
  plan->num_threads = static_cast<int>(std::min<std::int64_t>(most, plan->grid));
  plan->parts_per_head = num_parts(params, options, plan->block_m);
  plan->workspace_bytes = delta_bytes(p) + plan->num_threads * kernels.scratch_bytes(params);
  const Sums sums = sums_of(params, kernels, plan->parts_per_head, plan->num_threads, p.seqlen_k);
  plan->workspace_bytes += sums.count * sums.bytes;
}

void backward(const BackwardParams& given, const Plan& plan, Poll poll) {
  const core::DefaultFloats floats;
  const OwnLengths lengths(given.forward);
  BackwardParams params = given;
  params.forward = lengths.params();
  Backward(params, plan, poll).run();
}

}  // namespace dlattn::cpu
