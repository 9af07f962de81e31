#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/ptx/elements.cuh"
#include "cuda/ptx/smem.cuh"

// Matrix products of a warpgroup: 4 warps, the first of them with a number divisible by 4. They run
// asynchronously: those since the last commit form a group, and until a wait has covered it nobody
// may touch the accumulators, the registers of operand a or, in shared memory, the operands.
namespace dlattn::ptx {

// PTX ISA, "Asynchronous warpgroup-level matrix multiply-accumulate: Matrix Descriptor". Where an
// operand lies in shared memory, in rows of 128 bytes whose 16-byte chunks are swizzled as TMA does
// (chunk c of row r stands at c ^ r % 8); `first` is the address of its first element, in a tile
// whose address is a multiple of 1024. Eight rows, 1024 bytes, follow each other. In an operand of
// 16-bit elements whose rows run along M or N ("transposed") and which is wider than 64 elements,
// `block_bytes` lead from a block of 64 columns to the next.
__device__ __forceinline__ std::uint64_t wgmma_descriptor(SmemAddress first, int block_bytes) {
  constexpr std::uint64_t kSwizzle128 = std::uint64_t{1} << 62;
  constexpr std::uint64_t kEightRows = std::uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | static_cast<std::uint64_t>(block_bytes >> 4) << 16 |
         (first & 0x3ffff) >> 4;
}

// The descriptor of what lies `bytes` further in the same tile.
__device__ __forceinline__ std::uint64_t wgmma_advance(std::uint64_t descriptor, int bytes) {
  return descriptor + static_cast<std::uint64_t>(bytes >> 4);
}

// PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.fence". Before the first
// product, and before one whose registers other instructions have written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.commit_group".
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.wait_group". Waits until at
// most kPending of the latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// The accumulators as operands %0 on, 32 at a time.
#define DLATTN_REGISTERS_0_TO_7 "%0, %1, %2, %3, %4, %5, %6, %7"
#define DLATTN_REGISTERS_0_TO_15 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define DLATTN_REGISTERS_0                                                 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define DLATTN_REGISTERS_32                                                          \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define DLATTN_REGISTERS_64                                                          \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define DLATTN_REGISTERS_96                                                                      \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define DLATTN_REGISTERS_32_TO_47 \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define DLATTN_ACCUMULATORS_4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define DLATTN_ACCUMULATORS_8(d, i) DLATTN_ACCUMULATORS_4(d, i), DLATTN_ACCUMULATORS_4(d, (i) + 4)
#define DLATTN_ACCUMULATORS_16(d, i)                              \
  DLATTN_ACCUMULATORS_4(d, i), DLATTN_ACCUMULATORS_4(d, (i) + 4), \
      DLATTN_ACCUMULATORS_4(d, (i) + 8), DLATTN_ACCUMULATORS_4(d, (i) + 12)
#define DLATTN_ACCUMULATORS_32(d, i) \
  DLATTN_ACCUMULATORS_16(d, i), DLATTN_ACCUMULATORS_16(d, (i) + 16)
#define DLATTN_ACCUMULATORS_48(d) DLATTN_ACCUMULATORS_32(d, 0), DLATTN_ACCUMULATORS_16(d, 32)
#define DLATTN_ACCUMULATORS_64(d) DLATTN_ACCUMULATORS_32(d, 0), DLATTN_ACCUMULATORS_32(d, 32)
#define DLATTN_ACCUMULATORS_96(d) DLATTN_ACCUMULATORS_64(d), DLATTN_ACCUMULATORS_32(d, 64)
#define DLATTN_ACCUMULATORS_128(d) DLATTN_ACCUMULATORS_96(d), DLATTN_ACCUMULATORS_32(d, 96)

// PTX ISA, "Asynchronous Multiply-and-Accumulate Instruction: wgmma.mma_async". d = a b, or d += a
// b if `accumulate`, with fp32 accumulators; a is 64 x K, b K x N, d 64 x N, with N twice the
// length of the array d and K 32 bytes of elements. Warp w of the group has rows 16 w .. 16 w + 15
// of d and a: in d[4 j] .. d[4 j + 3], columns 8 j and on as in d of mma_m16n8k16, and a as in its
// a. With e4m3 a register of a holds four elements, k = 4 (l % 4) and on of lane l, where a 16-bit
// type has two. Accumulators of e4m3 have 13 bits of fraction; what is smaller is cut off.
//   wgmma_ss: both operands in shared memory. Rows of a and b run along K unless they are
//             transposed, which are of 16-bit elements: then along M and N.
//   wgmma_rs: a in registers.
#define DLATTN_WGMMA(count, n, registers, accumulators, i0, i1, i2, i3, i4, i5, i6)             \
  template <typename T, bool kTransposeB, bool kTransposeA = false>                             \
  __device__ __forceinline__ void wgmma_ss(float (&d)[count], std::uint64_t a, std::uint64_t b, \
                                           bool accumulate) {                                   \
    if constexpr (std::is_same_v<T, half>) {                                                    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " i2                                         \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" registers          \
                   "}, "                                                                        \
                   "" i0 ", " i1 ", p, 1, 1, " i4 ", " i3 "; }\n"                               \
                   : accumulators                                                               \
                   : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kTransposeB}),               \
                     "n"(int{kTransposeA}));                                                    \
    } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                    \
      static_assert(!kTransposeA && !kTransposeB, "rows of 8-bit operands run along K");        \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " i2                                         \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers        \
                   "}, "                                                                        \
                   "" i0 ", " i1 ", p, 1, 1; }\n"                                               \
                   : accumulators                                                               \
                   : "l"(a), "l"(b), "r"(int{accumulate}));                                     \
    } else {                                                                                    \
      static_assert(std::is_same_v<T, __nv_bfloat16>, "wgmma takes half, bfloat16 or e4m3");    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " i2                                         \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers        \
                   "}, "                                                                        \
                   "" i0 ", " i1 ", p, 1, 1, " i4 ", " i3 "; }\n"                               \
                   : accumulators                                                               \
                   : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int{kTransposeB}),               \
                     "n"(int{kTransposeA}));                                                    \
    }                                                                                           \
  }                                                                                             \
  template <typename T, bool kTransposeB>                                                       \
  __device__ __forceinline__ void wgmma_rs(float (&d)[count], const std::uint32_t (&a)[4],      \
                                           std::uint64_t b, bool accumulate) {                  \
    if constexpr (std::is_same_v<T, half>) {                                                    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " i5                                         \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.f16.f16 {" registers          \
                   "}, "                                                                        \
                   "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1, " i6 "; }\n"             \
                   : accumulators                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}),  \
                     "n"(int{kTransposeB}));                                                    \
    } else if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) {                                    \
      static_assert(!kTransposeB, "rows of 8-bit operands run along K");                        \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " i5                                         \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" n "k32.f32.e4m3.e4m3 {" registers        \
                   "}, "                                                                        \
                   "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1; }\n"                     \
                   : accumulators                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate})); \
    } else {                                                                                    \
      static_assert(std::is_same_v<T, __nv_bfloat16>, "wgmma takes half, bfloat16 or e4m3");    \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, " i5                                         \
                   ", 0;\n"                                                                     \
                   "wgmma.mma_async.sync.aligned.m64n" n "k16.f32.bf16.bf16 {" registers        \
                   "}, "                                                                        \
                   "{" i0 ", " i1 ", " i2 ", " i3 "}, " i4 ", p, 1, 1, " i6 "; }\n"             \
                   : accumulators                                                               \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int{accumulate}),  \
                     "n"(int{kTransposeB}));                                                    \
    }                                                                                           \
  }

