// Clocks that warp instructions keep a quarter of a multiprocessor busy, measured by clock64 on
// registers and shared memory alone, as JSON on stdout. They calibrate research/sass_model, which
// predicts GPUs that are not at hand. The last kernels are the long loop of 8-bit attention in
// small: the model is to predict them from their machine code.
//
// research/rates.py compiles this and compares.

#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <vector>

namespace {

constexpr int kTurns = 128;
constexpr int kSteps = 64;  // instructions of a turn, so that the loop's own hardly count
constexpr int kChains = 8;  // independent results, so that none waits for another

// Every instruction has a state that depends on the lane, as constants would be folded.
struct State {
  std::uint32_t x[4 * kChains];
  std::uint32_t a[6];
  std::uint32_t address;
};

__device__ State make_state(std::uint32_t smem) {
  State s;
  for (int i = 0; i < 4 * kChains; ++i)
    s.x[i] = (threadIdx.x * 2654435761u + i * 40503u) & 0x3fff3fff;
  for (int i = 0; i < 6; ++i) s.a[i] = (threadIdx.x * 2246822519u + i * 77777u) & 0x3f3f3f3f;
  s.address = smem + threadIdx.x % 32 * 16;
  return s;
}

// An instruction of a chain, and what it needs before the first.
#define DLATTN_OP(name, text, ...)                                           \
  struct name {                                                              \
    static __device__ void prepare(State&, std::uint32_t*, std::uint32_t) {} \
    static __device__ __forceinline__ void step(State& s, int chain) {       \
      std::uint32_t* x = s.x + 4 * chain;                                    \
      asm volatile(text __VA_ARGS__);                                        \
    }                                                                        \
  };

#define DLATTN_MMA(name, text)                                                              \
  DLATTN_OP(name, text " {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};", : "+r"(x[0]), \
            "+r"(x[1]), "+r"(x[2]), "+r"(x[3]) : "r"(s.a[0]), "r"(s.a[1]), "r"(s.a[2]),     \
            "r"(s.a[3]), "r"(s.a[4]), "r"(s.a[5]))

DLATTN_MMA(HmmaF32, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
DLATTN_MMA(Imma, "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32")
DLATTN_MMA(ImmaU8, "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32")
DLATTN_OP(HmmaF16,
          "mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1},{%2,%3,%4,%5},{%6,%7},{%0,%1};",
          : "+r"(x[0]), "+r"(x[1]) : "r"(s.a[0]), "r"(s.a[1]), "r"(s.a[2]), "r"(s.a[3]),
            "r"(s.a[4]), "r"(s.a[5]))

DLATTN_OP(Ffma, "fma.rn.f32 %0, %0, %1, %2;", : "+r"(x[0]) : "r"(s.a[0]), "r"(s.a[1]))
DLATTN_OP(Fadd, "add.f32 %0, %0, %1;", : "+r"(x[0]) : "r"(s.a[0]))
DLATTN_OP(Fmnmx, "max.f32 %0, %0, %1;", : "+r"(x[0]) : "r"(s.a[0]))
DLATTN_OP(Ex2, "ex2.approx.ftz.f32 %0, %0;", : "+r"(x[0]))
DLATTN_OP(Prmt, "prmt.b32 %0, %0, %1, 0x6420;", : "+r"(x[0]) : "r"(s.a[0]))
DLATTN_OP(Hfma2, "fma.rn.f16x2 %0, %0, %1, %2;", : "+r"(x[0]) : "r"(s.a[0]), "r"(s.a[1]))
DLATTN_OP(CvtF32S32, "cvt.rn.f32.s32 %0, %0;", : "+r"(x[0]))
DLATTN_OP(CvtS32F32, "cvt.rni.s32.f32 %0, %0;", : "+r"(x[0]))
DLATTN_OP(CvtF32F16,
          "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %0; cvt.f32.f16 %0, hi; }", : "+r"(x[0]))
// Two values each; the 16 bits of a result are used in full, so that nothing is cut off.
DLATTN_OP(CvtE4m3F32,
          "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f32 h, %1, %0; mov.b32 %0, {h, h}; }",
          : "+r"(x[0]) : "r"(s.a[1]))
DLATTN_OP(CvtF16E4m3,
          "{ .reg .b16 lo, hi; mov.b32 {lo, hi}, %0; cvt.rn.f16x2.e4m3x2 %0, lo; }", : "+r"(x[0]))
DLATTN_OP(PackU8, "cvt.pack.sat.u8.s32.b32 %0, %1, %2, %0;", : "+r"(x[0]) : "r"(s.a[0]),
          "r"(s.a[1]))
DLATTN_OP(RoundToU8,
          "{ .reg .s32 p, q; cvt.rni.s32.f32 p, %1; cvt.rni.s32.f32 q, %2;"
          " cvt.pack.sat.u8.s32.b32 %0, p, q, %0; }",
          : "+r"(x[0]) : "r"(s.a[0]), "r"(s.a[1]))
// Each load brings the address of the next one of its chain, or it would be left out.
struct Ldsm {
  static __device__ void prepare(State& s, std::uint32_t* smem, std::uint32_t base) {
    if (threadIdx.x < 32) smem[threadIdx.x] = base + 16 * threadIdx.x;
    for (int i = 0; i < kChains; ++i) s.x[4 * i] = s.address;
  }
  static __device__ __forceinline__ void step(State& s, int chain) {
    std::uint32_t* x = s.x + 4 * chain;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%0];"
                 : "+r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]));
  }
};

struct LdsmTrans {
  static __device__ void prepare(State& s, std::uint32_t* smem, std::uint32_t base) {
    // Lane 4 g + c gets column g of rows 2 c and 2 c + 1 of the first matrix.
    const int g = threadIdx.x / 4, c = threadIdx.x % 4;
    std::uint16_t* rows = reinterpret_cast<std::uint16_t*>(smem);
    if (threadIdx.x < 32) {
      rows[16 * c + g] = base + 16 * threadIdx.x;
      rows[16 * c + 8 + g] = 0;
    }
    for (int i = 0; i < kChains; ++i) s.x[4 * i] = s.address;
  }
  static __device__ __forceinline__ void step(State& s, int chain) {
    std::uint32_t* x = s.x + 4 * chain;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%0];"
                 : "+r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]));
  }
};

