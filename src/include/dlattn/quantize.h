#pragma once

#include <cstdint>

#include "dlattn/export.h"
#include "dlattn/plan.h"
#include "dlattn/tensor.h"
#include "dlattn/types.h"

// Keys and values in 8 bits, for another Precision than kInputs.
namespace dlattn {

// k and v of 16 bits to be stored in 8, of each head and sequence for itself, in blocks of keys
// that are counted from a sequence's first.
//   k  minus the mean of 64 of the sequence's keys, which no softmax sees; times a rotation
//      (a Hadamard transform with fixed signs) that spreads what one column carries; as 8-bit
//      integers with a scale for each 64 keys (kInt8Fp8, kInt8Fp16), or e4m3 with a power of two
//      for each 128 (kFp8), or 96 with head dims up to 64
//   v  as e4m3, with a scale for each block, a power of two: numbers up to 15 (kInt8Fp8), so that
//      sums of a block's fit fp16, or 448 (kFp8); or as fp16 with such a scale (kInt8Fp16)
// A number of k that is not finite makes its block NaN, or with kFp8 its key; one of v, itself.
//
// Sources: Zhang et al. SageAttention2. arXiv:2411.10958, 2024 (blocks, k minus its mean); Shah et
// al. FlashAttention-3. arXiv:2407.08608, 2024 (rotation).
struct QuantizeParams {
  Precision precision = Precision::kInt8Fp8;
  TensorView k;  // [batch_size, seqlen_k, num_heads_kv, head_dim], of kFloat16 or kBFloat16
  TensorView v;  // [batch_size, seqlen_k, num_heads_kv, head_dim_v], of k's dtype
  Device device;
  std::int64_t batch_size = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t num_heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;

  // As in AttentionParams.
  const std::int32_t* cu_seqlens_k = nullptr;
  const std::int32_t* seqused_k = nullptr;
  std::int64_t total_k = 0;

  // quantized_kv_bytes() of the device's memory, aligned to kWorkspaceAlignment; on the CPU to that
  // of a float.
  void* quantized_kv = nullptr;
};

// Bytes of what quantize_kv() writes. Reads sizes and precision, whether there are cu_seqlens_k,
// and nothing else. Throws UnsupportedError.
DLATTN_API std::int64_t quantized_kv_bytes(const QuantizeParams& params);
// The plan that quantize_kv() would follow on `device`. Throws UnsupportedError.
DLATTN_API Plan plan(const QuantizeParams& params, const DeviceInfo& device);
// Writes k and v in 8 bits, to be read as AttentionParams::quantized_kv; stream and errors as
// forward().
DLATTN_API void quantize_kv(const QuantizeParams& params, void* stream = nullptr);

}  // namespace dlattn
