#pragma once

#include "cpu/forward/kernel.h"

// The kernels of one instruction set as forward.cpp calls them. Included by kernels_<isa>.cpp, see
// simd.h.
namespace dlattn::cpu::DLATTN_CPU_ISA {

// Calls function(T{}) with the type that is computed with.
template <typename Function>
DLATTN_INLINE void dispatch(DType dtype, Function function) {
  if (dtype == DType::kFloat64) return function(0.0);
  function(0.0f);
}

// Calls function(kernel) with the kernel of a task.
template <typename Function>
DLATTN_INLINE void with_kernel(const AttentionParams& params, const Tiles& tiles, const Task& task,
                               void* scratch, void* states, Function function) {
  dispatch(params.q.dtype, [&](auto zero) {
    TaskKernel<decltype(zero)> kernel(params, tiles, task, scratch, states);
    function(kernel);
  });
}

static void run(const AttentionParams& params, const Tiles& tiles, const Task& task, void* scratch,
                void* states) {
  with_kernel(params, tiles, task, scratch, states, [](auto& kernel) { kernel.run(); });
}

static void merge(const AttentionParams& params, const Tiles& tiles, const Task& task,
                  void* scratch, void* states) {
  with_kernel(params, tiles, task, scratch, states, [](auto& kernel) { kernel.merge(); });
}

static std::int64_t scratch_bytes(const AttentionParams& params, const Tiles& tiles) {
  std::int64_t bytes = 0;
  with_kernel(params, tiles, Task{}, nullptr, nullptr,
              [&](auto& kernel) { bytes = kernel.scratch_bytes(); });
  return bytes;
}

static std::int64_t state_bytes(const AttentionParams& params, const Tiles& tiles) {
  Arena sizes(nullptr);
  dispatch(params.q.dtype,
           [&](auto zero) { State<decltype(zero)>(params, tiles.block_m, &sizes); });
  return sizes.used();
}

static Tiles tiles(DType dtype, std::int64_t rows) {
  return dtype == DType::kFloat64 ? tiles_for<double>(rows) : tiles_for<float>(rows);
}

static const KernelSet kKernels = {tiles, scratch_bytes, state_bytes, run, merge};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
