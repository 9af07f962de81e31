#pragma once

#include <cuda_fp8.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "../cpp/devices.h"
#include "attention_case.h"
#include "compare.h"
#include "core/plan/plan.h"
#include "core/validate/validate.h"
#include "cuda/plan/launch_shape.h"
#include "harness/launch.h"
#include "random_cases.h"

// Runs one family's kernels on cases and compares with float64. A family's test includes this and
// its kernel, and tells Tests how to run kernel<T, tile>.
namespace simt {

#if defined(SIMT_TSAN)
constexpr bool kThreadSanitizer = true;
#else
constexpr bool kThreadSanitizer = false;
#endif

// Whether each sequence of a batch is run by itself too, for the same bits.
#if defined(SIMT_TSAN) || (defined(SIMT_ASAN) && !defined(SIMT_ALL_ORDERS))
constexpr bool kSequencesAlone = false;
#else
constexpr bool kSequencesAlone = true;
#endif

// Races are races in any order; other bugs may need one, and each order is in one of the builds.
inline std::vector<Schedule> schedules() {
#if defined(SIMT_TSAN)
  return {3};
#elif defined(SIMT_ASAN) && defined(SIMT_ALL_ORDERS)
  return {1, 2};
#elif defined(SIMT_ASAN)
  return {2};
#elif defined(SIMT_ALL_ORDERS)
  return {0, 1, 2, 3};
#else
  return {0, 1};
#endif
}

// The devices that plans are made for: sm_89, 99 KB of shared memory, and sm_90, 227 KB.
inline dlattn::DeviceInfo ada() {
  return test::gpu("NVIDIA L4", 8, 9, 58, 101376);
}
inline dlattn::DeviceInfo hopper() {
  return test::gpu("NVIDIA H200", 9, 0, 132, 232448);
}

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<__half> {
  static constexpr dlattn::DType value = dlattn::DType::kFloat16;
};
template <>
struct DTypeOf<__nv_bfloat16> {
  static constexpr dlattn::DType value = dlattn::DType::kBFloat16;
};
template <>
struct DTypeOf<__nv_fp8_e4m3> {
  static constexpr dlattn::DType value = dlattn::DType::kFloat8E4M3;
};
template <>
struct DTypeOf<std::int8_t> {
  static constexpr dlattn::DType value = dlattn::DType::kInt8;
};
template <>
struct DTypeOf<float> {
  static constexpr dlattn::DType value = dlattn::DType::kFloat32;
};

// The largest tile of head_dim that builds with a sanitizer have, whose compilation and runs are
// most of the tests' time. Larger ones differ in lengths of loops and numbers of stages; they are
// for SIMT_ALL_TILES, of the nightly run. A test of which most cases have a larger one says so.
#if !defined(SIMT_SANITIZED_TILE)
#define SIMT_SANITIZED_TILE 96
#endif

// Whether this build has the instance of a dtype and a tile of head_dim. Each has a tile in one
// 16-bit dtype alone: where that is float16 under AddressSanitizer it is bfloat16 in the others.
// SIMT_ALL_INSTANCES leaves all of them, SIMT_TILE a single tile.
constexpr bool is_built([[maybe_unused]] dlattn::DType dtype, [[maybe_unused]] int tile) {
#if defined(SIMT_TILE)
  return dtype != dlattn::DType::kBFloat16 && dtype != dlattn::DType::kFloat32 && tile == SIMT_TILE;
#elif defined(SIMT_ALL_INSTANCES)
  return true;
#else
#if (defined(SIMT_ASAN) || defined(SIMT_TSAN)) && !defined(SIMT_ALL_TILES)
  if (tile > SIMT_SANITIZED_TILE) return false;
#endif
#if defined(SIMT_ASAN)
  const bool in_float16 = tile / 64 % 2 == 1;
#else
  const bool in_float16 = tile / 64 % 2 == 0;
#endif
  return dtype != (in_float16 ? dlattn::DType::kBFloat16 : dlattn::DType::kFloat16);
#endif
}

// Calls run(tile) with the instance of instances.cmake that a plan names by its head_dim_tile, as a
// compile-time constant. It must be one that is built.
template <const std::string_view& kFamily, typename T, typename Run>
void with_instance(int head_dim_tile, Run run) {
#define DLATTN_INSTANCE(operation, family, space, dtype, tile)                     \
  if constexpr (dlattn::Operation::operation == dlattn::Operation::kForward &&     \
                #family == kFamily && dlattn::DType::dtype == DTypeOf<T>::value && \
                is_built(DTypeOf<T>::value, tile)) {                               \
    if (head_dim_tile == tile) return run(std::integral_constant<int, tile>{});    \
  }
#include "instances.inc"
#undef DLATTN_INSTANCE
  die("no instance for head_dim_tile %d", head_dim_tile);
}

// As the plain computation rounds. 8-bit probabilities have their full range, up to `largest`.
template <typename T, typename Out>
reference::Rounding plain_rounding(float largest) {
  return {[](float x) { return static_cast<float>(static_cast<T>(x)); },
          [](float x) { return static_cast<float>(static_cast<Out>(x)); },
          sizeof(T) == 1 ? largest : 0.0f, sizeof(T) == 1};
}

// `problem_of(batch, head)`: what the reference computes.
template <typename T, typename Out, typename ProblemOf>
Errors compare(const Case& c, const Tensors<T, Out>& t, const reference::Rounding& rounding,
               ProblemOf problem_of) {
  Errors e;
  for (int batch = 0; batch < c.batch_size; ++batch) {
    for (int head = 0; head < c.num_heads; ++head)
      compare_head(c, t, batch, head, problem_of(batch, head), rounding, &e);
  }
  return e;
}

// Whether out and lse are untouched where they belong to no sequence.
template <typename T, typename Out>
bool other_rows_intact(const Case& c, const Tensors<T, Out>& t) {
  const auto is_poison = [](const auto& x) {
    const auto* bytes = reinterpret_cast<const unsigned char*>(&x);
    return std::all_of(bytes, bytes + sizeof x, [](unsigned char byte) { return byte == 0xFF; });
  };
  for (int row = 0; c.varlen() && row < c.total_q; ++row) {
    if (c.owners(row) > 0) continue;
    for (int h = 0; h < c.num_heads; ++h) {
      if (!is_poison(t.lse.at(0, h, row, 0))) return false;
      for (int d = 0; d < c.dim_v(); ++d) {
        if (!is_poison(t.out.at(0, row, h, d))) return false;
      }
    }
  }
  return true;
}

// Sequence `b` of a batch or a varlen batch as a problem of its own, at the same addresses.
template <typename T, typename Out>
dlattn::AttentionParams alone(const Case& c, const dlattn::AttentionParams& all, int b) {
  dlattn::AttentionParams p = all;
  p.batch_size = 1, p.seqlen_q = c.rows_q(b), p.seqlen_k = c.rows_k(b);
  p.cu_seqlens_q = p.cu_seqlens_k = p.seqused_k = nullptr;
  const int entry = c.batch_index(b), start_q = c.start_q(b), start_k = c.start_k(b);
  p.q.data = static_cast<const T*>(p.q.data) + entry * p.q.batch_stride + start_q * p.q.row_stride;
  p.k.data = static_cast<const T*>(p.k.data) + entry * p.k.batch_stride + start_k * p.k.row_stride;
  p.v.data = static_cast<const T*>(p.v.data) + entry * p.v.batch_stride + start_k * p.v.row_stride;
  p.out.data =
      static_cast<Out*>(p.out.data) + entry * p.out.batch_stride + start_q * p.out.row_stride;
  if (p.lse.data) p.lse.data += entry * p.lse.batch_stride + start_q;
  if (p.bias.data) {
    const std::int64_t bytes = b * p.bias.batch_stride * dlattn::size_of(p.bias.dtype);
    p.bias.data = static_cast<const char*>(p.bias.data) + bytes;
  }
  if (p.mask.data) p.mask.data += b * p.mask.batch_stride;
  if (p.alibi_slopes.data) p.alibi_slopes.data += b * p.alibi_slopes.batch_stride;
  for (auto* descale : {&p.q_descale, &p.k_descale, &p.v_descale}) {
    if (descale->data) descale->data += b * descale->batch_stride;
  }
  return p;
}

// Has a launch start while the grid ahead of it still writes `tensors`. Others than ThreadSanitizer
// see no more of that than whether the kernel waits.
template <typename Tensors>
void start_early(Launch* launch, const Tensors& tensors) {
  launch->grid_ahead = [](void* context) {
    if (kThreadSanitizer) rewrite(*static_cast<const Tensors*>(context));
  };
  launch->grid_ahead_context = const_cast<Tensors*>(&tensors);
}

// The same for a grid behind one that waits for whoever computes lengths: it may read these before
// its own wait.
template <typename Tensors>
void start_early_behind(Launch* launch, const Tensors& tensors) {
  launch->grid_ahead = [](void* context) {
    if (kThreadSanitizer) rewrite_but_lengths(*static_cast<const Tensors*>(context));
  };
  launch->grid_ahead_context = const_cast<Tensors*>(&tensors);
}

// Ends the program, by name, where a case of a few seconds takes minutes.
class HangGuard {
 public:
  explicit HangGuard(const std::string& name) {
    std::snprintf(message_, sizeof message_, "FAIL %.400s: hangs\n", name.c_str());
    std::signal(SIGALRM, [](int) {
      [[maybe_unused]] const ssize_t n = ::write(STDOUT_FILENO, message_, std::strlen(message_));
      std::_Exit(1);
    });
    ::alarm(kSeconds);
  }
  ~HangGuard() { ::alarm(0); }
  HangGuard(const HangGuard&) = delete;
  HangGuard& operator=(const HangGuard&) = delete;

