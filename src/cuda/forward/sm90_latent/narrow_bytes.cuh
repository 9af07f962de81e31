#pragma once

#include "cuda/forward/sm90_latent/narrow_setup.cuh"
#include "cuda/ptx/ldmatrix.cuh"
#include "cuda/ptx/mma.cuh"
#include "cuda/ptx/wgmma.cuh"
#include "cuda/tile/byte_factors.cuh"
#include "cuda/tile/key_parts/parts.cuh"
#include "cuda/tile/wgmma/thread_index.cuh"

// The products of a narrow shape with keys of 8 bits. They become fp16 in registers, as operand a
// of either product: ldmatrix hands out two bytes where it would an element, and so columns of Q
// and of V are in another order.
namespace dlattn::sm90_latent {

template <int kRows, typename Byte>
struct ByteProducts {
  using Memory = Ring<kRows, 1>;
  using Place = typename Memory::Place;
  static constexpr int kScores = kRows / 2;
  static constexpr int kRowBytes = kBlockColumns;  // of a block, swizzled by TMA
  static constexpr int kSteps = 4;                 // of 16 columns, or 16 keys, in a block
  // Blocks that are in registers at a time. With 32 rows there is room for one.
  static constexpr int kAtOnce = kRows <= 16 ? 2 : 1;

  const Memory& ring;
  const int consumer;
  // The rows that a lane names to ldmatrix, of a block: a row of the warp's 16 keys, and one of 32
  // keys with the 16 columns that are the warp's.
  int of_keys, of_values;

  __device__ __forceinline__ ByteProducts(const Memory& ring, int consumer)
      : ring(ring), consumer(consumer) {
    const tile::wgmma::ThreadIndex thread;
    of_keys = chunk(thread.warp * 16 + thread.lane % 16, thread.lane / 16);
    of_values = chunk(thread.lane, thread.warp);
  }

  // S^T = K Q^T of the tile whose blocks of columns begin there, as they arrive. A lane has four
  // neighbouring columns of a key, which stand where Q has columns 2 c, 2 c + 1, 8 + 2 c and
  // 9 + 2 c.
  __device__ __forceinline__ void multiply_keys(float (&acc_s)[kScores], Place from) const {
    std::uint32_t bytes[2][4], a[kAtOnce][kSteps][4];
    const auto load = [&] {
      ring.wait_full(from);
#pragma unroll
      for (int i = 0; i < 2; ++i)  // keys 0 to 7 and 8 to 15 of a step, and of the next one
        ptx::ldmatrix_x4(bytes[i], (ring.keys(from) + of_keys) ^ (i * 32));
      from.advance();
    };
    load();
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t (&rK)[kSteps][4] = a[block % kAtOnce];
#pragma unroll
      for (int i = 0; i < 2 * kSteps; ++i) {
        std::uint32_t (&step)[4] = rK[i / 2];
        tile::Unpack<Byte>::halves(bytes[i / 4][i % 4], &step[i % 2], &step[i % 2 + 2]);
      }
      const std::uint64_t q = ptx::wgmma_descriptor(ring.q(block), 0);
      ptx::wgmma_fence();
#pragma unroll
      for (int i = 0; i < kSteps; ++i)
        ptx::wgmma_rs<__half, false>(acc_s, rK[i], ptx::wgmma_advance(q, i * 32), block + i > 0);
      ptx::wgmma_commit();
      if (block + 1 < kBlocks) load();
      ptx::wgmma_wait<kAtOnce - 1>();  // the registers of the next block are free
    }
    ptx::wgmma_wait<0>();
  }

