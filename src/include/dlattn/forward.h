#pragma once

#include <cstdint>

#include "dlattn/export.h"
#include "dlattn/plan.h"
#include "dlattn/tensor.h"
#include "dlattn/types.h"

// Attention, forward.
namespace dlattn {

// The values that every backend and kernel accepts. Numbers that the host holds are refused if they
// are not among them. Values in the tensors cannot be refused; these are their results:
//   q, k, v        finite, with |q.k| and |softmax_scale * q.k| <= 2^126; beyond that a row may be
//                  inf or NaN, as a plain computation in fp32 gives
//   descales       0 or positive and finite, with q's times k's and that times softmax_scale within
//                  2^-126 to 2^126, or 0. A negative one or NaN, of q or k: the head's rows are NaN
//                  (those that see no key, by a bias of -inf or a mask too, NaN or 0)
//   softmax_scale  kMinSoftmaxScale to kMaxSoftmaxScale
//   softcap        0: none; or kMinSoftcap to kMaxSoftcap
//   bias           -inf hides the key, as the mask does. Every finite value, down to the least of
//                  its dtype, is added to the score: a row is not hidden because all its keys have
//                  a large negative bias. If they share one of magnitude >= 1e9, out is the mean of
//                  v over them. With smaller ones out is a convex combination of v's rows. Its
//                  error is at most twice that of a plain computation in fp32, the worse one of
//                  natural scores and of scores times log2(e). NaN or +inf: the row is NaN
//   alibi_slopes   any; magnitudes beyond 2^64, infinity among them, count as 2^64; NaN: that head
//                  is NaN
//   sinks          any; -inf: none; +inf: out = 0, lse = +inf; NaN: NaN
// Scores are computed in fp32 (in float64 for float64 inputs), and probabilities from their
// differences to the row max. A row that may attend to nothing has out = 0 and lse = -inf, or lse =
// its sink. out and lse may share no element with an input or with each other; interleaved slices
// of one buffer are fine.
//
// The limits are those within which fp32 tells the value from 0 and infinity.
constexpr double kMinSoftmaxScale = 0x1p-126;  // 1.18e-38
constexpr double kMaxSoftmaxScale = 0x1p126;   // 8.5e37
constexpr double kMinSoftcap = 0x1p-100;       // 7.9e-31
constexpr double kMaxSoftcap = 0x1p100;        // 1.27e30

// One attention problem: out = softmax(score(q k^T)) v, per batch entry and head, where
//   score = softcap(softmax_scale * q.k) - alibi_slope * |i + shift - j| + bias,
// 8-bit elements of q, k and v being those times a descale of their head's, then -inf where
// causality, window or mask forbid the key, then softmax with the head's sink in the denominator.
//
// A plain struct that kernels take by value. The last dimension of q, k, v, out and lse is
// contiguous; every other stride is free, but not negative.
struct AttentionParams {
  // q, k and v are of one dtype. out is of the same, but for kFloat8E4M3: then out is of kBFloat16,
  // kFloat16 or kFloat32, so is bias, and there are no alibi_slopes. In a cache k and v may both
  // be of kInt8 or of kFloat8E4M3 where q is of kFloat16 or kBFloat16 (is_8_bit_cache()).
  TensorView q;                // [batch_size, seqlen_q, num_heads, head_dim]
  TensorView k;                // [batch_size, seqlen_k, num_heads_kv, head_dim]
  TensorView v;                // [batch_size, seqlen_k, num_heads_kv, head_dim_v]
  MutableTensorView out;       // [batch_size, seqlen_q, num_heads, head_dim_v]
  BasicTensorView<float> lse;  // [batch_size, num_heads, seqlen_q], natural log; null: not wanted
  Device device;

  std::int64_t batch_size = 0;
  // Varlen: the most rows that a sequence has; rows beyond it are left out.
  std::int64_t seqlen_q = 0;
  std::int64_t seqlen_k = 0;
  std::int64_t num_heads = 0;
  // Divides num_heads: query head h reads key head h / (num_heads / num_heads_kv).
  std::int64_t num_heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;

  double softmax_scale = 0.0;  // 1 / sqrt(head_dim) is customary
  double softcap = 0.0;        // not 0: score = softcap * tanh(score / softcap)
  Causal causal = Causal::kNone;
  std::int64_t window_left = -1;   // keys j >= i + shift - window_left; -1: unlimited
  std::int64_t window_right = -1;  // keys j <= i + shift + window_right; -1: unlimited

  // The factors of the elements of 8-bit q, k and v. On the problem's device; with variable length,
  // batch_size counts sequences. Null: 1 with q of kFloat8E4M3; k and v in an 8-bit cache have one.
  // For no other dtype.
  BasicTensorView<const float> q_descale;  // [batch_size, num_heads / heads_per_q_descale]
  BasicTensorView<const float> k_descale;  // [batch_size, num_heads_kv]
  BasicTensorView<const float> v_descale;  // [batch_size, num_heads_kv]
  std::int64_t heads_per_q_descale = 1;    // 1, or num_heads / num_heads_kv

  // Null: none.
  TensorView bias;  // [batch_size, num_heads, seqlen_q, seqlen_k], of q's dtype or float32
  BasicTensorView<const std::uint8_t> mask;   // the same shape; 0: not seen
  BasicTensorView<const float> alibi_slopes;  // [batch_size, num_heads]
  BasicTensorView<const float> sinks;         // [num_heads], a logit each