__device__ void finish(const State& s, long long begin, long long end, std::uint32_t* sink,
                       long long* clocks) {
  std::uint32_t sum = 0;
  for (int i = 0; i < 4 * kChains; ++i) sum += s.x[i];
  if (sum == 0x12345678) *sink = sum;  // which nobody can exclude
  if (threadIdx.x % 32 == 0) {
    long long* own = clocks + 2 * (blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32);
    own[0] = begin;
    own[1] = end;
  }
}

template <typename Op, int kIndependent>
__global__ void __launch_bounds__(512) rate(std::uint32_t* sink, long long* clocks) {
  __shared__ __align__(16) std::uint32_t smem[1024];
  const auto base = static_cast<std::uint32_t>(__cvta_generic_to_shared(smem));
  State s = make_state(base);
  Op::prepare(s, smem, base);
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
#pragma unroll
    for (int i = 0; i < kSteps; ++i) Op::step(s, i % kIndependent);
  }
  finish(s, begin, clock64(), sink, clocks);
}

// A tile of 64 keys at head_dim 128 with 16 query rows a warp: 32 products, softmax without a
// maximum, P to 8 bits, V's bytes brought into order, 32 products, a sum in fp32. P V is of
// integers too, as e4m3 is not native on every GPU. Nothing is copied; addresses are all alike.
__global__ void __launch_bounds__(128, 3) tile(std::uint32_t* sink, long long* clocks) {
  extern __shared__ __align__(16) std::uint32_t tiles[];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) tiles[i] = i * 2654435761u;
  State s = make_state(static_cast<std::uint32_t>(__cvta_generic_to_shared(tiles)));
  float out[64] = {};
  float sum[2] = {};
  std::uint32_t q[4][4];
  for (int i = 0; i < 16; ++i) q[i / 4][i % 4] = s.a[i % 6] + i;
  const float scale = __uint_as_float(0x38000000u | threadIdx.x);
  const float offset = __uint_as_float(s.a[0]);
  __syncthreads();
  const long long begin = clock64();
