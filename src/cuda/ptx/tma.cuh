#pragma once

#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/tensor_map.cuh"

// Copies of boxes of a tensor by the Tensor Memory Accelerator (TMA), which one thread starts for
// all. They go through the async proxy: what threads have written to shared memory it reads only
// after fence_proxy_async. Box elements beyond the tensor are zeros when loaded, and not stored.
namespace dlattn::ptx {

// Coordinates of a box's first element in a tensor of four dimensions, the contiguous one first.
struct BoxAt {
  int column, row, head, batch;
};

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor". Global to shared
// memory; its bytes, those of the whole box, count for the phase of `mbarrier` that expects them.
__device__ __forceinline__ void tma_load(SmemAddress dst, const TensorMap& map,
                                         SmemAddress mbarrier, BoxAt at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(dst),
      "l"(&map), "r"(mbarrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// The same for a tensor of five dimensions; `last`: the coordinate in the last one.
__device__ __forceinline__ void tma_load(SmemAddress dst, const TensorMap& map,
                                         SmemAddress mbarrier, BoxAt at, int last) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst),
      "l"(&map), "r"(mbarrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(last)
      : "memory");
}

// The same section, .multicast::cluster. To the same place in the shared memory of each block of
// the cluster whose bit is set in `blocks`; the bytes count for each one's own mbarrier at that
// place.
__device__ __forceinline__ void tma_load_to_blocks(SmemAddress dst, const TensorMap& map,
                                                   SmemAddress mbarrier, BoxAt at,
                                                   unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(&map), "r"(mbarrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch),
      "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// The same for a tensor of five dimensions.
__device__ __forceinline__ void tma_load_to_blocks(SmemAddress dst, const TensorMap& map,
                                                   SmemAddress mbarrier, BoxAt at, int last,
                                                   unsigned blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(&map), "r"(mbarrier), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(last),
      "h"(static_cast<unsigned short>(blocks))
      : "memory");
}

// The same section. Shared to global memory, in the thread's current bulk group.
__device__ __forceinline__ void tma_store(const TensorMap& map, SmemAddress src, BoxAt at) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(
          &map),
      "r"(src), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch)
      : "memory");
}

// The same for a tensor of five dimensions.
__device__ __forceinline__ void tma_store(const TensorMap& map, SmemAddress src, BoxAt at,
                                          int last) {
  asm volatile(
      "cp.async.bulk.tensor.5d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5, %6}], [%1];" ::
          "l"(&map),
      "r"(src), "r"(at.column), "r"(at.row), "r"(at.head), "r"(at.batch), "r"(last)
      : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.commit_group". Closes the
// thread's current bulk group.
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.wait_group". Waits until the
// thread's bulk groups have all read their shared memory, which may then be written again or given
// up by the thread block's end.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: cp.reduce.async.bulk". Adds `bytes` of fp32
// numbers in shared memory to those in global memory, each by itself, in the thread's current bulk
// group; both at multiples of 16 bytes, of which there is a multiple too.
__device__ __forceinline__ void bulk_reduce_add(float* to, SmemAddress src, int bytes) {
  asm volatile(
      "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(to),
      "r"(src), "r"(bytes)
      : "memory");
}

// PTX ISA, "Data Movement and Conversion Instructions: prefetch". A hint.
__device__ __forceinline__ void prefetch_tensor_map(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// PTX ISA, "Memory Consistency Model: Proxies" and "membar / fence: fence.proxy". Orders what the
// thread has read and written in shared memory before what the async proxy (TMA, wgmma)
// does there after it.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace dlattn::ptx
