#include "qkv.h"

#include "dlattn/backward.h"
#include "errors.h"
#include "quantized.h"

namespace dlattn::python {
namespace {

// The dtype of out for that of q and what the caller asks for.
DType dtype_of_out(DType dtype, DType asked) {
  const bool none = asked == DType::kFloat8E4M3;
  if (dtype != DType::kFloat8E4M3) {
    if (none || asked == dtype) return dtype;
    unsupported("out_dtype is \"", to_string(asked), "\"; accepted: None or \"", to_string(dtype),
                "\", the dtype of q");
  }
  if (asked == DType::kFloat64) {
    unsupported(
        "out_dtype is \"float64\"; accepted: \"bfloat16\", \"float16\" or \"float32\", as q "
        "is of float8_e4m3fn");
  }
  return none ? DType::kBFloat16 : asked;
}

QkvDims qkv_dims(bool varlen, const Problem& problem) {
  const int skip = varlen ? 1 : 0;
  const Dims dims = dims_of(problem.layout);
  return {dims_text(problem.layout, varlen), {0, dims.row - skip, dims.head - skip}, 3 - skip};
}

// The dtypes of q that a call takes, in words.
const char* dtypes_of_q(const Problem& problem, Keys keys) {
  if (problem.params.precision != Precision::kInputs) return "float16, bfloat16";
  const bool of_gradients = problem.kernels == &backward_kernel_names();
  return of_gradients || keys != Keys::kAsQueries
             ? "float16, bfloat16, float32, float64"
             : "float16, bfloat16, float32, float64, float8_e4m3fn";
}

void read_q(const Tensor& q, bool varlen, Keys keys, const QkvDims& dims, Problem* problem) {
  AttentionParams& p = problem->params;
  const Dims& at = dims.at;
  const int last = dims.last;
  p.q.dtype = p.k.dtype = p.v.dtype = to_dtype(q, dtypes_of_q(*problem, keys));
  p.out.dtype = dtype_of_out(p.q.dtype, problem->out_dtype);
  check_rank(q, last + 1, dims.names);
  check_last_stride(q);
  if (varlen) {
    p.total_q = q.shape[at.row];
  } else {
    p.batch_size = q.shape[at.batch];
    p.seqlen_q = q.shape[at.row];
  }
  p.num_heads = q.shape[at.head];
  p.head_dim = q.shape[last];
  set_view(q, dims_of(problem->layout), varlen, &p.q);
}

// Sizes of the results, when those of the inputs are known.
void size_results(const Tensor& q, bool varlen, const QkvDims& dims, Problem* problem) {
  const AttentionParams& p = problem->params;
  problem->out.ndim = q.ndim;
  for (int i = 0; i < dims.last; ++i) problem->out.sizes[i] = q.shape[i];
  problem->out.sizes[dims.last] = p.head_dim_v;
  problem->lse = varlen ? Shape{2, {p.num_heads, p.total_q}}
                        : Shape{3, {p.batch_size, p.num_heads, p.seqlen_q}};
}

// The dtype of k or v: q's, or in a cache 8 bits.
void read_key_dtype(const Tensor& q, const Tensor& tensor, bool cached, DType* dtype) {
  if (same(tensor.dtype, q.dtype)) return;
  for (const DType bytes : {DType::kInt8, DType::kFloat8E4M3}) {
    if (!cached || !same(tensor.dtype, to_dlpack(bytes))) continue;
    *dtype = bytes;
    return;
  }
  const bool beside_8_bits = cached && q.dtype.bits == 16;
  unsupported(tensor.name, ": dtype is ", dtype_text(tensor.dtype),
              "; accepted: ", dtype_text(q.dtype), ", that of q",
              beside_8_bits ? ", or int8 or float8_e4m3fn with k_descale and v_descale" : "");
}

}  // namespace

void read_qkv(const Tensor& q, const Tensor& k, const Tensor& v, bool varlen, Keys keys,
              Problem* problem) {
  AttentionParams& p = problem->params;
  const QkvDims q_dims = qkv_dims(varlen, *problem);
  const bool cached = keys != Keys::kAsQueries;
  const QkvDims dims = cached ? cache_dims(keys, problem->layout) : q_dims;
  const Dims& at = dims.at;
  const int last = dims.last;
  read_q(q, varlen, keys, q_dims, problem);
  for (const Tensor* tensor : {&k, &v}) {
    check_rank(*tensor, last + 1, dims.names);
    read_key_dtype(q, *tensor, cached, tensor == &k ? &p.k.dtype : &p.v.dtype);
    check_last_stride(*tensor);
  }
  check_size(k, last, "head_dim", p.head_dim, "that of q");
  check_size(v, at.head, "num_heads", k.shape[at.head], "that of k");
  const bool packed = varlen && !cached;
  check_size(v, at.row,
             packed                 ? "the number of tokens"
             : keys == Keys::kPages ? "page_size"
                                    : "seqlen",
             k.shape[at.row], "that of k");
  if (cached) {
    size_cache(q, k, v, keys, problem);
  } else if (!varlen) {
    check_size(k, at.batch, "batch", q.shape[at.batch], "that of q");
    check_size(v, at.batch, "batch", q.shape[at.batch], "that of q");
    p.seqlen_k = k.shape[at.row];
  }
  p.total_k = packed ? k.shape[at.row] : 0;
  p.num_heads_kv = k.shape[at.head];
  p.head_dim_v = v.shape[last];
  set_view(k, dims_of(problem->layout), packed, &p.k);
  set_view(v, dims_of(problem->layout), packed, &p.v);
  size_results(q, varlen, q_dims, problem);
}

void read_qkv(const AttentionCall& call, const Target& target, Problem* problem) {
  const bool varlen = call.varlen();
  const Keys keys = keys_of(call);
  const Tensor& q = import_tensor(call.q, "q", target, problem);
  if (is_quantized_kv(call.k)) {
    if (keys != Keys::kAsQueries)
      unsupported("k is a QuantizedKV; accepted: a tensor, as keys in a cache are not quantised");
    const QkvDims dims = qkv_dims(varlen, *problem);
    read_q(q, varlen, keys, dims, problem);
    read_quantized_kv(call.k, call.v, varlen, target, problem);
    return size_results(q, varlen, dims, problem);
  }
  const Tensor& k = import_tensor(call.k, "k", target, problem);
  const Tensor& v = import_tensor(call.v, "v", target, problem);
  read_qkv(q, k, v, varlen, keys, problem);
}

}  // namespace dlattn::python
