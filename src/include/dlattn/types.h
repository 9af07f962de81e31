#pragma once

#include <cstdint>

#ifndef DLATTN_PARAMETERS_ONLY  // of dlattn's files of kernels, where strings cost CPU time
#include "dlattn/error.h"
#endif
#include "dlattn/export.h"

namespace dlattn {

// Element type of q, k, v and out (and of bias). Scores and softmax state are fp32, or fp64 for
// kFloat64; the LSE is stored as fp32 for all. kFloat8E4M3 is OCP's e4m3fn: finite up to 448, NaN,
// no infinity; of q, k and v alone, and of caches that append_kv() writes. kInt8 is such caches'
// and, of Precision::kInt8Fp8, kernels'.
enum class DType : std::int8_t { kFloat16, kBFloat16, kFloat32, kFloat64, kFloat8E4M3, kInt8 };
constexpr int kNumDTypes = 5;  // that tensors of attention may have: those before kInt8

// The numbers that attention multiplies, with q, k and v of 16 bits.
//   kInputs   the inputs as they are
//   kInt8Fp8  8-bit integers for q.k, e4m3 for probabilities times v
//   kInt8Fp16 8-bit integers for q.k, fp16 for probabilities times v
//   kFp8      e4m3 for both
enum class Precision : std::int8_t { kInputs, kInt8Fp8, kFp8, kInt8Fp16 };

// The operation of a kernel launch:
//   kForward   attention, or where the keys of a row are split partial results of it
//   kMerge     merge of partial results that the caller has
//   kQuantize  q, or k and v, in 8 bits
//   kAppend    new rows in a cache of k and v
//   kCombine   out and lse of the partial results that kForward has left in the workspace
//   kBackward  gradients of attention
//   kDelta     lse and rowsum(dout * out) - dlse of every row, in the workspace, for kBackward
//   kReduce    gradients of slopes and sinks, of the partial sums that these two have left there
enum class Operation : std::int8_t {
  kForward,
  kMerge,
  kQuantize,
  kAppend,
  kCombine,
  kBackward,
  kDelta,
  kReduce
};

enum class DeviceType : std::int8_t { kCpu, kCuda };

struct Device {
  DeviceType type = DeviceType::kCpu;
  int index = 0;  // of the GPU; not read of the CPU
};

// Which keys a query may attend to. Query i stands at key position i + shift, shift = seqlen_k -
// seqlen_q for every mode but kTopLeft, where it is 0. The causal modes allow keys j <= i + shift.
enum class Causal : std::int8_t { kNone, kBottomRight, kTopLeft };

// A callback for calls on the CPU, for example to look for Ctrl-C: called on the caller's thread
// between tiles, at most ten times a second. An exception that it throws ends the computation and
// reaches the caller; the results are then partly written.
struct Poll {
  void (*function)(void* context) = nullptr;  // null: nothing
  void* context = nullptr;
};

DLATTN_API const char* to_string(DType dtype);          // "float16", ...
DLATTN_API const char* to_string(DeviceType type);      // "cpu", "cuda"
DLATTN_API const char* to_string(Operation operation);  // "forward", ...
DLATTN_API const char* to_string(Precision precision);  // "inputs", "int8_fp8", ...
DLATTN_API std::int64_t size_of(DType dtype);           // bytes per element

}  // namespace dlattn
