#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>

// The part of torch's stable C ABI (torch/csrc/inductor/aoti_torch/c/shim.h and
// torch/csrc/stable/c/shim.h, https://docs.pytorch.org/docs/stable/notes/libtorch_stable_abi.html)
// that crosses this module's boundary. Its functions are looked up in the libtorch that the process
// has loaded, so no torch is needed to build this.
namespace dlattn::python::torch_abi {

// An argument or a result of an operator. Tensors, strings and lists are handles that their holder
// owns; a float is a double's bits; what is optional is 0 or the address of a Value, which its
// holder owns too.
using Value = std::uint64_t;
using Error = std::int32_t;  // 0: none

struct TensorObject;
struct StringObject;
struct ListObject;
struct LibraryObject;
using Tensor = TensorObject*;
using String = StringObject*;
using List = ListObject*;
using Library = LibraryObject*;

// A function that runs an operator: takes its arguments off the stack, in the order of its schema,
// and puts its results there. Torch calls it without the GIL.
using Kernel = void(Value* stack, std::uint64_t num_arguments, std::uint64_t num_results);

// The version of the above that this module speaks: that of torch 2.10, which later ones know.
constexpr std::uint64_t kVersion = std::uint64_t{2} << 56 | std::uint64_t{10} << 48;

// As large as c10::Scalar at least, and like it returned in memory.
struct Scalar {
  alignas(16) unsigned char bytes[128];
  ~Scalar() {}
};

struct Functions {
  // Libraries of kernels. Deleting one takes its kernels out of the dispatcher.
  Error (*new_library)(const char* operators, const char* key, const char* file, std::uint32_t line,
                       Library* library);
  Error (*delete_library)(Library library);
  Error (*add_kernel)(Library library, const char* name, Kernel* kernel, std::uint64_t version);

  Error (*get_dim)(Tensor tensor, std::int64_t* dim);
  Error (*get_sizes)(Tensor tensor, std::int64_t** sizes);  // borrowed
  Error (*get_strides)(Tensor tensor, std::int64_t** strides);
  Error (*get_dtype)(Tensor tensor, std::int32_t* dtype);
  Error (*get_device_type)(Tensor tensor, std::int32_t* type);
  Error (*get_device_index)(Tensor tensor, std::int32_t* index);
  Error (*get_const_data)(Tensor tensor, const void** data);
  Error (*get_data)(Tensor tensor, void** data);  // to write to
  Error (*empty_strided)(std::int64_t ndim, const std::int64_t* sizes, const std::int64_t* strides,
                         std::int32_t dtype, std::int32_t device_type, std::int32_t device_index,
                         Tensor* tensor);
  Error (*delete_tensor)(Tensor tensor);

  Error (*get_length)(String string, std::size_t* length);
  Error (*get_characters)(String string, const char** characters);  // borrowed
  Error (*delete_string)(String string);
  Error (*get_size)(List list, std::size_t* size);
  Error (*get_item)(List list, std::size_t index, Value* item);  // as it lies in the list
  Error (*delete_list)(List list);                               // not its items
  Error (*new_list)(std::size_t capacity, List* list);
  Error (*append)(List list, Value item);

  // Throws torch's own exception, which becomes a RuntimeError, if `condition` is false.
  void (*check)(bool condition, const char* function, const char* file, std::uint32_t line,
                const char* message);
  std::int32_t (*cpu_type)();  // of a device
  std::int32_t (*cuda_type)();

