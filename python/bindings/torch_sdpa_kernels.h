#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dlattn/backward.h"
#include "problem.h"
#include "torch_arguments.h"
#include "torch_functions.h"
#include "torch_sdpa_choice.h"

// The native kernels in the place of torch's attention. They have the arguments and results of
// torch's operators, as those in dlattn/integrations/torch/sdpa.py and sdpa_backward.py, which say
// what is served and why.
namespace dlattn::python {

// A result of an operator: a tensor, which may be undefined, or a number.
struct SdpaResult {
  OwnedTensor tensor;
  std::int64_t number = 0;  // where there is no tensor

  torch_abi::Value release() {
    return tensor.get() ? reinterpret_cast<torch_abi::Value>(tensor.release())
                        : static_cast<torch_abi::Value>(number);
  }
};
constexpr int kMaxSdpaResults = 9;
using SdpaResults = SdpaResult[kMaxSdpaResults];

// An operator of attention, with where its arguments stand; -1: it has none of that name.
struct SdpaOperator {
  Signature signature;
  int grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale,
      compute_log_sumexp, return_debug_mask, grad_input_mask, cum_seq_q, cum_seq_k;

  constexpr explicit SdpaOperator(const Signature& signature)
      : signature(signature),
        grad_out(index("grad_out", "grad_out_")),
        query(signature.index("query")),
        key(signature.index("key")),
        value(signature.index("value")),
        out(signature.index("out")),
        logsumexp(signature.index("logsumexp")),
        dropout_p(signature.index("dropout_p")),
        is_causal(signature.index("is_causal")),
        attn_mask(index("attn_mask", "attn_bias")),
        scale(signature.index("scale")),
        compute_log_sumexp(signature.index("compute_log_sumexp")),
        return_debug_mask(signature.index("return_debug_mask")),
        grad_input_mask(signature.index("grad_input_mask")),
        cum_seq_q(signature.index("cum_seq_q")),
        cum_seq_k(signature.index("cum_seq_k")) {}

 private:
  // Torch has two names for some.
  constexpr int index(const char* one, const char* other) const {
    const int found = signature.index(one);
    return found >= 0 ? found : signature.index(other);
  }
};

// One of them.
struct SdpaKernel {
  const char* name;
  const char* backend;  // "CPU" or "CUDA"
  const SdpaOperator& op;
  int num_results;
  // Whether gradients="auto" may give dlattn a backward call. Null: a forward operator, all of
  // whose calls it gets.
  bool (*may_be_faster)(const Arguments& arguments);
  // Returns false, before anything is computed, where the call is left to torch: `if_faster`, and
  // torch's kernel is the faster one. Throws where it cannot serve the call; UnsupportedError
  // before anything is launched. Null: the kernel in Python serves what is for dlattn.
  bool (*compute)(const Arguments& arguments, bool if_faster, SdpaResults& results);
  // Calls torch's own kernel. CUDA's: that of a call which is not for dlattn; where it throws, or
  // is null, the call goes to the kernel in Python.
  void (*own)(const Arguments& arguments, SdpaResults& results);
};
inline bool is_of_cuda(const SdpaKernel& kernel) {
  return std::string_view(kernel.backend) == "CUDA";
}
extern const SdpaKernel kSdpaForCpu, kSdpaForCpuBackward;
extern const SdpaKernel kSdpaFlash, kSdpaEfficient, kSdpaCudnn;
extern const SdpaKernel kSdpaFlashBackward, kSdpaEfficientBackward, kSdpaCudnnBackward;
extern const SdpaKernel kSdpaPackedFlashBackward;

// These kernels and those of torch_overrideable.cpp have the following in common.

// Puts the results of a call there.
void put_on(torch_abi::Value* stack, int num_results, SdpaResults& results);
// Calls the operator of this name in torch.ops.dlattn, a kernel in Python, with the arguments that
// are still there, and takes its results. Throws what it raises, as torch's own exception: no
// object of this module's is to be alive then.
void call_python(const char* name, int num_results, torch_abi::Value* stack);
// Names a function of torch's that a kernel which leaves calls to Python lacks; null: none.
const char* what_torch_lacks(const std::string& key);
// Puts a kernel into torch's dispatcher. Returns why it cannot be done; empty if it is.
std::string add_torch_kernel(const char* operators, const std::string& key, const char* name,
                             torch_abi::Kernel* kernel, std::vector<torch_abi::Library>* libraries);

// Throws torch's own error, in torch's words.
void check_own_error(torch_abi::Error error);

// The parts of a call that several kernels share.

// Whether an argument is a tensor: autograd passes a mask that was not given as one that is none.
bool is_tensor(const Arguments& arguments, int i);
// Throws where the call has dropout or wants its mask.
void check_dense(const SdpaOperator& op, const Arguments& arguments);
// Takes in the tensors of a forward call and its scale; `causal` is what is_causal means. out and
// lse are left.
void read_forward(const SdpaOperator& op, const Arguments& arguments, Causal causal,
                  Problem* problem);
// Lets dout be in out's dtype, its rows side by side: those of x.expand() may not be. Returns the
// tensor to keep, if it had to be copied.
OwnedTensor read_dout(torch_abi::Tensor given, const Problem& problem, BackwardParams* params);
// A new tensor as a gradient of `input` (0: q, 1: k, 2: v). With `rows_first` the heads of a row
// lie side by side, else it is torch.empty_like(input).
OwnedTensor new_gradient(int i, torch_abi::Tensor input, bool rows_first, const Problem& problem,
                         BackwardParams* params);

}  // namespace dlattn::python