DLATTN_WGMMA(8, "16", DLATTN_REGISTERS_0_TO_7, DLATTN_ACCUMULATORS_8(d, 0), "%8", "%9", "%10",
             "%11", "%12", "%13", "%14")
DLATTN_WGMMA(16, "32", DLATTN_REGISTERS_0_TO_15, DLATTN_ACCUMULATORS_16(d, 0), "%16", "%17", "%18",
             "%19", "%20", "%21", "%22")
DLATTN_WGMMA(32, "64", DLATTN_REGISTERS_0, DLATTN_ACCUMULATORS_32(d, 0), "%32", "%33", "%34", "%35",
             "%36", "%37", "%38")
DLATTN_WGMMA(48, "96", DLATTN_REGISTERS_0 ", " DLATTN_REGISTERS_32_TO_47, DLATTN_ACCUMULATORS_48(d),
             "%48", "%49", "%50", "%51", "%52", "%53", "%54")
DLATTN_WGMMA(64, "128", DLATTN_REGISTERS_0 ", " DLATTN_REGISTERS_32, DLATTN_ACCUMULATORS_64(d),
             "%64", "%65", "%66", "%67", "%68", "%69", "%70")
DLATTN_WGMMA(96, "192", DLATTN_REGISTERS_0 ", " DLATTN_REGISTERS_32 ", " DLATTN_REGISTERS_64,
             DLATTN_ACCUMULATORS_96(d), "%96", "%97", "%98", "%99", "%100", "%101", "%102")
DLATTN_WGMMA(128, "256",
             DLATTN_REGISTERS_0 ", " DLATTN_REGISTERS_32 ", " DLATTN_REGISTERS_64
                                ", " DLATTN_REGISTERS_96,
             DLATTN_ACCUMULATORS_128(d), "%128", "%129", "%130", "%131", "%132", "%133", "%134")

#undef DLATTN_WGMMA
#undef DLATTN_ACCUMULATORS_128
#undef DLATTN_ACCUMULATORS_96
#undef DLATTN_ACCUMULATORS_64
#undef DLATTN_ACCUMULATORS_48
#undef DLATTN_ACCUMULATORS_32
#undef DLATTN_ACCUMULATORS_16
#undef DLATTN_ACCUMULATORS_8
#undef DLATTN_ACCUMULATORS_4
#undef DLATTN_REGISTERS_96
#undef DLATTN_REGISTERS_64
#undef DLATTN_REGISTERS_32_TO_47
#undef DLATTN_REGISTERS_32
#undef DLATTN_REGISTERS_0
#undef DLATTN_REGISTERS_0_TO_15
#undef DLATTN_REGISTERS_0_TO_7

}  // namespace dlattn::ptx
