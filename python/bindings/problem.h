#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "core/operations/forward.h"
#include "dlattn/attention.h"
#include "framework.h"
#include "options.h"
#include "tensor.h"

namespace dlattn::python {

// The functions that share a list of arguments: attention, attention_varlen,
// attention_with_kvcache.
enum class Function { kAttention, kVarlen, kKvcache };

// Their arguments, as Python passed them. Borrowed for the length of the call.
struct AttentionCall {
  static constexpr int kMaxArguments = 48;

  Function function;

  // In the order of kArguments (problem.cpp); null where the function called does not take it.
  nb::handle values[kMaxArguments];
  // Those of them that are read by name.
  nb::handle q, k, v, softmax_scale, out, stream;
  nb::handle cu_seqlens_q, cu_seqlens_k;  // attention_varlen only, else null
  nb::handle seqused_k, page_table;       // null for attention
  nb::handle workspace;                   // null for attention
  nb::handle cache_batch_idx;             // attention_with_kvcache only

  bool varlen() const { return function == Function::kVarlen; }
  bool is_paged() const { return page_table.is_valid() && !page_table.is_none(); }
};

// Binds `call` as `name` for the arguments of attention, and as `name_varlen` and `name_kvcache`
// (null: not at all) for those of the others.
using CallFunction = nb::object (*)(const AttentionCall&);
void def_call(nb::module_& module, const char* name, const char* name_varlen,
              const char* name_kvcache, CallFunction call);

// Binds `call` as attention and attention_varlen, whose arguments with defaults come in a dict, and
// as attention_with_kvcache.
void def_attention(nb::module_& module, CallFunction call);

// The call of one of them with arguments by their names. Arguments that are not named have their
// defaults, but for max_seqlen_k of attention_with_kvcache.
AttentionCall call_of(Function function, const nb::dict& arguments);

// Sizes of a tensor of the caller's.
struct Shape {
  int ndim = 0;
  std::int64_t sizes[4] = {};
};

inline Shape shape_of(const Tensor& tensor) {  // of up to 4 dimensions
  Shape shape;
  shape.ndim = tensor.ndim;
  for (int i = 0; i < tensor.ndim; ++i) shape.sizes[i] = tensor.shape[i];
  return shape;
}

// An AttentionCall with its tensors taken in and its arguments checked against each other; what is
// left for dlattn::forward to check are the values in `params`.
struct Problem {
  static constexpr int kMaxTensors = core::num_tensors(core::kForwardOperands);

  AttentionParams params;
  Options options;
  const std::vector<std::string_view>* kernels = nullptr;  // that may be asked for
  Layout layout = Layout::kBshd;
  bool return_lse = false;
  DType out_dtype =
      DType::kFloat8E4M3;  // as the caller named it; this one, which out never has: not
  Shape out;               // of the caller's out and lse
  Shape lse;
  // The caller's tensors, in the order in which they came in: inputs, then a given out.
  Tensor tensors[kMaxTensors];
  int num_tensors = 0;
  nb::object buffer;  // of a QuantizedKV
};

// In this order, with make_target between them: numbers may be of any class, whose code runs as
// they are read.
// `kernels`: those that may be asked for, of the operation.
Problem read_options(const AttentionCall& call,
                     const std::vector<std::string_view>& kernels = kernel_names());
void read_tensors(const AttentionCall& call, const Target& target, Problem* problem);

// 1 / sqrt(head_dim).
double default_scale(const AttentionParams& params);

// The tensors that a call was given, by their arguments' names.
struct GivenTensor {
  const char* name;
  nb::handle value;
};
std::vector<GivenTensor> given_tensors(const AttentionCall& call);
// As the other read_tensors, of tensors that have come in: q, k and v, and any of the others, by
// name. `problem->params.device` is set; softmax_scale is left as it is. Needs no GIL.
void read_tensors(const std::vector<Tensor>& tensors, Problem* problem);

// Takes in a tensor of the caller's; the reference is good as long as the problem.
const Tensor& import_tensor(nb::handle object, const char* name, const Target& target,
                            Problem* problem);
// The same of one to write to; throws if it may not be written.
const Tensor& import_tensor_to_write(nb::handle object, const char* name, const Target& target,
                                     Problem* problem);

// Takes in the memory that a caller gives for a plan's workspace.
void read_workspace(nb::handle workspace, const Target& target, Problem* problem);

// An int32 array of `count` numbers; -1: of any number of them, but not none.
const std::int32_t* int32s_of(const Tensor& tensor, std::int64_t count, const char* dims);
// k_descale or v_descale: float32, of a shape that broadcasts to (batch_size, num_heads_kv).
void read_descales(const Tensor& descale, std::int64_t batch_size, std::int64_t num_heads_kv,
                   BasicTensorView<const float>* view);

void set_out(const Tensor& out, Problem* problem);  // checks shape, dtype and writability
void set_lse(const Tensor& lse, Problem* problem);

// Fill a view of a tensor that broadcasts, right-aligned, to [batch_size, num_heads, seqlen_q,
// seqlen_k], and of one that is [num_heads] or [batch_size, num_heads]. A dimension of one element
// has a stride of 0.
void read_scores(const Tensor& tensor, const AttentionParams& params, TensorView* view);
void read_by_head(const Tensor& tensor, const AttentionParams& params, TensorView* view);

// Offsets of a (batch, seqlen, num_heads) tensor's dimensions in `layout`.
struct Dims {
  int batch, row, head;
};
Dims dims_of(Layout layout);
const char* dims_text(Layout layout, bool listed = false);

// Lets a view of the parameters be a tensor of rows of a head. With `listed` the tensor has no
// dimension for the batch, and those of `at` are counted as if it had one.
template <typename T>
void set_view(const Tensor& tensor, const Dims& at, bool listed, BasicTensorView<T>* view) {
  view->data = static_cast<T*>(tensor.data);
  view->batch_stride = listed ? 0 : tensor.strides[at.batch];
  view->row_stride = tensor.strides[at.row - listed];
  view->head_stride = tensor.strides[at.head - listed];
}

// How q, k or v of a problem lie.
struct QkvDims {
  const char* names;
  Dims at;   // the batch is none with variable length
  int last;  // head_dim's
};

constexpr dlpack::DLDataType kInt32{dlpack::kInt, 32, 1};

void check_dtype(const Tensor& tensor, dlpack::DLDataType accepted);
void check_size(const Tensor& tensor, int dim, const char* what, std::int64_t accepted,
                const char* reason);
void check_rank(const Tensor& tensor, int ndim, const char* dims);
void check_shape(const Tensor& tensor, const Shape& shape, const char* dims);
void check_last_stride(const Tensor& tensor);

}  // namespace dlattn::python