  // Null where this torch lacks them.
  Error (*delete_value)(Value* value);  // torch 2.13; before that, `delete`
  const char* (*last_error)();          // torch 2.13
  Error (*new_value)(Value** value);    // torch 2.13; before that, `new`
  Error (*is_defined)(Tensor tensor, bool* defined);
  Error (*new_undefined)(Tensor* tensor);
  Error (*new_handle)(Tensor tensor, Tensor* other);  // of the same tensor
  Error (*copy)(Tensor to, Tensor from, std::int32_t non_blocking);
  // Calls an operator: takes its arguments off the stack and puts its results there.
  Error (*call)(const char* name, const char* overload, Value* stack, std::uint64_t version);
  Error (*fill)(Tensor tensor, double number);
  bool (*is_grad_enabled)();
  // torch's own kernels of attention, whatever the dispatcher has in their places; of
  // torch/csrc/inductor/aoti_torch/generated/c_shim_{cpu,cuda}.h. Null stands for no mask and
  // no scale.
  Error (*attention_for_cpu)(Tensor query, Tensor key, Tensor value, double dropout_p,
                             std::int32_t is_causal, Tensor* attn_mask, double* scale, Tensor* out,
                             Tensor* lse);
  Error (*attention_for_cpu_backward)(Tensor grad_out, Tensor query, Tensor key, Tensor value,
                                      Tensor out, Tensor lse, double dropout_p,
                                      std::int32_t is_causal, Tensor* attn_mask, double* scale,
                                      Tensor* dq, Tensor* dk, Tensor* dv);
  Error (*flash_attention_backward)(Tensor grad_out, Tensor query, Tensor key, Tensor value,
                                    Tensor out, Tensor lse, Tensor cum_seq_q, Tensor cum_seq_k,
                                    std::int64_t max_q, std::int64_t max_k, double dropout_p,
                                    std::int32_t is_causal, Tensor philox_seed,
                                    Tensor philox_offset, double* scale, Tensor* dq, Tensor* dk,
                                    Tensor* dv);  // torch with CUDA, as the next three
  Error (*packed_flash_attention_backward)(Tensor grad_out, Tensor query, Tensor key, Tensor value,
                                           Tensor out, Tensor lse, Tensor cum_seq_q,
                                           Tensor cum_seq_k, std::int64_t max_q, std::int64_t max_k,
                                           double dropout_p, std::int32_t is_causal,
                                           Tensor rng_state, Tensor unused, double* scale,
                                           std::int64_t* window_size_left,
                                           std::int64_t* window_size_right, Tensor* dq, Tensor* dk,
                                           Tensor* dv);
  Error (*efficient_attention_backward)(Tensor grad_out, Tensor query, Tensor key, Tensor value,
                                        Tensor attn_bias, Tensor out, Tensor lse,
                                        Tensor philox_seed, Tensor philox_offset, double dropout_p,
                                        const std::int32_t* grad_input_mask,
                                        std::int64_t grad_input_mask_size, std::int32_t is_causal,
                                        double* scale, Tensor* dq, Tensor* dk, Tensor* dv,
                                        Tensor* dbias);
  Error (*cudnn_attention_backward)(Tensor grad_out, Tensor query, Tensor key, Tensor value,
                                    Tensor out, Tensor lse, Tensor philox_seed,
                                    Tensor philox_offset, Tensor attn_bias, Tensor cum_seq_q,
                                    Tensor cum_seq_k, std::int64_t max_q, std::int64_t max_k,
                                    double dropout_p, std::int32_t is_causal, double* scale,
                                    Tensor* dq, Tensor* dk, Tensor* dv);
  Error (*get_num_threads)(std::uint32_t* count);  // of torch.set_num_threads()
  Error (*get_current_cuda_stream)(std::int32_t device_index, void** stream);  // torch with CUDA

  // C++ functions, by their names in the Itanium C++ ABI: the C ABI has none for this.
  void* (*context)();  // at::globalContext()
  bool (*are_algorithms_deterministic)(const void* context);
  // torch::PythonArgs::scalar_slow: the number of a Python object. Throws torch's own exception of
  // what its __float__ raises.
  Scalar (*to_scalar)(void* unused, PyObject* object);
  // THPVariable_Wrap: a torch.Tensor of a tensor, by its address. It may take the tensor out of its
  // handle, which stays its owner's.
  PyObject* (*to_object)(Tensor tensor);
};

}  // namespace dlattn::python::torch_abi
