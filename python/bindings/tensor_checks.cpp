#include "tensor_checks.h"

#include "errors.h"

namespace dlattn::python {

void read_scores(const Tensor& tensor, const AttentionParams& p, TensorView* view) {
  std::int64_t* const strides[4] = {&view->batch_stride, &view->head_stride, &view->row_stride,
                                    &view->col_stride};
  const std::int64_t full[4] = {p.batch_size, p.num_heads, p.seqlen_q, p.seqlen_k};
  bool fits = tensor.ndim <= 4;
  for (int i = 0; i < 4 && fits; ++i) {
    const int dim = i - (4 - tensor.ndim);
    *strides[i] = dim < 0 || tensor.shape[dim] == 1 ? 0 : tensor.strides[dim];
    fits = dim < 0 || tensor.shape[dim] == 1 || tensor.shape[dim] == full[i];
  }
  if (fits) return;
  unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
              "; accepted: one that broadcasts to (batch, num_heads, seqlen_q, seqlen_k) = ",
              shape_text(full, 4));
}

void read_by_head(const Tensor& tensor, const AttentionParams& p, TensorView* view) {
  const bool per_batch = tensor.ndim == 2;
  const bool fits = (tensor.ndim == 1 || per_batch) &&
                    tensor.shape[tensor.ndim - 1] == p.num_heads &&
                    (!per_batch || tensor.shape[0] == p.batch_size);
  if (!fits) {
    unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
                "; accepted: (num_heads,) = (", p.num_heads, ",) or (batch, num_heads) = (",
                p.batch_size, ", ", p.num_heads, ")");
  }
  view->batch_stride = per_batch ? tensor.strides[0] : 0;
  view->head_stride = tensor.strides[tensor.ndim - 1];
}

Dims dims_of(Layout layout) {
  return layout == Layout::kBshd ? Dims{0, 1, 2} : Dims{0, 2, 1};
}

const char* dims_text(Layout layout, bool listed) {
  if (listed)
    return layout == Layout::kBshd ? "(total, num_heads, head_dim)"
                                   : "(num_heads, total, head_dim)";
  return layout == Layout::kBshd ? "(batch, seqlen, num_heads, head_dim)"
                                 : "(batch, num_heads, seqlen, head_dim)";
}

void check_dtype(const Tensor& tensor, dlpack::DLDataType accepted) {
  if (same(tensor.dtype, accepted)) return;
  unsupported(tensor.name, ": dtype is ", dtype_text(tensor.dtype),
              "; accepted: ", dtype_text(accepted));
}

void check_size(const Tensor& tensor, int dim, const char* what, std::int64_t accepted,
                const char* reason) {
  if (tensor.shape[dim] == accepted) return;
  unsupported(tensor.name, ": ", what, " is ", tensor.shape[dim], ", shape ",
              shape_text(tensor.shape, tensor.ndim), "; accepted: ", accepted, ", ", reason);
}

void check_rank(const Tensor& tensor, int ndim, const char* dims) {
  if (tensor.ndim == ndim) return;
  unsupported(tensor.name, " has ", tensor.ndim, " dimensions, shape ",
              shape_text(tensor.shape, tensor.ndim), "; accepted: ", ndim, ", ", dims);
}

void check_shape(const Tensor& tensor, const Shape& shape, const char* dims) {
  bool fits = tensor.ndim == shape.ndim;
  for (int i = 0; i < shape.ndim && fits; ++i) fits = tensor.shape[i] == shape.sizes[i];
  if (fits) return;
  unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
              "; accepted: ", shape_text(shape.sizes, shape.ndim), ", ", dims);
}

void check_last_stride(const Tensor& tensor) {
  const int last = tensor.ndim - 1;
  if (tensor.strides[last] == 1 || tensor.shape[last] <= 1 || tensor.num_elements() == 0) return;
  unsupported(tensor.name, ": the stride of the last dimension is ", tensor.strides[last],
              "; accepted: 1 (elements of a row side by side)");
}

void check_writable(const Tensor& tensor) {
  if (tensor.read_only)
    unsupported(tensor.name, " is read-only; accepted: a tensor that can be written");
  if (tensor.is_copy) {
    unsupported(
        tensor.name,
        ": its exporter gave a copy, by which what is written would not reach it; accepted: "
        "a tensor whose own memory is exported");
  }
}

const std::int32_t* int32s_of(const Tensor& tensor, std::int64_t count, const char* dims) {
  check_dtype(tensor, kInt32);
  if (count >= 0) {
    check_shape(tensor, {1, {count}}, dims);
  } else {
    check_rank(tensor, 1, dims);
    if (tensor.shape[0] == 0) unsupported(tensor.name, " is empty; accepted: shape ", dims);
  }
  check_last_stride(tensor);
  return static_cast<const std::int32_t*>(tensor.data);
}

}  // namespace dlattn::python