 private:
  static constexpr unsigned kSeconds = 240;
  static inline char message_[512];
};

// How a test is built, for what is compiled once for all builds.
struct Build {
  bool (*is_built)(dlattn::DType dtype, int tile);
  bool thread_sanitizer, sequences_alone;
  std::vector<Schedule> schedules;
};
inline Build this_build() {
  return {is_built, kThreadSanitizer, kSequencesAlone, schedules()};
}

// Runs cases and counts.
class Tests {
 public:
  // Runs only cases whose line contains `filter`.
  Tests(const char* family, const char* filter) : family_(family), filter_(filter) {}
  // Runs what the arguments ask for.
  Tests(const char* family, const Arguments& arguments, const dlattn::DeviceInfo& device = ada())
      : family_(family),
        filter_(arguments.filter()),
        device_(device),
        seconds_(arguments.seconds()) {}

  // For kernels whose blocks take one tile of queries after the other: no more blocks than this.
  void limit_blocks(std::int64_t most) { most_blocks_ = most; }

  // The largest 8-bit probability of the plain computation.
  void hold_to(float largest) { largest_ = largest; }

  // Plans are made for this device from now on.
  void plan_for(const dlattn::DeviceInfo& device) { device_ = device; }

  // `run_kernel(head_dim_tile, params, shape)` runs in every thread of the launch. `variant`: which
  // of the family's tile shapes; null: what the plan chooses. Problems that this one does not
  // serve, or of an instance that is not built, are passed over.
  template <typename T, typename Out = T, typename RunKernel>
  void run(std::string_view kernel, const Case& c, RunKernel run_kernel,
           const char* variant = nullptr) {
    const LaunchKernel launch_kernel = [&](Launch threads, const void* tensors, int head_dim_tile,
                                           const dlattn::AttentionParams& params,
                                           const dlattn::LaunchShape& shape) {
      start_early(&threads, *static_cast<const Tensors<T, Out>*>(tensors));
      launch(threads, [&] { run_kernel(head_dim_tile, params, shape); });
    };
    run_case<T, Out>(kernel, c, launch_kernel, variant);
  }

