#pragma once

#include <string>
#include <string_view>

#include "core/operations/operation.h"
#include "dlattn/attention.h"

// The functions that core calls in the backends. src/cuda defines the cuda functions, or
// src/cuda/no_cuda.cpp in a build without nvcc, so that callers need no #ifdef. Those of the CPU
// backend for merge and append stand beside their tables (core/operations/).
namespace dlattn::cuda {

bool compiled();
const char* toolkit_version();  // "13.0"; "" without CUDA
const char* archs();  // CMAKE_CUDA_ARCHITECTURES of this build, ';'-separated; "" without CUDA
const char* family_archs();  // of families that are for one architecture alone: "90a-real"; or ""
const char* archs_reason();  // why those; "" without CUDA
int device_count();
std::string device_status();
const DeviceInfo& device_info(int index);  // cached; throws DeviceError
int device_of(const void* pointer);        // as cuda_device_of; there is a device
void wait_for_stream(int device, void* stream, void* earlier);

// Enqueues one kernel: `launch`, which is one of `plan`.
template <typename Params>
using Launcher = void (*)(const Params& params, const Plan& plan, const Launch& launch,
                          void* stream);
// The launcher of an instance that instances.cmake lists for the operation that takes Params; null
// in a build that lacks it.
template <typename Params>
Launcher<Params> find_launcher(std::string_view family, DType dtype, int head_dim_tile);

template <typename Params>
void enqueue(const Params& params, const Plan& plan, const Launch& launch, void* stream) {
  find_launcher<Params>(launch.kernel, launch.dtype, launch.head_dim_tile)(params, plan, launch,
                                                                           stream);
}

// Enqueues the launches of a plan all of which take the same parameters.
template <typename Params>
void enqueue(const Params& params, const Plan& plan, void* stream) {
  for (int i = 0; i < plan.num_launches(); ++i) enqueue(params, plan, plan.launch(i), stream);
}

// The same of a backward pass, beside whose own launches are those of other operations.
inline void enqueue(const BackwardParams& params, const Plan& plan, void* stream) {
  for (int i = 0; i < plan.num_launches(); ++i) {
    const Launch& launch = plan.launch(i);
    switch (launch.operation) {
      case Operation::kDelta:
        enqueue(DeltaTask{params}, plan, launch, stream);
        break;
      case Operation::kReduce:
        enqueue(ReduceTask{params}, plan, launch, stream);
        break;
      default:
        enqueue(params, plan, launch, stream);
    }
  }
}

}  // namespace dlattn::cuda

namespace dlattn::cpu {

DeviceInfo device_info();
// Fills the CPU fields of a plan.
void plan(const AttentionParams& params, const DeviceInfo& device, const Options& options,
          Plan* plan);
void forward(const AttentionParams& params, const Plan& plan, Poll poll = {});
void plan(const BackwardParams& params, const DeviceInfo& device, const Options& options,
          Plan* plan);
void backward(const BackwardParams& params, const Plan& plan, Poll poll = {});
// Takes lengths that nobody else can write to.
void quantize_kv(const QuantizeParams& params, int num_threads, Poll poll = {});

}  // namespace dlattn::cpu
