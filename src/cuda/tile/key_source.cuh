#pragma once

#include <cstdint>

#include "dlattn/forward.h"

// Where the keys of a sequence lie. Code that copies K and V asks a source for the rows of a block
// of keys; nothing else knows. Sources of kernels that copy by TMA are in box_source.cuh.
namespace dlattn::tile {

// Rows of one head, counted from a sequence's first.
template <typename T>
struct RowSource {
  const T* data;
  std::int64_t stride;  // in elements

  // Offsets are 64-bit: tensors may hold more than 2^31 elements.
  __device__ __forceinline__ const T* row(std::int64_t i) const { return data + i * stride; }
};

template <typename T>
struct KeySource {
  RowSource<T> k, v;

  __device__ __forceinline__ KeySource(const AttentionParams& p, int head_kv)
      : k{static_cast<const T*>(p.k.data) + head_kv * p.k.head_stride, p.k.row_stride},
        v{static_cast<const T*>(p.v.data) + head_kv * p.v.head_stride, p.v.row_stride} {}

  // Fixed lengths: the sequence is a batch entry.
  __device__ __forceinline__ void begin_at_batch(const AttentionParams& p, int batch) {
    k.data += batch * p.k.batch_stride;
    v.data += batch * p.v.batch_stride;
  }
  // Varlen: it begins at a row of the tensor.
  __device__ __forceinline__ void begin_at_row(int start) {
    k.data += start * k.stride;
    v.data += start * v.stride;
  }
};

}  // namespace dlattn::tile