  // O^T += V^T P^T, by products of a warp: the tensor cores take those of a warpgroup with so few
  // rows as long as ones with 64. Of 16 columns the even ones are the first eight rows of operand
  // a.
  __device__ __forceinline__ void multiply_values(float (&acc_o)[kOutBlocks][kScores],
                                                  Place from) const {
    const int lane = tile::wgmma::ThreadIndex().lane;
    constexpr int kHalves = 2, kOfHalf = kSteps / kHalves;  // of a block's keys
    std::uint32_t bytes[4], rP[kSteps][kRows / 16][4];
    const auto load = [&](int half) {  // eight keys each
      ptx::ldmatrix_x4_trans(bytes, ring.keys(from) + of_values + half * 32 * kRowBytes);
    };
    load(0);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
#pragma unroll
      for (int j = 0; j < kRows / 16; ++j) {
        const int row = 16 * j + lane / 16 * 8 + lane % 8, chunk = 2 * i + lane / 8 % 2;
        ptx::ldmatrix_x4(rP[i][j], ring.probabilities(consumer) + row * kBlockRowBytes +
                                       (chunk ^ (row % 8)) * 16);
      }
    }
#pragma unroll
    for (int n = 0; n < kHalves * kOutBlocks; ++n) {
      const int half = n % kHalves;
      std::uint32_t rV[kOfHalf][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        std::uint32_t* const step = rV[i / 2] + i % 2 * 2;
        tile::Unpack<Byte>::alternating(bytes[i], &step[0], &step[1]);
      }
      if (half == kHalves - 1) from.advance();
      if (n + 1 < kHalves * kOutBlocks) load((n + 1) % kHalves);
#pragma unroll
      for (int i = 0; i < kOfHalf; ++i) {
#pragma unroll
        for (int j = 0; j < kRows / 8; ++j) {
          float* const x = acc_o[n / kHalves] + 4 * j;
          float acc[4] = {x[0], x[1], x[2], x[3]};
          const std::uint32_t* const p = rP[half * kOfHalf + i][j / 2] + j % 2 * 2;
          ptx::mma_m16n8k16<__half>(acc, rV[i], p[0], p[1]);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = acc[e];
        }
      }
    }
    __syncwarp();  // each lane frees blocks of all lanes
  }

  // A row of Q as fp16, of which the thread has every eighth chunk of eight columns and seven
  // neighbours the others. Returns what its products count but for the keys' factor.
  template <typename Q>
  __device__ __forceinline__ static float store_query(const Q* q, int row, bool row_exists,
                                                      int head_dim) {
    const int chunk = static_cast<int>(threadIdx.x % 8);
    tile::Vec<Q, 8> x[kBlocks];
    float largest = 0.0f;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int column = block * kBlockColumns + chunk * 8;
      memset(&x[block], 0, sizeof x[block]);
      if (row_exists && column < head_dim)
        x[block] = *reinterpret_cast<const tile::Vec<Q, 8>*>(q + column);
#pragma unroll
      for (int i = 0; i < 8; ++i) largest = fmaxf(largest, fabsf(tile::to_float(x[block].x[i])));
    }
    const tile::HalfScale scale(tile::reduce_max<8>(largest));
    constexpr bool kIsHalf = std::is_same_v<Q, __half>;
    unsigned char* const to = ptx::dynamic_smem() + row * kBlockRowBytes + chunk % 2 * 8;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      std::uint32_t words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (kIsHalf) {
          memcpy(&words[i], &x[block].x[2 * i], sizeof words[i]);
        } else {
          words[i] = tile::pack<__half>(tile::to_float(x[block].x[2 * i]) * scale.of_elements,
                                        tile::to_float(x[block].x[2 * i + 1]) * scale.of_elements);
        }
      }
      using Words = tile::Vec<std::uint32_t, 2>;
      unsigned char* const of_block = to + block * kRows * kBlockRowBytes;
      const int low = chunk - chunk % 2;
      *reinterpret_cast<Words*>(of_block + (low ^ (row % 8)) * 16) = {words[0], words[2]};
      *reinterpret_cast<Words*>(of_block + ((low + 1) ^ (row % 8)) * 16) = {words[1], words[3]};
    }
    return kIsHalf ? 1.0f : scale.of_products;
  }

 private:
  // Where a chunk of a row of a block is.
  __device__ __forceinline__ static int chunk(int row, int chunk) {
    return row * kRowBytes + (chunk ^ (row / 2 % 4)) * 16;
  }
};

}  // namespace dlattn::sm90_latent
