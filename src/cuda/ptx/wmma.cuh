#pragma once

#include <mma.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace dlattn::ptx {

// nvcuda::wmma::load_matrix_sync of an operand in shared memory. For half the compiler sees by
// itself that the pointer is one to shared memory and loads with ldmatrix; for bfloat16 it does
// not, and generic loads and transposes come out. So here the state space is spelt out: PTX ISA,
// "Warp-level Matrix Load Instruction: wmma.load", which loads an m16n16k16 operand of .bf16 as 4
// registers a lane, in the order in which the fragment holds them.
template <typename Use, typename T, typename Layout>
__device__ __forceinline__ void load_matrix(nvcuda::wmma::fragment<Use, 16, 16, 16, T, Layout>& to,
                                            const T* smem, unsigned ldm) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    const std::uint32_t from = static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
    std::uint32_t r[4];
    static_assert(sizeof(to.x) == sizeof(r), "a fragment of bfloat16 holds 4 registers a lane");
    if constexpr (std::is_same_v<Use, nvcuda::wmma::matrix_a>) {
      static_assert(std::is_same_v<Layout, nvcuda::wmma::row_major>, "not needed");
      asm volatile("wmma.load.a.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(from), "r"(ldm)
                   : "memory");
    } else if constexpr (std::is_same_v<Layout, nvcuda::wmma::col_major>) {
      asm volatile("wmma.load.b.sync.aligned.col.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(from), "r"(ldm)
                   : "memory");
    } else {
      asm volatile("wmma.load.b.sync.aligned.row.m16n16k16.shared.bf16 {%0, %1, %2, %3}, [%4], %5;"
                   : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                   : "r"(from), "r"(ldm)
                   : "memory");
    }
    memcpy(to.x, r, sizeof(r));
  } else {
    nvcuda::wmma::load_matrix_sync(to, smem, ldm);
  }
}

}  // namespace dlattn::ptx
