#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "core/operations/forward.h"
#include "dlattn/attention.h"
#include "framework.h"
#include "options.h"
#include "tensor.h"
#include "tensor_checks.h"

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

// k_descale or v_descale: float32, of a shape that broadcasts to (batch_size, num_heads_kv).
void read_descales(const Tensor& descale, std::int64_t batch_size, std::int64_t num_heads_kv,
                   BasicTensorView<const float>* view);

void set_out(const Tensor& out, Problem* problem);  // checks shape, dtype and writability
void set_lse(const Tensor& lse, Problem* problem);

}  // namespace dlattn::python
