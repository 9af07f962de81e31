#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "dlattn/attention.h"
#include "framework.h"
#include "options.h"
#include "tensor.h"

namespace dlattn::python {

// The arguments of attention and attention_varlen, as Python passed them. Borrowed for the length
// of the call.
struct AttentionCall {
  static constexpr int kMaxArguments = 32;

  // In the order of kArguments (problem.cpp); null where the function called does not take it.
  nb::handle values[kMaxArguments];
  // Those of them that are read by name.
  nb::handle q, k, v, softmax_scale, out, stream;
  nb::handle cu_seqlens_q, cu_seqlens_k;  // attention_varlen only, else null

  bool varlen() const { return cu_seqlens_q.is_valid(); }
};

// Binds `function` as `name` for attention's arguments and as `name_varlen` for attention_varlen's.
using CallFunction = nb::object (*)(const AttentionCall&);
void def_call(nb::module_& module, const char* name, const char* name_varlen,
              CallFunction function);

// Sizes of a tensor of the caller's.
struct Shape {
  int ndim = 0;
  std::int64_t sizes[4] = {};
};

// An AttentionCall with its tensors taken in and its arguments checked against each other; what is
// left for dlattn::forward to check are the values in `params`.
struct Problem {
  static constexpr int kMaxTensors = 14;

  AttentionParams params;
  Options options;
  Layout layout = Layout::kBshd;
  bool return_lse = false;
  DType out_dtype =
      DType::kFloat8E4M3;  // as the caller named it; this one, which out never has: not
  Shape out;               // of the caller's out and lse
  Shape lse;
  // Of the caller's, in the order in which they came in: inputs, then a given out.
  Tensor tensors[kMaxTensors];
  int num_tensors = 0;
  // On the CPU, copies of cu_seqlens_q, cu_seqlens_k and seqused_k: what was checked must be what
  // is used, whoever writes to the caller's arrays meanwhile.
  std::vector<std::int32_t> sequences;
  nb::object buffer;  // of a QuantizedKV
};

// In this order, with make_target between them: numbers may be of any class, whose code runs as
// they are read.
Problem read_options(const AttentionCall& call);
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
const Tensor& take_in(nb::handle object, const char* name, const Target& target, Problem* problem);
// The same of one to write to; throws if it may not be written.
const Tensor& take_in_out(nb::handle out, const Target& target, Problem* problem);

// An int32 array of `count` numbers; -1: of any number of them, but not none.
const std::int32_t* read_int32s(const Tensor& tensor, std::int64_t count, const char* dims,
                                Problem* problem);

void set_out(const Tensor& out, Problem* problem);  // checks shape, dtype and writability
void set_lse(const Tensor& lse, Problem* problem);

// Offsets of a (batch, seqlen, num_heads) tensor's dimensions in `layout`.
struct Dims {
  int batch, row, head;
};
Dims dims_of(Layout layout);
const char* dims_text(Layout layout);

void check_rank(const Tensor& tensor, int ndim, const char* dims);
void check_shape(const Tensor& tensor, const Shape& shape, const char* dims);
void check_last_stride(const Tensor& tensor);

}  // namespace dlattn::python