#pragma unroll 1
  for (int turn = 0; turn < kTurns; ++turn) {
    std::uint32_t p[2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      std::int32_t scores[4][4];
#pragma unroll
      for (int n = 0; n < 16; ++n) scores[n / 4][n % 4] = 0x4b400000;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          std::uint32_t k[4];
          asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                       : "=r"(k[0]), "=r"(k[1]), "=r"(k[2]), "=r"(k[3])
                       : "r"(s.address + 512 * (8 * half + 2 * d + n)));
#pragma unroll
          for (int e = 0; e < 2; ++e)
            asm volatile(
                "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
                "{%8,%9},{%0,%1,%2,%3};"
                : "+r"(scores[2 * n + e][0]), "+r"(scores[2 * n + e][1]),
                  "+r"(scores[2 * n + e][2]), "+r"(scores[2 * n + e][3])
                : "r"(q[d][0]), "r"(q[d][1]), "r"(q[d][2]), "r"(q[d][3]), "r"(k[2 * e]),
                  "r"(k[2 * e + 1]));
        }
      }
      float e[4][4];
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        float y;
        asm("ex2.approx.ftz.f32 %0, %1;"
            : "=f"(y)
            : "f"(fmaf(__int_as_float(scores[n / 4][n % 4]), scale, offset)));
        e[n / 4][n % 4] = y;
        sum[n % 4 / 2] += y;
      }
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const float* lo = e[r / 2 * 2] + r % 2 * 2;
        const float* hi = e[r / 2 * 2 + 1] + r % 2 * 2;
        asm("{ .reg .b16 l, h; cvt.rn.satfinite.e4m3x2.f32 l, %2, %1;"
            " cvt.rn.satfinite.e4m3x2.f32 h, %4, %3; mov.b32 %0, {l, h}; }"
            : "=r"(p[half][r])
            : "f"(lo[0]), "f"(lo[1]), "f"(hi[0]), "f"(hi[1]));
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      std::int32_t part[2][4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t v[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
                     : "r"(s.address + 512 * (16 + 2 * n + half)));
#pragma unroll
        for (int odd = 0; odd < 2; ++odd) {
          const std::uint32_t select = odd ? 0x7531 : 0x6420;
          const std::uint32_t b0 = __byte_perm(v[0], v[1], select);
          const std::uint32_t b1 = __byte_perm(v[2], v[3], select);
          asm volatile(
              "mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3},{%4,%5,%6,%7},"
              "{%8,%9},{%0,%1,%2,%3};"
              : "+r"(part[odd][0]), "+r"(part[odd][1]), "+r"(part[odd][2]), "+r"(part[odd][3])
              : "r"(p[half][0]), "r"(p[half][1]), "r"(p[half][2]), "r"(p[half][3]), "r"(b0),
                "r"(b1));
        }
      }
#pragma unroll
      for (int i = 0; i < 8; ++i)
        out[8 * n + i] = fmaf(__int_as_float(part[i / 4][i % 4]), scale, out[8 * n + i]);
    }
  }
  const long long end = clock64();
  for (int i = 0; i < 32; ++i) s.x[i] = __float_as_uint(out[i]) + __float_as_uint(out[32 + i]);
  s.x[0] += __float_as_uint(sum[0] + sum[1]);
  finish(s, begin, end, sink, clocks);
}

std::uint32_t* g_sink;
long long* g_clocks;
int g_num_sms;

