#include "backward_tensors.h"

#include "errors.h"

namespace dlattn::python {
namespace {

constexpr int kBias = 3, kSlopes = 4;  // places in kGradients

void check_as(const Tensor& tensor, const Tensor& input, DType dtype) {
  check_dtype(tensor, to_dlpack(dtype));
  check_shape(tensor, shape_of(input), concat("that of ", input.name).c_str());
}

}  // namespace

DType gradient_dtype(int i, const Tensor& input) {
  return i > kBias ? DType::kFloat32 : to_dtype(input, "that of q, or float32");
}

void set_dout(const Tensor& dout, const Problem& problem, BackwardParams* params) {
  const DType dtype = problem.params.out.dtype;
  check_shape(dout, problem.out, "that of out");
  check_dtype(dout, to_dlpack(dtype));
  check_last_stride(dout);
  set_view(dout, dims_of(problem.layout), problem.out.ndim == 3, &params->dout);
  params->dout.dtype = dtype;
}

void set_dlse(const Tensor& dlse, const Problem& problem, BackwardParams* params) {
  check_dtype(dlse, kFloat32);
  check_shape(dlse, problem.lse, "that of lse");
  params->dlse.data = static_cast<const float*>(dlse.data);
  params->dlse.batch_stride = dlse.ndim == 3 ? dlse.strides[0] : 0;
  params->dlse.head_stride = dlse.strides[dlse.ndim - 2];
  params->dlse.row_stride = dlse.strides[dlse.ndim - 1];
}

void set_gradient(int i, const Tensor& tensor, const Tensor& input, const Problem& problem,
                  BackwardParams* params) {
  const DType dtype = gradient_dtype(i, input);
  check_as(tensor, input, dtype);
  const AttentionParams& p = problem.params;
  if (i < kBias) {
    MutableTensorView* const views[] = {&params->dq, &params->dk, &params->dv};
    check_last_stride(tensor);
    set_view(tensor, dims_of(problem.layout), tensor.ndim == 3, views[i]);
    views[i]->dtype = dtype;
    return;
  }
  TensorView view;
  if (i == kBias) {
    MutableTensorView& dbias = params->dbias;
    read_scores(tensor, p, &view);
    dbias.batch_stride = view.batch_stride, dbias.head_stride = view.head_stride;
    dbias.row_stride = view.row_stride, dbias.col_stride = view.col_stride;
    dbias.data = tensor.data, dbias.dtype = dtype;
    return;
  }
  if (i == kSlopes) {
    read_by_head(tensor, p, &view);
  } else {
    view.head_stride = tensor.strides[0];
  }
  BasicTensorView<float>& gradient = i == kSlopes ? params->dalibi_slopes : params->dsinks;
  gradient.data = static_cast<float*>(tensor.data);
  gradient.batch_stride = view.batch_stride, gradient.head_stride = view.head_stride;
}

void refuse_needs(const std::string& needs) {
  unsupported("needs is ", needs,
              ", which names no gradient; accepted: at least one of them, as (\"dq\", \"dk\"), or "
              "None");
}

}  // namespace dlattn::python
