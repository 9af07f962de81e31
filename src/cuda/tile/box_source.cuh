#pragma once

#include "cuda/plan/tensor_box.h"
#include "cuda/ptx/tma.cuh"

// Where TMA finds the rows of one head of a sequence, in tensors that plan/tensor_box.h describes.
// A caller that loads or stores a box names a row of the sequence and a column.
namespace dlattn::tile {

// Fixed lengths: a sequence is a batch entry.
struct StridedBoxes {
  int head, batch;

  __device__ __forceinline__ void load(ptx::SmemAddress to, const ptx::TensorMap& map,
                                       ptx::SmemAddress mbarrier, int column, int row) const {
    ptx::tma_load(to, map, mbarrier, {column, row, head, batch});
  }
  __device__ __forceinline__ void store(const ptx::TensorMap& map, ptx::SmemAddress from,
                                        int column, int row) const {
    ptx::tma_store(map, from, {column, row, head, batch});
  }
};

// Varlen: `length` rows from `start` on, of a tensor described by varlen_box().
struct VarlenBoxes {
  int head, start, length;

  __device__ __forceinline__ void load(ptx::SmemAddress to, const ptx::TensorMap& map,
                                       ptx::SmemAddress mbarrier, int column, int row) const {
    ptx::tma_load(to, map, mbarrier, at(column, row), kEnd);
  }
  __device__ __forceinline__ void store(const ptx::TensorMap& map, ptx::SmemAddress from,
                                        int column, int row) const {
    ptx::tma_store(map, from, at(column, row), kEnd);
  }

 private:
  static constexpr int kEnd = static_cast<int>(cuda::kVarlenEnd);

  __device__ __forceinline__ ptx::BoxAt at(int column, int row) const {
    return {column, kEnd - (length - row), head, start + length};
  }
};

// The boxes of a sequence whose rows of this tensor begin at `start` and are `length`.
template <bool kVarlen>
__device__ __forceinline__ auto box_source(int head, int batch, int start, int length) {
  if constexpr (kVarlen) {
    return VarlenBoxes{head, start, length};
  } else {
    return StridedBoxes{head, batch};
  }
}

}  // namespace dlattn::tile
