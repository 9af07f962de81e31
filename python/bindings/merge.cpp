#include "merge.h"

#include <algorithm>
#include <string>
#include <vector>

#include "attention.h"
#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

// The parts of `outs` or `lses`: the tensors of a tuple, or the slices of a stacked tensor. Their
// tensors are added to `taken`.
std::vector<Tensor> import_parts(nb::handle parts, const char* name, const Target& target,
                                 std::vector<Tensor>* taken) {
  std::vector<Tensor> tensors;
  if (PyTuple_CheckExact(parts.ptr())) {
    for (const nb::handle part : nb::borrow<nb::tuple>(parts))
      tensors.push_back(import_tensor(part, name, target));
    taken->insert(taken->end(), tensors.begin(), tensors.end());
    return tensors;
  }
  const Tensor stacked = import_tensor(parts, name, target);
  taken->push_back(stacked);
  if (stacked.ndim == 0)
    unsupported(name, " has no dimensions; accepted: a list, or a stack along dimension 0");
  const std::int64_t count = std::min<std::int64_t>(stacked.shape[0], kMaxMergeStates + 1);
  for (std::int64_t n = 0; n < count; ++n) {
    Tensor part = stacked;
    part.data = static_cast<char*>(stacked.data) + n * stacked.strides[0] * stacked.dtype.bits / 8;
    part.ndim = stacked.ndim - 1;
    for (int i = 0; i < part.ndim; ++i) {
      part.shape[i] = stacked.shape[i + 1];
      part.strides[i] = stacked.strides[i + 1];
    }
    tensors.push_back(std::move(part));
  }
  return tensors;
}

// A stacked tensor, or a tuple of the parts that are in the list now: a list may be changed by any
// Python code that runs, and by other threads.
nb::object hold_parts(nb::handle parts, const char* name) {
  if (PyIter_Check(parts.ptr()) || PyAnySet_Check(parts.ptr()) || PyDict_Check(parts.ptr())) {
    wrong_type(name, " is of type ", type_text(parts),
               "; accepted: a list or tuple of arrays, or one array with a dimension for them");
  }
  if (!PyList_Check(parts.ptr()) && !PyTuple_Check(parts.ptr())) return nb::borrow(parts);
  nb::object held = nb::steal<nb::object>(guarded([&] { return PySequence_Tuple(parts.ptr()); }));
  if (!held.is_valid()) throw nb::python_error();
  return held;
}

// The tensor that decides framework and device.
nb::object first_part(nb::handle parts) {
  if (!PyTuple_CheckExact(parts.ptr())) return nb::borrow(parts);
  if (nb::len(parts) == 0) unsupported("outs is empty; accepted: 1 to ", kMaxMergeStates, " parts");
  return parts[0];
}

Outcome compute(nb::handle outs_object, nb::handle lses_object, Layout layout, const Target& target,
                Held* held) {
  std::vector<Tensor> taken;
  const std::vector<Tensor> outs = import_parts(outs_object, "outs", target, &taken);
  const std::vector<Tensor> lses = import_parts(lses_object, "lses", target, &taken);
  Merge merge = read_parts(outs, lses, layout, target.device);
  Allocation out = allocate(target, "out", merge.out.sizes, 4, merge.params.out.dtype);
  Allocation lse = allocate(target, "lse", merge.lse.sizes, 3, DType::kFloat32);
  set_results(out.tensor, lse.tensor, &merge);
  check_unchanged(taken.data(), taken.data() + taken.size());
  without_gil([&](Poll poll) {
    wait_for_owners(taken.data(), taken.data() + taken.size(), target);
    dlattn::merge_states(merge.params, target.stream, poll);
  });
  if (held) {
    for (const Tensor& tensor : taken) held->push_back(tensor.owner);
    held->push_back(out.tensor.owner);
    held->push_back(lse.tensor.owner);
  }
  return {take(target, &out), take(target, &lse)};
}

}  // namespace

Merge read_parts(const std::vector<Tensor>& outs, const std::vector<Tensor>& lses, Layout layout,
                 Device device) {
  if (outs.empty() || outs.size() > kMaxMergeStates) {
    unsupported("outs holds ", outs.size(),
                outs.size() > kMaxMergeStates ? " parts or more" : " parts", "; accepted: 1 to ",
                kMaxMergeStates);
  }
  if (lses.size() != outs.size()) {
    unsupported("lses holds ", lses.size(), " parts; accepted: ", outs.size(), ", as many as outs");
  }
  const Dims at = dims_of(layout);
  check_rank(outs[0], 4, dims_text(layout));

  Merge merge;
  merge.layout = layout;
  merge.out = {4, {outs[0].shape[0], outs[0].shape[1], outs[0].shape[2], outs[0].shape[3]}};
  MergeParams& p = merge.params;
  p.num_states = static_cast<int>(outs.size());
  constexpr char kDTypes[] = "float16, bfloat16, float32, float64";
  p.out.dtype = to_dtype(outs[0], kDTypes);
  if (size_of(p.out.dtype) == 1)
    unsupported("outs: dtype is ", to_string(p.out.dtype), "; accepted: ", kDTypes);
  p.device = device;
  p.batch_size = merge.out.sizes[at.batch];
  p.seqlen_q = merge.out.sizes[at.row];
  p.num_heads = merge.out.sizes[at.head];
  p.head_dim_v = merge.out.sizes[3];
  merge.lse = {3, {p.batch_size, p.num_heads, p.seqlen_q}};
  for (int n = 0; n < p.num_states; ++n) {
    check_shape(outs[n], merge.out, "that of the first part");
    if (!same(outs[n].dtype, outs[0].dtype)) {
      unsupported("outs: a part's dtype is ", dtype_text(outs[n].dtype),
                  "; accepted: ", dtype_text(outs[0].dtype), ", that of the first part");
    }
    check_last_stride(outs[n]);
    check_shape(lses[n], merge.lse, "(batch, num_heads, seqlen_q)");
    if (!same(lses[n].dtype, kFloat32)) {
      unsupported("lses: a part's dtype is ", dtype_text(lses[n].dtype), "; accepted: float32");
    }
    set_view(outs[n], at, false, &p.outs[n]);
    p.outs[n].dtype = p.out.dtype;
    p.lses[n].data = static_cast<const float*>(lses[n].data);
    p.lses[n].batch_stride = lses[n].strides[0];
    p.lses[n].head_stride = lses[n].strides[1];
    p.lses[n].row_stride = lses[n].strides[2];
  }
  return merge;
}

void set_results(const Tensor& out, const Tensor& lse, Merge* merge) {
  MergeParams& p = merge->params;
  set_view(out, dims_of(merge->layout), false, &p.out);
  p.lse.data = static_cast<float*>(lse.data);
  p.lse.batch_stride = lse.strides[0];
  p.lse.head_stride = lse.strides[1];
}

nb::object merge_states(nb::handle outs, nb::handle lses, nb::handle layout, nb::handle stream) {
  const Layout parsed = parse_layout(layout);
  const nb::object held_outs = hold_parts(outs, "outs");
  const nb::object held_lses = hold_parts(lses, "lses");
  const nb::object first = first_part(held_outs);
  Target target = make_target(first, "outs");
  return run_on(target, stream, [&](const Target& settled, Held* held) {
    return compute(held_outs, held_lses, parsed, settled, held);
  });
}

}  // namespace dlattn::python
