#pragma once

#include "cuda/forward/sm90/ping_pong.cuh"
#include "cuda/forward/sm90/score_params.h"
#include "cuda/forward/sm90/traits.h"
#include "cuda/plan/head_groups.h"
#include "cuda/ptx/cluster.cuh"
#include "cuda/ptx/mbarrier.cuh"
#include "cuda/ptx/tensor_map.cuh"
#include "cuda/tile/ring.cuh"
#include "cuda/tile/varlen_scheduler.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

// Shared by producer and consumers: tensor maps, shared memory and the barriers between them.
namespace dlattn::sm90 {

using tile::wgmma::ThreadIndex;

// The arguments that a launch passes beside the parameters.
struct KernelArgs {
  // One box: 64 columns of a warpgroup's rows of q and out, or of a tile's keys of k and v.
  ptx::TensorMap q, k, v, out;
  unsigned num_work_tiles;  // of the whole problem
  ScoreParams score;
  ptx::TensorMap bias, mask;     // one box: a consumer's tile, of fp32 half of one
  int k_page_rows, v_page_rows;  // from one page of a cache to the next (plan/tensor_box.h)
  HeadGroups heads;              // of problems of fixed lengths without a cache
};

template <int kHeadDim, int kHeadDimV, Variant kVariant>
struct Shared {
  static constexpr TileShape kShape = tile_shape(kHeadDim, kHeadDimV, kVariant);
  static constexpr SmemMap kMap = smem_map(kHeadDim, kHeadDimV, kVariant);
  static constexpr int kRowsBytes = tile_bytes(kWarpgroupRows, kHeadDim);  // a warpgroup's, of Q
  static constexpr int kQueryBytes = row_groups(kShape) * kRowsBytes;
  static constexpr int kKeyBytes = tile_bytes(kShape.block_n, kHeadDim);
  static constexpr int kValueBytes = tile_bytes(kShape.block_n, kHeadDimV);
  static constexpr int kClusterBlocks = cluster_blocks(kVariant);

  ptx::SmemAddress base;
  tile::Ring<kShape.query_stages> queries;
  tile::Ring<kShape.num_stages> keys, values;

  __device__ __forceinline__ explicit Shared(ptx::SmemAddress base)
      : base(base),
        queries(base + kMap.mbarriers),
        keys(base + kMap.mbarriers + queries.kBytes),
        values(base + kMap.mbarriers + queries.kBytes + keys.kBytes) {}

  __device__ __forceinline__ ptx::SmemAddress q(unsigned use, int row_group) const {
    return base + kMap.q + queries.stage(use) * kQueryBytes + row_group * kRowsBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress k(unsigned use) const {
    return base + kMap.k + keys.stage(use) * kKeyBytes;
  }
  __device__ __forceinline__ ptx::SmemAddress v(unsigned use) const {
    return base + kMap.v + values.stage(use) * kValueBytes;
  }

  // The work tile that Q's rows are of. With varlen alone, where the producer looks it up.
  __device__ __forceinline__ tile::SequenceTile* work_tile(unsigned use) const {
    static_assert(sizeof(tile::SequenceTile) <= kWorkTileBytes);
    return reinterpret_cast<tile::SequenceTile*>(ptx::dynamic_smem() + kMap.work_tiles +
                                                 queries.stage(use) * kWorkTileBytes);
  }

  // The results that the second consumer of a row group hands over to the first (row_parts.cuh).
  __device__ __forceinline__ float* part(int row_group) const {
    return reinterpret_cast<float*>(ptx::dynamic_smem() + kMap.parts +
                                    row_group * part_bytes(kHeadDimV));
  }

  // Barriers of a consumer's tiles of bias and mask: [kBiasMaskStages] full, then as many empty.
  __device__ __forceinline__ ptx::SmemAddress bias_mask_mbarriers(int consumer) const {
    return base + kMap.mbarriers + queries.kBytes + keys.kBytes + values.kBytes +
           consumer * 2 * kBiasMaskStages * ptx::kMbarrierBytes;
  }

  // By all threads of the cluster, before anything else: stages are released warp by warp, but for
  // Q where results go by way of it.
  __device__ __forceinline__ void init() const {
    if (threadIdx.x == 0) {
      queries.init(kShape.num_consumers * (stores_from_registers(kHeadDim, kVariant) ? 4 : 1));
      keys.init(kClusterBlocks * row_groups(kShape) * 4);
      values.init(kClusterBlocks * row_groups(kShape) * 4);
      if constexpr (kVariant == Variant::kLoaded) {
#pragma unroll
        for (int c = 0; c < kShape.num_consumers; ++c)
          tile::Ring<kBiasMaskStages>(bias_mask_mbarriers(c)).init(4);
      }
      ptx::fence_mbarrier_init();
    }
    if constexpr (kClusterBlocks > 1) {
      ptx::cluster_sync();
    } else {
      __syncthreads();
    }
  }
};

}  // namespace dlattn::sm90
