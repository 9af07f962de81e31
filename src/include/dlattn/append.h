#pragma once

#include <cstdint>

#include "dlattn/export.h"
#include "dlattn/forward.h"
#include "dlattn/plan.h"
#include "dlattn/tensor.h"
#include "dlattn/types.h"

// New keys and values, written into a cache.
namespace dlattn {

// Rows of k and v go to the cache where a sequence's keys end, or where `slots` says; k, and q if
// there is one, are rotated before (rotary embedding), and both are rounded to 8 bits if the cache
// has them. The new rows are those of one batch, or, with cu_seqlens_q, of sequences one behind the
// other; q has the same rows.
//
//   position  of row i of sequence b: seqused_k[b] + i, counted from the first key in the cache
//   rotation  of a pair (x0, x1) of columns, by row p of the tables, in fp32 (float64 inputs: in
//             float64), each step rounded once, before the rounding to the cache's or q's dtype:
//               (x0 cos - x1 sin, x1 cos + x0 sin)
//             p is the row's position, less leftpad_k[b], at least 0
//   8 bits    x / scale, to the nearest number, of two the even one. Beyond int8's -128 to 127 and
//             beyond e4m3's 448 the nearest of these; NaN is 0 in int8, NaN in e4m3
//
// Nobody can refuse values on the device: kernels skip a row of k and v whose sequence, position,
// page, cache entry, slot or row of the tables does not exist, and a row of q whose sequence or row
// of the tables does not, and write nothing elsewhere. The CPU backend refuses such values before
// it writes anything. A slot of -1 skips its row of k and v everywhere. If several rows go to the
// same place, one of them is stored, for k and v not necessarily the same. Everything else in the
// cache stays as it is.
//
// Sources: Su et al. RoFormer. arXiv:2104.09864, 2021 (rotary embedding).
struct AppendParams {
  TensorView k;  // [batch_size, seqlen_new, num_heads_kv, head_dim], of 16 or 32 bits; CPU: or 64
  TensorView v;  // [batch_size, seqlen_new, num_heads_kv, head_dim_v], of k's dtype
  // Both of k's dtype, of kInt8 or of kFloat8E4M3. [cache_batch_size, seqlen_k, num_heads_kv, .],
  // or with page_table or slots [num_pages, page_size, num_heads_kv, .], where batch_stride leads
  // from page to page. They share memory with no other tensor, and no two elements of one do. Pages
  // may be of both, in views of one pool that begin at different ones: which hold keys and which
  // values, the page table or the slots tell.
  MutableTensorView k_cache;
  MutableTensorView v_cache;
  // Queries to be rotated; data is null: none. They come with tables. q_out may be q itself.
  TensorView q;             // [batch_size, seqlen_new, num_heads, head_dim], of k's dtype
  MutableTensorView q_out;  // as q
  Device device;

  std::int64_t batch_size = 0;
  std::int64_t seqlen_new = 0;
  std::int64_t num_heads = 0;  // of q
  std::int64_t num_heads_kv = 0;
  std::int64_t head_dim = 0;
  std::int64_t head_dim_v = 0;

  // Varlen: k, v, q and q_out are [total_new, heads, .]; their batch strides are not read. Sequence
  // b owns the rows from cu_seqlens_q[b] to cu_seqlens_q[b + 1]; rows of none are skipped.
  const std::int32_t* cu_seqlens_q = nullptr;  // [batch_size + 1]; null: fixed length
  std::int64_t total_new = 0;                  // below 2^31

  // Where rows go: to the positions behind seqused_k, or to slots.
  const std::int32_t* seqused_k = nullptr;  // [batch_size]: keys in the cache before the call. With
                                            // slots read for the tables alone
  std::int64_t seqlen_k = 0;          // the most keys that a sequence can have; not with slots
  std::int64_t cache_batch_size = 0;  // with cache_batch_idx; without: batch_size
  const std::int32_t* cache_batch_idx = nullptr;  // [batch_size]: the entry of each sequence; null:
                                                  // its own. Not with page_table or slots
  BasicTensorView<const std::int32_t> page_table;  // [batch_size, ceil(seqlen_k / page_size)]: its
                                                   // batch_stride counts; null: no pages
  std::int64_t page_size = 0;
  std::int64_t num_pages = 0;
  // [batch_size, seqlen_new] or [total_new], contiguous: page * page_size + row in it, or -1. int64
  // or int32, as slot_bytes, 8 or 4, says; null: none. Not with page_table.
  const void* slots = nullptr;
  int slot_bytes = 8;

  // Tables of the rotation; null: none. [rotary_positions, rotary_dim / 2], of k's dtype or
  // kFloat32, both of one; rotary_positions >= seqlen_k. Columns from rotary_dim on stay as they
  // are.
  TensorView rotary_cos;
  TensorView rotary_sin;
  std::int64_t rotary_positions = 0;
  std::int64_t rotary_dim = 0;  // even, at most head_dim
  // Pairs are columns 2j and 2j + 1 (GPT-J); else j and j + rotary_dim / 2 (GPT-NeoX).
  bool rotary_interleaved = false;
  // All rows of q are rotated as row 0 is: what FlashAttention does without causality and window.
  bool q_fixed_position = false;
  // [batch_size]: keys of padding before a sequence's first token, from which rotary positions then
  // count; padding has that token's. Null: they count from the first key, which is what
  // FlashAttention does with padding too.
  const std::int32_t* leftpad_k = nullptr;

  // The factors of the elements of 8-bit caches: positive and finite. [batch_size, num_heads_kv]; 0
  // strides broadcast.
  BasicTensorView<const float> k_descale;
  BasicTensorView<const float> v_descale;
};

// The plan that append_kv() would follow on `device`. Throws UnsupportedError.
DLATTN_API Plan plan(const AppendParams& params, const DeviceInfo& device);

// Writes k and v into the cache, and q rotated into q_out; stream, poll and errors as forward().
DLATTN_API void append_kv(const AppendParams& params, void* stream = nullptr, Poll poll = {});

// append_kv() and then forward(), as one call: whatever either refuses is refused before anything
// is written. `attention` reads the caches that `append` writes, its seqused_k counts the new keys
// too, and its q may be `append`'s q_out. Beside those, no tensor of one may share memory with what
// the other writes. An error of `attention` calls its k and v k_cache and v_cache.
DLATTN_API void append_and_attend(const AppendParams& append, const AttentionParams& attention,
                                  void* stream = nullptr, const Options& options = {});

}  // namespace dlattn
