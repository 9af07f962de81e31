#pragma once

#include "dlattn/attention.h"
#include "options.h"
#include "tensor.h"

// Checks of one tensor: its dtype, rank, sizes and last stride; and views of it.
namespace dlattn::python {

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

constexpr dlpack::DLDataType kInt32{dlpack::kInt, 32, 1};

void check_dtype(const Tensor& tensor, dlpack::DLDataType accepted);
void check_size(const Tensor& tensor, int dim, const char* what, std::int64_t accepted,
                const char* reason);
void check_rank(const Tensor& tensor, int ndim, const char* dims);
void check_shape(const Tensor& tensor, const Shape& shape, const char* dims);
void check_last_stride(const Tensor& tensor);
void check_writable(const Tensor& tensor);

// An int32 array of `count` numbers; -1: of any number of them, but not none.
const std::int32_t* int32s_of(const Tensor& tensor, std::int64_t count, const char* dims);

// Fill a view of a tensor that broadcasts, right-aligned, to [batch_size, num_heads, seqlen_q,
// seqlen_k], and of one that is [num_heads] or [batch_size, num_heads]. A dimension of one element
// has a stride of 0.
void read_scores(const Tensor& tensor, const AttentionParams& params, TensorView* view);
void read_by_head(const Tensor& tensor, const AttentionParams& params, TensorView* view);

}  // namespace dlattn::python
