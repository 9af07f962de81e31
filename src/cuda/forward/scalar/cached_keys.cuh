#pragma once

#include <cuda_fp8.h>

#include <cstdint>
#include <type_traits>

#include "core/problem/descales.h"
#include "cuda/ptx/cp_async.cuh"
#include "cuda/tile/cache_source.cuh"
#include "cuda/tile/mask.cuh"
#include "cuda/tile/vec.cuh"

// Keys in a cache: where they lie is looked up row by row, and 8-bit elements become T on their way
// to shared memory, which holds each of them exactly.
namespace dlattn::scalar {

// Calls function(KV{}) with the type of the elements of K and V.
template <typename T, typename Function>
__device__ __forceinline__ void with_key_type(const AttentionParams& params, Function function) {
  if constexpr (sizeof(T) == 2) {
    if (params.k.dtype == DType::kInt8) return function(std::int8_t{});
    if (params.k.dtype == DType::kFloat8E4M3) return function(__nv_fp8_e4m3{});
  }
  function(T{});
}

// Factors of q.k and of out that stand for 8-bit keys; those of other dtypes have none.
__device__ __forceinline__ Descales key_descales(const AttentionParams& params, int batch, int head,
                                                 int head_kv) {
  if (params.k.dtype == params.q.dtype) return {1.0f, 1.0f};
  return descales_of(params, std::int64_t{batch}, std::int64_t{head}, std::int64_t{head_kv});
}

// A row of a tile, of kColumns elements, by a warp: `columns` of them from `from` on, the rest is
// zeros. `copy_bytes` divides the address and the length of the row.
template <int kColumns, typename T, typename KV>
__device__ __forceinline__ void copy_row(T* to, const KV* from, int columns, int copy_bytes) {
  const int lane = threadIdx.x % 32;
  if constexpr (!std::is_same_v<T, KV>) {
#pragma unroll 1
    for (int column = lane; column < kColumns; column += 32)
      to[column] = tile::from_float<T>(column < columns ? static_cast<float>(from[column]) : 0.0f);
  } else {
    const int count = copy_bytes / static_cast<int>(sizeof(T));
#pragma unroll 1
    for (int column = lane * count; column < kColumns; column += 32 * count) {
      const bool valid = column < columns;
      const T* const source = valid ? from + column : from;
      if (copy_bytes == 16) {
        ptx::cp_async<16>(to + column, source, valid);
      } else if (copy_bytes == 8) {
        ptx::cp_async<8>(to + column, source, valid);
      } else if (copy_bytes == 4) {
        ptx::cp_async<4>(to + column, source, valid);
      } else {
        to[column] = valid ? *source : tile::from_float<T>(0.0f);
      }
    }
  }
}

// Starts the copy of keys n0 .. n0 + kRows - 1 of a KV head, as one group; zeros for keys that are
// not `seen`, of which nothing is read: what lies there may be NaN, or not be there at all.
template <int kRows, int kHeadDim, int kLd, int kNumWarps, typename T>
__device__ __forceinline__ void start_cache_copy(T* sK, T* sV, const tile::CacheSource& source,
                                                 const AttentionParams& params, int copy_bytes,
                                                 int head_kv, int n0, const tile::Range& seen) {
  with_key_type<T>(params, [&](auto element) {
    using KV = decltype(element);
    const KV* const k = static_cast<const KV*>(params.k.data) + head_kv * params.k.head_stride;
    const KV* const v = static_cast<const KV*>(params.v.data) + head_kv * params.v.head_stride;
#pragma unroll 1
    for (int row = threadIdx.x / 32; row < kRows; row += kNumWarps) {
      const bool exists = tile::contains(seen, n0 + row);
      const tile::CacheRow at = exists ? source.find(n0 + row) : tile::CacheRow{0, 0};
      copy_row<kHeadDim>(sK + row * kLd, k + at.offset(params.k),
                         exists ? static_cast<int>(params.head_dim) : 0, copy_bytes);
      copy_row<kHeadDim>(sV + row * kLd, v + at.offset(params.v),
                         exists ? static_cast<int>(params.head_dim_v) : 0, copy_bytes);
    }
  });
  ptx::cp_async_commit();
}

}  // namespace dlattn::scalar