  void report(const std::string& name, const Errors& e, dlattn::DType dtype,
              const std::string& trouble, bool in_e4m3 = false);

  virtual ~Tests() = default;

  int finish() const;

 protected:
  using RunLaunch = std::function<void(const dlattn::AttentionParams&, const dlattn::LaunchShape&)>;

  // Calls run() with the parameters of the kernel for a problem and its plan, as the family's
  // launcher does.
  virtual void with_folded_heads(const dlattn::AttentionParams& params, const dlattn::Plan& plan,
                                 const RunLaunch& run) const;

  // The variant by which a sequence alone has the same tiles as in the batch that has this plan;
  // empty: the one that the batch was asked for.
  virtual std::string variant_of_sequences(const dlattn::Plan&) const { return {}; }

 private:
  // Every thread of a launch of the kernel, which may start while what is ahead writes the tensors.
  using LaunchKernel = std::function<void(Launch, const void*, int, const dlattn::AttentionParams&,
                                          const dlattn::LaunchShape&)>;

  // In attention_test.cpp, as are other members: compiled once, without sanitizers.
  template <typename T, typename Out>
  void run_case(std::string_view kernel, const Case& c, const LaunchKernel& launch_kernel,
                const char* variant);

  void launch_plan(const void* tensors, const dlattn::AttentionParams& params,
                   const dlattn::Plan& plan, Schedule schedule,
                   const LaunchKernel& launch_kernel) const;

  bool time_is_up() const;

  Build build_ = this_build();
  std::string family_, filter_;
  dlattn::DeviceInfo device_ = ada();
  // In the middle of two numbers, as a row's may be where its row max was not known beforehand.
  float largest_ = 272.0f;
  std::int64_t most_blocks_ = INT64_MAX;
  double seconds_ = 1e9;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
  int passed_ = 0, failed_ = 0;
};

#define SIMT_RUN_CASE(declared, T, Out)                                         \
  declared template void Tests::run_case<T, Out>(std::string_view, const Case&, \
                                                 const Tests::LaunchKernel&, const char* variant);
#define SIMT_RUN_CASES(declared)                        \
  SIMT_RUN_CASE(declared, __half, __half)               \
  SIMT_RUN_CASE(declared, __nv_bfloat16, __nv_bfloat16) \
  SIMT_RUN_CASE(declared, float, float)                 \
  SIMT_RUN_CASE(declared, __nv_fp8_e4m3, __half)        \
  SIMT_RUN_CASE(declared, __nv_fp8_e4m3, __nv_bfloat16) \
  SIMT_RUN_CASE(declared, __nv_fp8_e4m3, float)
SIMT_RUN_CASES(extern)

}  // namespace simt