void check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// Clocks from a multiprocessor's first warp to its last: the median over blocks, where each has
// a multiprocessor to itself, or of the multiprocessor's time where several share it.
template <typename Kernel>
double clocks_of(Kernel kernel, int blocks_per_sm, int warps, int smem) {
  const int blocks = blocks_per_sm * g_num_sms;
  std::vector<long long> found(2 * blocks * warps);
  for (int repetition = 0; repetition < 3; ++repetition) {  // the first loads the code
    kernel<<<blocks, 32 * warps, smem>>>(g_sink, g_clocks);
    check(cudaGetLastError());
    check(cudaMemcpy(found.data(), g_clocks, found.size() * sizeof(long long),
                     cudaMemcpyDeviceToHost));
  }
  std::vector<long long> spans;
  for (int block = 0; block < blocks; ++block) {
    long long first = found[2 * block * warps], last = 0;
    for (int w = 0; w < warps; ++w) {
      first = std::min(first, found[2 * (block * warps + w)]);
      last = std::max(last, found[2 * (block * warps + w) + 1]);
    }
    spans.push_back(last - first);
  }
  std::nth_element(spans.begin(), spans.begin() + spans.size() / 2, spans.end());
  return static_cast<double>(spans[spans.size() / 2]);
}

bool g_first = true;

template <typename Op>
void measure(const char* name) {
  std::printf("%s\n  {\"name\": \"%s\", \"clocks\": {", g_first ? "" : ",", name);
  g_first = false;
  constexpr double kInstructions = kTurns * kSteps;
  for (int warps : {4, 8, 16}) {
    const double clocks = clocks_of(rate<Op, kChains>, 1, warps, 0);
    std::printf("%s\"%d\": %.3f", warps == 4 ? "" : ", ", warps / 4,
                clocks / kInstructions / (warps / 4));
  }
  const double latency = clocks_of(rate<Op, 1>, 1, 1, 0) / kInstructions;
  std::printf("}, \"latency\": %.3f}", latency);
}

#define DLATTN_MEASURE(Op) measure<Op>(#Op)

}  // namespace

int main() {
  cudaDeviceProp device{};
  check(cudaGetDeviceProperties(&device, 0));
  g_num_sms = device.multiProcessorCount;
  check(cudaMalloc(&g_sink, 4));
  check(cudaMalloc(&g_clocks, 2 * sizeof(long long) * 16 * 4 * g_num_sms));
  std::printf("{\"gpu\": \"%s\", \"num_sms\": %d, \"instructions\": [", device.name, g_num_sms);
  DLATTN_MEASURE(HmmaF32);
  DLATTN_MEASURE(HmmaF16);
  DLATTN_MEASURE(Imma);
  DLATTN_MEASURE(ImmaU8);
  DLATTN_MEASURE(Ffma);
  DLATTN_MEASURE(Fadd);
  DLATTN_MEASURE(Fmnmx);
  DLATTN_MEASURE(Ex2);
  DLATTN_MEASURE(Prmt);
  DLATTN_MEASURE(Hfma2);
  DLATTN_MEASURE(CvtF32S32);
  DLATTN_MEASURE(CvtS32F32);
  DLATTN_MEASURE(CvtF32F16);
  DLATTN_MEASURE(CvtE4m3F32);
  DLATTN_MEASURE(CvtF16E4m3);
  DLATTN_MEASURE(PackU8);
  DLATTN_MEASURE(RoundToU8);
  DLATTN_MEASURE(Ldsm);
  DLATTN_MEASURE(LdsmTrans);
  std::printf("],\n \"tile\": {");
  const int smem = 70 * 1024;  // so that no more blocks share a multiprocessor than are asked for
  check(cudaFuncSetAttribute(tile, cudaFuncAttributeMaxDynamicSharedMemorySize, smem));
  for (int blocks = 1; blocks <= 3; ++blocks)
    std::printf("%s\"%d\": %.1f", blocks == 1 ? "" : ", ", blocks,
                clocks_of(tile, blocks, 4, smem) / kTurns);
  std::printf("}}\n");
  return 0;
}
