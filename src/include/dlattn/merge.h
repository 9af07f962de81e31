#pragma once

#include <cstdint>

#include "dlattn/export.h"
#include "dlattn/plan.h"
#include "dlattn/tensor.h"
#include "dlattn/types.h"

// Merge of partial attention results.
namespace dlattn {

constexpr int kMaxMergeStates = 32;

// Merge of partial attention results over disjoint sets of keys, exact up to rounding:
//   lse = log sum_n exp(lse_n),  out = sum_n exp(lse_n - lse) out_n.
// A part whose lse_n is an infinity, of either sign, has no keys and contributes nothing, whatever
// its out_n holds: flash attention's functions say +inf there. If every part is empty, out = 0,
// lse = -inf. So a part computed with a sink of +inf cannot be merged. NaN makes the result NaN.
struct MergeParams {
  int num_states = 0;  // 1 .. kMaxMergeStates
  // Neither out nor lse shares memory with a part.
  TensorView outs[kMaxMergeStates];  // each [batch_size, seqlen_q, num_heads, head_dim_v]
  BasicTensorView<const float> lses[kMaxMergeStates];  // each [batch_size, num_heads, seqlen_q]
  MutableTensorView out;       // [batch_size, seqlen_q, num_heads, head_dim_v]
  BasicTensorView<float> lse;  // [batch_size, num_heads, seqlen_q], rows contiguous
  Device device;
  std::int64_t batch_size = 0;
  std::int64_t seqlen_q = 0;
  std::int64_t num_heads = 0;
  std::int64_t head_dim_v = 0;
};

// The plan that merge_states() would follow on `device`. Throws UnsupportedError.
DLATTN_API Plan plan(const MergeParams& params, const DeviceInfo& device);

// Merges partial attention results; stream, poll and errors as forward().
DLATTN_API void merge_states(const MergeParams& params, void* stream = nullptr, Poll poll = {});

}  // namespace dlattn
