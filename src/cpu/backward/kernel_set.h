#pragma once

#include "cpu/backward/kernel.h"

// The kernels of one instruction set as backward.cpp calls them. Included by kernels_<isa>.cpp, see
// simd.h.
namespace dlattn::cpu::DLATTN_CPU_ISA {

template <typename T>
static std::int64_t backward_scratch_bytes(const BackwardParams& params) {
  return BackwardKernel<T>(params, nullptr, nullptr).scratch_bytes();
}

// In double, by several sums at once, as each waits for its last addition.
template <typename T>
static double dot(const T* x, const T* y, std::int64_t count) {
  constexpr int kSums = 16;
  double sums[kSums] = {};
  std::int64_t i = 0;
  for (; i + kSums <= count; i += kSums) {
    for (int c = 0; c < kSums; ++c)
      sums[c] += static_cast<double>(x[i + c]) * static_cast<double>(y[i + c]);
  }
  for (int c = 0; i < count; ++i, ++c)
    sums[c] += static_cast<double>(x[i]) * static_cast<double>(y[i]);
  for (int step = kSums / 2; step > 0; step /= 2) {
    for (int c = 0; c < step; ++c) sums[c] += sums[c + step];
  }
  return sums[0];
}

template <typename T>
static void backward_delta(const BackwardParams& b, std::int64_t batch, std::int64_t head,
                           std::int64_t begin, std::int64_t count, void* scratch, void* delta) {
  const AttentionParams& p = b.forward;
  const std::int64_t columns = p.head_dim_v;
  T* const dout = static_cast<T*>(scratch);
  T* const out = dout + (columns + kWidth<T> - 1) / kWidth<T> * kWidth<T>;
  for (std::int64_t row = begin; row < begin + count; ++row) {
    double sum = 0.0;
    if (b.dout.data) {
      TensorView results;
      results.data = p.out.data, results.dtype = p.out.dtype;
      results.batch_stride = p.out.batch_stride, results.row_stride = p.out.row_stride;
      results.head_stride = p.out.head_stride;
      read_row(b.dout, batch, row, head, columns, dout);
      read_row(results, batch, row, head, columns, out);
      sum = dot(dout, out, columns);
    }
    if (b.dlse.data) {
      sum -= b.dlse.data[batch * b.dlse.batch_stride + head * b.dlse.head_stride +
                         row * b.dlse.row_stride];
    }
    static_cast<T*>(delta)[row - begin] = static_cast<T>(sum);
  }
}

template <typename T>
static void backward_keys(const BackwardParams& params, const BackwardTask& task, int num_parts,
                          const void* delta, void* scratch) {
  BackwardKernel<T>(params, static_cast<const T*>(delta), scratch).keys(task, num_parts);
}

template <typename T>
static std::int64_t backward_sums_bytes(const BackwardParams& params, std::int64_t keys) {
  Arena sizes(nullptr);
  KeySums<T>(params.forward, keys, &sizes);
  return sizes.used();
}

template <typename T>
static void backward_head(const BackwardParams& params, const HeadTask& task, bool writes_bias,
                          const void* delta, void* scratch, void* sums) {
  Arena memory(sums);
  BackwardKernel<T>(params, static_cast<const T*>(delta), scratch)
      .head(task, writes_bias, KeySums<T>(params.forward, task.sequence.len_k, &memory));
}

template <typename T>
static void backward_finish(const BackwardParams& params, const BackwardTask& task, int num_parts,
                            void* scratch, void* sums, std::int64_t part_bytes) {
  Arena memory(sums);
  BackwardKernel<T>(params, nullptr, scratch)
      .finish(task, KeySums<T>(params.forward, task.sequence.len_k, &memory), num_parts,
              part_bytes / static_cast<std::int64_t>(sizeof(T)));
}

template <typename T>
static double backward_queries(const BackwardParams& params, const BackwardTask& task,
                               bool writes_bias, const void* delta, void* scratch) {
  return BackwardKernel<T>(params, static_cast<const T*>(delta), scratch)
      .queries(task, writes_bias);
}

template <typename T>
static void backward_bias(const BackwardParams& params, const BiasTask& task, const BiasDims& dims,
                          const SequenceRows* sequences, const void* delta, void* scratch) {
  BackwardKernel<T>(params, static_cast<const T*>(delta), scratch).bias(task, dims, sequences);
}

template <typename T>
static const BackwardKernels kBackwardKernels = {
    kBackwardM<T>,       kBackwardN<T>,          backward_scratch_bytes<T>, backward_delta<T>,
    backward_keys<T>,    backward_sums_bytes<T>, backward_head<T>,          backward_finish<T>,
    backward_queries<T>, backward_bias<T>};

static const BackwardKernels& backward_kernels(bool is_double) {
  return is_double ? kBackwardKernels<double> : kBackwardKernels<float>;
}

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
