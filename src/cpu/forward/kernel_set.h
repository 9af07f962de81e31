#pragma once

#include "cpu/forward/kernel.h"

// The kernels of one instruction set as forward.cpp calls them. Included by kernel_<isa>.cpp, see
// simd.h.
namespace dlattn::cpu::DLATTN_CPU_ISA {

// Calls function(In{}) with the storage type of a dtype that q may have.
template <typename Function>
DLATTN_INLINE void dispatch(DType dtype, Function function) {
  switch (dtype) {
    case DType::kFloat16:
      return function(Half{});
    case DType::kBFloat16:
      return function(BFloat16{});
    case DType::kFloat32:
      return function(0.0f);
    case DType::kFloat64:
      return function(0.0);
    case DType::kFloat8E4M3:
      return function(Float8{});
    case DType::kInt8:
      break;  // no q's
  }
}

// Calls function(In{}, Key{}) with the storage types of q and of k and v.
template <typename Function>
DLATTN_INLINE void dispatch(const AttentionParams& p, Function function) {
  if (!is_8_bit_cache(p)) return dispatch(p.q.dtype, [&](auto in) { function(in, in); });
  const auto with_key = [&](auto in) {
    if (p.k.dtype == DType::kInt8) return function(in, Int8{});
    function(in, Float8{});
  };
  if (p.q.dtype == DType::kFloat16) return with_key(Half{});
  with_key(BFloat16{});
}

// Calls function(kernel) with the kernel of a task.
template <typename Function>
DLATTN_INLINE void with_kernel(const AttentionParams& params, const Tiles& tiles, const Task& task,
                               void* scratch, void* states, Function function) {
  dispatch(params, [&](auto in, auto key) {
    TaskKernel<decltype(in), decltype(key)> kernel(params, tiles, task, scratch, states);
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
  dispatch(params.q.dtype, [&](auto in) {
    State<typename TaskKernel<decltype(in)>::T>(params, tiles.block_m, &sizes);
  });
  return sizes.used();
}

static Tiles tiles(DType dtype, std::int64_t rows) {
  return dtype == DType::kFloat64 ? tiles_for<double>(rows) : tiles_for<float>(rows);
}

static const KernelSet kKernels = {tiles, scratch_bytes, state_bytes, run, merge};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