  // Varlen: q and out are [total_q, num_heads, .], k and v [total_k, num_heads_kv, .], lse is
  // [num_heads, total_q]; their batch strides are not read. Sequence b owns the rows from
  // cu_seqlens[b] to cu_seqlens[b + 1]. Both null: fixed length.
  //
  // cu_seqlens[0] may be more than 0 and the last one less than the total, as in a slice of a
  // larger batch; rows of out and lse that belong to no sequence are not written. Values in a GPU's
  // memory cannot be refused, so kernels clamp them: a sequence begins at clamp(cu_seqlens[b], 0,
  // total), ends at clamp(cu_seqlens[b + 1], its begin, total), and has at most seqlen_q (seqlen_k)
  // rows, the first ones; seqused_k[b] is clamped to their number. Results are defined where no two
  // sequences share a row of q.
  const std::int32_t* cu_seqlens_q = nullptr;  // [batch_size + 1]
  const std::int32_t* cu_seqlens_k = nullptr;  // [batch_size + 1]; null alone: keys in a cache
  const std::int32_t* seqused_k = nullptr;  // [batch_size], keys of each sequence in use; null: all
  std::int64_t total_q = 0;                 // below 2^31, as total_k is
  std::int64_t total_k = 0;

  // Keys in a cache (is_cache()): seqused_k, page_table, cache_batch_idx or leftpad_k is given, and
  // cu_seqlens_k is null. Sequence b then has the first seqused_k[b] (null: all) of seqlen_k keys
  // that there is room for, and its last query stands at the last of them. q and out may be of
  // variable length, with cu_seqlens_q alone. precision is kInputs, and q is not of kFloat8E4M3; k
  // and v may be 8-bit elements.
  //
  // Without a page table k and v are [cache_batch_size, seqlen_k, num_heads_kv, .], and the keys of
  // sequence b are entry cache_batch_idx[b] of them (null: entry b). With one they are [num_pages,
  // page_size, num_heads_kv, .], their batch_stride leads from page to page, and key j of sequence
  // b is row j % page_size of page page_table[b][j / page_size].
  //
  // The CPU backend refuses values that are out of range. Those on a GPU cannot be refused, so
  // kernels clamp them: lengths to 0 .. seqlen_k, entries and pages to those that there are,
  // leftpad_k to 0 .. the sequence's length. No address is formed from what stands in the page
  // table behind a sequence's last page, or for pages none of whose keys a query may see by its
  // position, and what rows of k and v hold behind its last key or before leftpad_k has no effect,
  // whatever it is.
  BasicTensorView<const std::int32_t> page_table;  // [batch_size, ceil(seqlen_k / page_size)], rows
                                                   // batch_stride apart; null: no pages
  std::int64_t page_size = 0;                      // keys of a page: at least 1
  std::int64_t num_pages = 0;
  std::int64_t cache_batch_size = 0;              // entries of k and v, with cache_batch_idx
  const std::int32_t* cache_batch_idx = nullptr;  // [batch_size]; not with a page table
  const std::int32_t* leftpad_k = nullptr;  // [batch_size], keys of each sequence that are not
                                            // seen, from its first; null: none

  // Not kInputs: q, k, v and out are of kFloat16 or kBFloat16, and there are no softcap and
  // alibi_slopes. quantized_kv is what quantize_kv() wrote of k and v in this precision, on the
  // problem's device, with the same sizes and cu_seqlens_k, by which its parts are found; k and v
  // are not read then, and may be null. Null: they are quantised into the workspace before.
  Precision precision = Precision::kInputs;
  const void* quantized_kv = nullptr;

  // Plan::workspace_bytes of device memory, aligned to kWorkspaceAlignment, apart from the tensors.
  // Its contents need no initialisation and mean nothing afterwards. Null: Options::workspace gives
  // it.
  void* workspace = nullptr;
  std::int64_t workspace_bytes = 0;
};

// Whether the keys lie in a cache: where the host does not know how many there are, or in which
// rows.
inline bool is_cache(const AttentionParams& p) {
  return !p.cu_seqlens_k && (p.seqused_k || p.page_table.data || p.cache_batch_idx || p.leftpad_k);
}

// Whether k and v are 8-bit elements of a cache, beside q of 16 bits.
inline bool is_8_bit_cache(const AttentionParams& p) {
  if (p.precision != Precision::kInputs || p.q.dtype == DType::kFloat8E4M3) return false;
  return p.k.dtype == DType::kInt8 || p.k.dtype == DType::kFloat8E4M3;
}

// Whether forward() would run `params` on `device`; never launches, never throws for wrong params.
DLATTN_API Support supported(const AttentionParams& params, const DeviceInfo& device,
                             const Options& options = {});
// The plan that forward() would follow on `device`. Throws UnsupportedError.
DLATTN_API Plan plan(const AttentionParams& params, const DeviceInfo& device,
                     const Options& options = {});

// Computes attention. On CUDA the work is enqueued on `stream` (a cudaStream_t; null is the legacy
// default stream) and the call returns; on the CPU it is done when the call returns. Allocates no
// device memory and never synchronises. Throws UnsupportedError before anything is launched,
// DeviceError if the launch fails.
DLATTN_API void forward(const AttentionParams& params, void* stream = nullptr,
                        const Options& options = {});

}  // namespace dlattn
