#include "core/operations/merge.h"

#include <cmath>
#include <limits>

#include "core/util/default_floats.h"
#include "cpu/convert.h"
#include "cpu/thread_pool.h"

namespace dlattn::cpu {
namespace {

// One row of every part: its weights exp(lse_n - lse), and the merged lse.
struct Weights {
  double weight[kMaxMergeStates];
  double lse;
};

Weights weights_of_row(const MergeParams& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  constexpr double kInf = std::numeric_limits<double>::infinity();
  Weights w;
  double max = -kInf;
  for (int n = 0; n < p.num_states; ++n) {
    const double given = p.lses[n].data[b * p.lses[n].batch_stride + h * p.lses[n].head_stride +
                                        i * p.lses[n].row_stride];
    const double lse = given == kInf ? -kInf : given;  // a part without keys, either way
    w.weight[n] = lse;
    // A NaN wins, so that it reaches the result.
    if (lse > max || std::isnan(lse)) max = lse;
    if (std::isnan(max)) break;
  }
  if (max == -kInf) {
    for (int n = 0; n < p.num_states; ++n) w.weight[n] = 0.0;
    w.lse = -kInf;
    return w;
  }
  double sum = 0.0;
  for (int n = 0; n < p.num_states; ++n) {
    w.weight[n] = std::isnan(max) ? max : std::exp(w.weight[n] - max);
    sum += w.weight[n];
  }
  for (int n = 0; n < p.num_states; ++n) w.weight[n] /= sum;
  w.lse = max + std::log(sum);
  return w;
}

template <typename T>
void merge_row(const MergeParams& p, std::int64_t b, std::int64_t h, std::int64_t i) {
  const Weights w = weights_of_row(p, b, h, i);
  T* out = static_cast<T*>(p.out.data) + b * p.out.batch_stride + i * p.out.row_stride +
           h * p.out.head_stride;
  for (std::int64_t d = 0; d < p.head_dim_v; ++d) {
    double sum = 0.0;
    for (int n = 0; n < p.num_states; ++n) {
      if (w.weight[n] == 0.0) continue;  // an empty part contributes nothing, whatever it holds
      const T* part = static_cast<const T*>(p.outs[n].data) + b * p.outs[n].batch_stride +
                      i * p.outs[n].row_stride + h * p.outs[n].head_stride;
      sum += w.weight[n] * static_cast<double>(to_float(part[d]));
    }
    from_float(static_cast<decltype(to_float(T{}))>(sum), &out[d]);
  }
  p.lse.data[b * p.lse.batch_stride + h * p.lse.head_stride + i] = static_cast<float>(w.lse);
}

template <typename T>
void merge_all(const MergeParams& p, Poll poll) {
  // Enough rows a task that handing it out costs little.
  const std::int64_t rows_per_task = 1 + 65536 / (p.num_states * p.head_dim_v);
  const std::int64_t rows = p.batch_size * p.num_heads * p.seqlen_q;
  const std::int64_t num_tasks = (rows + rows_per_task - 1) / rows_per_task;
  const int num_threads = num_tasks > 1 ? dlattn::device_info(p.device).num_threads : 1;
  const auto merge_rows = [&](std::int64_t task, int) {
    const std::int64_t begin = task * rows_per_task;
    const std::int64_t end = begin + rows_per_task < rows ? begin + rows_per_task : rows;
    for (std::int64_t row = begin; row < end; ++row) {
      const std::int64_t i = row % p.seqlen_q, h = row / p.seqlen_q % p.num_heads;
      merge_row<T>(p, row / p.seqlen_q / p.num_heads, h, i);
    }
  };
  parallel_for(num_tasks, num_threads, merge_rows, poll);
}

}  // namespace

void merge_states(const MergeParams& params, Poll poll) {
  const core::DefaultFloats floats;
  switch (params.out.dtype) {
    case DType::kFloat16:
      return merge_all<Half>(params, poll);
    case DType::kBFloat16:
      return merge_all<BFloat16>(params, poll);
    case DType::kFloat32:
      return merge_all<float>(params, poll);
    case DType::kFloat64:
      return merge_all<double>(params, poll);
    case DType::kFloat8E4M3:
    case DType::kInt8:
      break;  // validate refuses it
  }
}

}  // namespace dlattn::cpu
