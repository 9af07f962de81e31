#pragma once

// The C API of dlattn: attention with a streaming softmax, for C99 and for every language that can
// call C. No header of CUDA is needed; streams are void pointers (a cudaStream_t, a CUstream).
//
// Every struct but DlattnTensor begins with struct_size, which the caller sets to sizeof: later
// versions of the library add fields at the end and take shorter structs of older callers.
// Fields of value 0 mean what their comment says, so a struct is made by
//   DlattnAttention attention = {.struct_size = sizeof attention};
// (in other languages: zeroed memory, then struct_size) and then filled. Enumerations are int32_t.
//
// Every function that returns int32_t returns DLATTN_OK or what went wrong, and dlattn_last_error()
// has it in words that name the argument, the value got and what is accepted. No C++ exception
// leaves the library. All functions are thread-safe. forward.h, backward.h, merge.h, quantize.h and
// append.h, the C++ API's headers, tell what is accepted and computed, and tensor.h how large sizes
// may be; the names are the same.

#include <stddef.h>
#include <stdint.h>

#include "dlattn/export.h"
#include "dlattn/version.h"

#ifdef __cplusplus
extern "C" {
#endif

enum {
  DLATTN_OK = 0,
  DLATTN_UNSUPPORTED = 1,    // an argument is wrong, or no kernel provides it; nothing was launched
  DLATTN_DEVICE_ERROR = 2,   // the device, its driver or a launch failed
  DLATTN_CANCELLED = 3,      // DlattnOptions.poll said so; results are partly written
  DLATTN_OUT_OF_MEMORY = 4,  // on the host
  DLATTN_INTERNAL_ERROR = 5  // none of the others
};

// The values of DlattnTensor.dtype.
enum {
  DLATTN_FLOAT16 = 0,
  DLATTN_BFLOAT16 = 1,
  DLATTN_FLOAT32 = 2,
  DLATTN_FLOAT64 = 3,  // on the CPU
  DLATTN_FLOAT8_E4M3 = 4,
  DLATTN_INT8 = 5  // of keys and values in a cache alone
};

enum { DLATTN_CPU = 0, DLATTN_CUDA = 1 };  // device_type

// Which keys a query may attend to. Query i stands at key position i + shift, shift = seqlen_k -
// seqlen_q for every mode but DLATTN_TOP_LEFT, where it is 0; causal modes allow j <= i + shift.
enum { DLATTN_NOT_CAUSAL = 0, DLATTN_BOTTOM_RIGHT = 1, DLATTN_TOP_LEFT = 2 };

// The factors of the products, with q, k and v of 16 bits: the inputs as they are; 8-bit integers
// for q.k and e4m3 for probabilities times v; e4m3 for both; 8-bit integers for q.k and fp16 for
// probabilities times v.
enum { DLATTN_INPUTS = 0, DLATTN_INT8_FP8 = 1, DLATTN_FP8 = 2, DLATTN_INT8_FP16 = 3 };

// A tensor in the memory of a problem's device; data is null for one that is not given. Inputs are
// not written. Strides count elements; 0 broadcasts an input. Those of dimensions that a tensor
// does not have are not read, nor is col_stride but of bias and mask: the last dimension of the
// others is contiguous. dtype is read of q, k, v, out, outs, bias, caches and rotary tables; the
// others are of the type that their comment names. This struct never grows.
typedef struct {
  void* data;
  int64_t batch_stride;
  int64_t row_stride;
  int64_t head_stride;
  int64_t col_stride;
  int32_t dtype;
  int32_t reserved;  // 0
} DlattnTensor;

// How to compute. Null instead of a pointer to one: all its fields 0.
typedef struct {
  size_t struct_size;
  const char* kernel;       // one of dlattn_kernel_name(); null: "auto"
  const char* variant;      // one of the kernel's; null: the plan chooses
  int32_t num_threads;      // CPU; 0: DlattnDeviceInfo.num_threads
  int32_t batch_invariant;  // 1: the same bits of a sequence alone and in any batch
  // Called on the caller's thread at most ten times a second while the CPU computes; not 0 ends the
  // call with DLATTN_CANCELLED. Null: nothing.
  int32_t (*poll)(void* context);
  void* poll_context;
  // Gives a call its workspace if the parameters bring none: `bytes` of device memory, aligned to
  // 256, that stay valid until the work enqueued on the call's stream is done; null if there are
  // none. Null: the parameters bring it.
  void* (*allocate)(void* context, int64_t bytes);
  void* allocate_context;
  // Into how many parts the keys of a row are split; 0: the plan decides.
  int32_t num_splits;
  int32_t reserved;  // 0
  // Keys of a part, which begins at a multiple of it: a multiple of 128; 0: the plan decides. Not
  // with num_splits.
  int64_t split_size;
} DlattnOptions;

// out = softmax(score(q k^T)) v; dlattn_attention().
typedef struct {
  size_t struct_size;
  int32_t device_type;   // DLATTN_CPU, DLATTN_CUDA
  int32_t device_index;  // of the GPU

  DlattnTensor q;    // [batch_size, seqlen_q, num_heads, head_dim]
  DlattnTensor k;    // [batch_size, seqlen_k, num_heads_kv, head_dim]
  DlattnTensor v;    // [batch_size, seqlen_k, num_heads_kv, head_dim_v]
  DlattnTensor out;  // [batch_size, seqlen_q, num_heads, head_dim_v]
  DlattnTensor lse;  // float [batch_size, num_heads, seqlen_q], natural log; null: not wanted

  int64_t batch_size;
  int64_t seqlen_q;  // with variable length: the most rows that a sequence has
  int64_t seqlen_k;
  int64_t num_heads;
  int64_t num_heads_kv;  // divides num_heads
  int64_t head_dim;
  int64_t head_dim_v;

  double softmax_scale;  // 0: 1 / sqrt(head_dim)
  double softcap;        // not 0: score = softcap * tanh(score / softcap)
  int32_t causal;        // DLATTN_NOT_CAUSAL, ...
  int32_t precision;     // DLATTN_INPUTS, ...
  // Keys i + shift - window_left <= j <= i + shift + window_right; each limit is read if its
  // has_window_* is 1.
  int32_t has_window_left;
  int32_t has_window_right;
  int64_t window_left;
  int64_t window_right;

  // The factors of the elements of 8-bit q, k and v. Null: 1 with q of DLATTN_FLOAT8_E4M3. k and v
  // of a cache may be of DLATTN_INT8 or DLATTN_FLOAT8_E4M3 beside q of 16 bits, and have one then.
  DlattnTensor q_descale;       // float [batch_size, num_heads / heads_per_q_descale]
  DlattnTensor k_descale;       // float [batch_size, num_heads_kv]
  DlattnTensor v_descale;       // float [batch_size, num_heads_kv]
  int64_t heads_per_q_descale;  // 0, 1, or num_heads / num_heads_kv; 0 is 1

  // Null: none. A row of bias and mask has col_stride 1 unless it is broadcast.
  DlattnTensor bias;          // [batch_size, num_heads, seqlen_q, seqlen_k], of q's dtype or float
  DlattnTensor mask;          // uint8_t, the same shape; 0: not seen
  DlattnTensor alibi_slopes;  // float [batch_size, num_heads]
  DlattnTensor sinks;         // float [num_heads], a logit each

  // Variable length: q and out are [total_q, num_heads, .], k and v [total_k, num_heads_kv, .], lse
  // is [num_heads, total_q]. Sequence b owns the rows cu_seqlens[b] to cu_seqlens[b + 1]. Both
  // null: fixed length. cu_seqlens_k alone null: queries of variable length, with keys in a cache.
  const int32_t* cu_seqlens_q;  // [batch_size + 1]
  const int32_t* cu_seqlens_k;  // [batch_size + 1]
  const int32_t* seqused_k;     // [batch_size], keys of each sequence in use; null: all
  int64_t total_q;
  int64_t total_k;

  // The buffer that dlattn_quantize_kv() wrote in this precision, which replaces k and v; or null.
  const void* quantized_kv;
  // DlattnPlan.workspace_bytes of device memory, aligned to 256. Null: DlattnOptions.allocate.
  void* workspace;
  int64_t workspace_bytes;

  // Keys in a cache, where seqused_k, page_table, cache_batch_idx or leftpad_k is given and
  // cu_seqlens_k is null: sequence b has the first seqused_k[b] (null: all) of seqlen_k keys. They
  // are entry cache_batch_idx[b] (null: b) of k and v, or in pages: then k and v are [num_pages,
  // page_size, num_heads_kv, .], and key j is row j % page_size of page page_table[b][j /
  // page_size].
  const int32_t* page_table;  // [batch_size, seqlen_k / page_size, rounded up]; null: no pages
  int64_t page_table_batch_stride;
  int64_t page_size;
  int64_t num_pages;
  const int32_t* cache_batch_idx;  // [batch_size]; not with a page table
  int64_t cache_batch_size;        // entries of k and v, with cache_batch_idx
  const int32_t* leftpad_k;        // [batch_size], first keys that are not seen; null: none
} DlattnAttention;

// How a problem will be computed. The library writes the fields that struct_size covers.
typedef struct {
  size_t struct_size;
  int64_t
      workspace_bytes;   // of device memory; on the CPU, what the call itself allocates and frees
  double predicted_ns;   // GPU time by the kernel's cost model; 0: unknown
  int32_t num_splits;    // parts into which the keys are split
  int32_t num_launches;  // kernels that a call enqueues; 0: there is nothing to compute
  char kernel[32];
  char variant[32];
} DlattnPlan;

// Gradients of dlattn_attention(); dlattn_attention_backward(). A gradient whose data is null is
// not computed. One with a stride of 0 in a dimension has one element there, the sum over it, where
// bias and alibi_slopes are broadcast.
typedef struct {
  size_t struct_size;
  // The call whose gradients these are. Its out and lse are read, and its workspace is that of the
  // backward pass. precision is DLATTN_INPUTS, and the keys are in no cache.
  const DlattnAttention* attention;
  DlattnTensor dout;  // as out; null: zeros
  DlattnTensor dlse;  // as lse, with row_stride; null: zeros; dout or dlse is given
  DlattnTensor dq;    // as q, of its dtype
  DlattnTensor dk;
  DlattnTensor dv;
  DlattnTensor dbias;          // as bias, of its dtype
  DlattnTensor dalibi_slopes;  // float [batch_size, num_heads]
  DlattnTensor dsinks;         // float [num_heads]
  int32_t deterministic;       // 1: the same bits at every call; on the CPU they are always
  int32_t reserved;            // 0
} DlattnBackward;

// Merge of partial results over disjoint sets of keys, by their lse; dlattn_merge_states().
typedef struct {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  int32_t num_states;        // 1 to 32
  int32_t reserved;          // 0
  const DlattnTensor* outs;  // num_states of [batch_size, seqlen_q, num_heads, head_dim_v]
  const DlattnTensor* lses;  // num_states of float [batch_size, num_heads, seqlen_q]
  DlattnTensor out;          // [batch_size, seqlen_q, num_heads, head_dim_v]
  DlattnTensor lse;          // float [batch_size, num_heads, seqlen_q], rows contiguous
  int64_t batch_size;
  int64_t seqlen_q;
  int64_t num_heads;
  int64_t head_dim_v;
} DlattnMerge;

// Keys and values of 16 bits to be stored in 8; dlattn_quantize_kv().
typedef struct {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  int32_t precision;  // DLATTN_INT8_FP8, DLATTN_FP8, DLATTN_INT8_FP16
  int32_t reserved;   // 0
  DlattnTensor k;     // [batch_size, seqlen_k, num_heads_kv, head_dim]
  DlattnTensor v;     // [batch_size, seqlen_k, num_heads_kv, head_dim_v]
  int64_t batch_size;
  int64_t seqlen_k;
  int64_t num_heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;
  const int32_t* cu_seqlens_k;  // as in DlattnAttention
  const int32_t* seqused_k;
  int64_t total_k;
  // dlattn_quantized_kv_bytes() of the device's memory, aligned to 256; on the CPU to 4.
  void* quantized_kv;
} DlattnQuantize;

// New keys and values to be written into a cache, with rotary embedding; dlattn_append_kv().
typedef struct {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  DlattnTensor k;        // [batch_size, seqlen_new, num_heads_kv, head_dim]
  DlattnTensor v;        // [batch_size, seqlen_new, num_heads_kv, head_dim_v]
  DlattnTensor k_cache;  // [cache_batch_size, seqlen_k, num_heads_kv, .], or [num_pages, page_size,
  DlattnTensor v_cache;  // num_heads_kv, .]. Of k's dtype, DLATTN_INT8 or DLATTN_FLOAT8_E4M3
  DlattnTensor q;        // [batch_size, seqlen_new, num_heads, head_dim]; null: none
  DlattnTensor q_out;    // as q, or q itself
  int64_t batch_size;
  int64_t seqlen_new;
  int64_t num_heads;
  int64_t num_heads_kv;
  int64_t head_dim;
  int64_t head_dim_v;

  // Variable length: k, v, q and q_out are [total_new, heads, .]. Null: fixed length.
  const int32_t* cu_seqlens_q;  // [batch_size + 1]
  int64_t total_new;

  // Where rows go: behind the keys that are there, or to slots, page * page_size + row, -1 for
  // none.
  const int32_t* seqused_k;        // [batch_size], keys before the call
  int64_t seqlen_k;                // the most keys that a sequence can have; not with slots
  int64_t cache_batch_size;        // with cache_batch_idx; without: batch_size
  const int32_t* cache_batch_idx;  // [batch_size]; null: each its own entry
  const int32_t* page_table;       // [batch_size, ceil(seqlen_k / page_size)]; null: no pages
  int64_t page_table_batch_stride;
  int64_t page_size;
  int64_t num_pages;
  const void* slots;   // [batch_size, seqlen_new] or [total_new]; null: none
  int32_t slot_bytes;  // 0 or 8: int64; 4: int32

  int32_t rotary_interleaved;  // 1: pairs are columns 2j and 2j + 1; 0: j and j + rotary_dim / 2
  DlattnTensor rotary_cos;  // [rotary_positions, rotary_dim / 2], of k's dtype or float; null: none
  DlattnTensor rotary_sin;  // the same
  int64_t rotary_positions;
  int64_t rotary_dim;
  const int32_t* leftpad_k;  // [batch_size]; null: none
  int32_t q_fixed_position;  // 1: q's rows are rotated as row 0
  int32_t reserved;          // 0

  DlattnTensor k_descale;  // float [batch_size, num_heads_kv], of 8-bit caches; null: none
  DlattnTensor v_descale;  // the same
} DlattnAppend;

// The library writes the fields that struct_size covers.
typedef struct {
  size_t struct_size;
  int32_t device_type;
  int32_t device_index;
  int32_t compute_major;  // CUDA, as all up to `unserved`
  int32_t compute_minor;
  int32_t num_sms;
  int32_t code;                // which code of this build runs on it: 90 for 9.0; 0: none
  int32_t ptx;                 // 1: that is PTX, which the driver compiles
  int32_t arch_specific_code;  // 1: there is code for this compute capability alone as well
  int64_t max_smem_per_block;  // bytes
  int64_t smem_per_sm;         // bytes
  int64_t l2_bytes;
  char unserved[512];   // why the kernels of this build do not run on it; empty if they do
  int32_t num_threads;  // CPU
  int32_t reserved;
  char isa[32];  // CPU: "avx512", "avx2" or "portable"
  char name[256];
} DlattnDeviceInfo;

DLATTN_API int32_t dlattn_version(void);  // 10000 * major + 100 * minor + patch, of the library
// The words of this thread's last failing call, valid until its next one; "" if none failed.
DLATTN_API const char* dlattn_last_error(void);

// Computes attention. On CUDA the work is enqueued on `stream` (null: the legacy default stream)
// and the call returns; on the CPU it is done when the call returns. Allocates no device memory and
// never synchronises, so it can be captured in a CUDA graph.
DLATTN_API int32_t dlattn_attention(const DlattnAttention* params, void* stream,
                                    const DlattnOptions* options);
// How dlattn_attention() would compute `params`, also in words, one field a line, in `text` (null
// or of 0 bytes: not wanted; cut off where it ends, with a 0). Launches nothing and reads no tensor
// on a GPU.
DLATTN_API int32_t dlattn_attention_plan(const DlattnAttention* params,
                                         const DlattnOptions* options, DlattnPlan* plan, char* text,
                                         size_t text_bytes);
// DLATTN_OK if dlattn_attention() would compute `params`, with `why` empty; else what it would
// return, and `why` tells in words, one reason a line.
DLATTN_API int32_t dlattn_supported(const DlattnAttention* params, const DlattnOptions* options,
                                    char* why, size_t why_bytes);
// Computes gradients; stream, memory and graphs as dlattn_attention(). num_splits, split_size and,
// on a GPU, batch_invariant are refused.
DLATTN_API int32_t dlattn_attention_backward(const DlattnBackward* params, void* stream,
                                             const DlattnOptions* options);
// As dlattn_attention_plan().
DLATTN_API int32_t dlattn_attention_backward_plan(const DlattnBackward* params,
                                                  const DlattnOptions* options, DlattnPlan* plan,
                                                  char* text, size_t text_bytes);
// Reads no option but poll.
DLATTN_API int32_t dlattn_merge_states(const DlattnMerge* params, void* stream,
                                       const DlattnOptions* options);
// Reads sizes, precision and whether there are cu_seqlens_k, and nothing else.
DLATTN_API int32_t dlattn_quantized_kv_bytes(const DlattnQuantize* params, int64_t* bytes);
DLATTN_API int32_t dlattn_quantize_kv(const DlattnQuantize* params, void* stream);
// Reads no option but poll.
DLATTN_API int32_t dlattn_append_kv(const DlattnAppend* params, void* stream,
                                    const DlattnOptions* options);
// dlattn_append_kv() and then dlattn_attention(), as one call: whatever either refuses is refused
// before anything is written. `attention` reads the caches that `append` writes, its seqused_k
// counts the new keys too, and its q may be `append`'s q_out.
DLATTN_API int32_t dlattn_append_and_attend(const DlattnAppend* append,
                                            const DlattnAttention* attention, void* stream,
                                            const DlattnOptions* options);

// GPUs; 0 where there is no GPU, no driver or no CUDA in this build, and why is told in `why`.
DLATTN_API int32_t dlattn_device_count(int32_t* count, char* why, size_t why_bytes);
DLATTN_API int32_t dlattn_device_info(int32_t device_type, int32_t device_index,
                                      DlattnDeviceInfo* info);
// The names that DlattnOptions.kernel may have, from index 0 on; null past the last one.
DLATTN_API const char* dlattn_kernel_name(int32_t index);

#ifdef __cplusplus
}  // extern "C"
#endif
