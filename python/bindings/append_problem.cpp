#include "append_problem.h"

#include <type_traits>

#include "cache.h"
#include "errors.h"

namespace dlattn::python {
namespace {

constexpr dlpack::DLDataType kInt8{dlpack::kInt, 8, 1}, kInt64{dlpack::kInt, 64, 1};

// `is_read`: k, v or q, and no cache.
DType dtype_of(const Tensor& tensor, bool is_read) {
  if (same(tensor.dtype, kInt8)) return DType::kInt8;
  return to_dtype(tensor, is_read ? "float16, bfloat16, float32, float64"
                                  : "float16, bfloat16, float32, float64, int8, float8_e4m3fn");
}

}  // namespace

AppendProblem::AppendProblem(const AppendCall& call, Layout layout, const Target& target)
    : layout_(layout), target_(target) {
  tensors_.reserve(kMaxTensors);  // references to them are kept
  params.device = target.device;
  params.rotary_interleaved = parse_flag(call.rotary_interleaved, "rotary_interleaved");
  params.q_fixed_position = parse_flag(call.q_fixed_position, "q_fixed_position");
  read_new_rows(call);
  read_caches(call);
  read_places(call);
  read_rotary(call);
  read_descale(call.k_descale, "k_descale", &params.k_descale);
  read_descale(call.v_descale, "v_descale", &params.v_descale);
}

Allocation AppendProblem::allocate_queries() {
  Allocation made = allocate(target_, "q_out", q_->shape, q_->ndim, params.q.dtype);
  set_view(made.tensor, varlen(), &params.q_out);
  return made;
}

const Tensor& AppendProblem::import_tensor(nb::handle object, const char* name, bool to_write) {
  tensors_.push_back(python::import_tensor(object, name, target_, to_write));
  return tensors_.back();
}

template <typename View>
void AppendProblem::set_view(const Tensor& tensor, bool listed, View* view) const {
  python::set_view(tensor, dims_of(layout_), listed, view);
  view->dtype = dtype_of(tensor, std::is_same_v<View, TensorView>);
}

void AppendProblem::check_rows(const Tensor& tensor, const Tensor& like, bool same_heads) const {
  const int listed = varlen(), head = dims_of(layout_).head - listed, last = 3 - listed;
  check_rank(tensor, 4 - listed, dims_text(layout_, varlen()));
  check_last_stride(tensor);
  for (int i = 0; i < last; ++i) {
    if (tensor.shape[i] == like.shape[i] || (i == head && !same_heads)) continue;
    unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
                "; accepted: that of k but for ", same_heads ? "" : "num_heads and ", "head_dim, ",
                shape_text(like.shape, like.ndim));
  }
}

void AppendProblem::read_new_rows(const AppendCall& call) {
  const Tensor& k = import_tensor(call.k, "k");
  // Slots tell all of a list of tokens, so it needs no offsets.
  is_list_ = !call.slots.is_none() && k.ndim == 3;
  if (!call.cu_seqlens_q.is_none()) {
    const Tensor& offsets = import_tensor(call.cu_seqlens_q, "cu_seqlens_q");
    params.cu_seqlens_q = int32s_of(offsets, -1, "(batch + 1,)");
    params.batch_size = offsets.shape[0] - 1;
  }
  const Dims dims = dims_of(layout_);
  const int listed = varlen(), last = 3 - listed;
  const int row = dims.row - listed, head = dims.head - listed;
  check_rows(k, k, true);
  const Tensor& v = import_tensor(call.v, "v");
  check_rows(v, k, true);
  set_view(k, listed, &params.k);
  set_view(v, listed, &params.v);
  (params.cu_seqlens_q ? params.total_new : params.seqlen_new) = k.shape[row];
  if (!params.cu_seqlens_q) params.batch_size = is_list_ ? 1 : k.shape[dims.batch];
  params.num_heads_kv = k.shape[head];
  params.head_dim = k.shape[last];
  params.head_dim_v = v.shape[last];
  num_rows_ = params.cu_seqlens_q ? params.total_new : params.batch_size * params.seqlen_new;
  if (call.q.is_none()) return;
  q_ = &import_tensor(call.q, "q");
  check_rows(*q_, k, false);
  if (q_->shape[last] != params.head_dim) {
    unsupported("q: head_dim is ", q_->shape[last], "; accepted: ", params.head_dim, ", that of k");
  }
  set_view(*q_, listed, &params.q);
  params.num_heads = q_->shape[head];
}

void AppendProblem::read_cache(nb::handle object, const char* name, std::int64_t head_dim,
                               MutableTensorView* view, const Tensor* other) {
  if (tensor_type(object, name).deferred)
    unsupported(name, ": JAX arrays are immutable; accepted: a tensor that can be written");
  const Tensor& cache = import_tensor(object, name, true);
  check_writable(cache);
  check_rank(cache, 4,
             layout_ == Layout::kBshd ? "(batch or pages, rows, num_heads_kv, head_dim)"
                                      : "(batch or pages, num_heads_kv, rows, head_dim)");
  check_last_stride(cache);
  const Dims at = dims_of(layout_);
  Shape shape = {4, {cache.shape[0], cache.shape[1], cache.shape[2], head_dim}};
  if (other) {
    for (int i = 0; i < 3; ++i) shape.sizes[i] = other->shape[i];
  }
  shape.sizes[at.head] = params.num_heads_kv;
  check_shape(cache, shape, other ? "that of k_cache but for head_dim" : "with k's heads");
  set_view(cache, false, view);
}

void AppendProblem::read_caches(const AppendCall& call) {
  read_cache(call.k_cache, "k_cache", params.head_dim, &params.k_cache, nullptr);
  k_cache_ = &tensors_.back();
  read_cache(call.v_cache, "v_cache", params.head_dim_v, &params.v_cache, k_cache_);
}

void AppendProblem::read_page_table(nb::handle object, std::int64_t rows) {
  const Tensor& table = import_tensor(object, "page_table");
  check_dtype(table, kInt32);
  check_rank(table, 2, "(batch, pages of a sequence)");
  check_last_stride(table);
  if (table.shape[0] != params.batch_size) {
    unsupported("page_table: shape is ", shape_text(table.shape, 2), "; accepted: (",
                params.batch_size, ", pages of a sequence), as there are ", params.batch_size,
                " sequences");
  }
  params.page_table.data = static_cast<const std::int32_t*>(table.data);
  params.page_table.batch_stride = table.strides[0];
  params.seqlen_k = room_of_pages(table.shape[1], rows);
  // Without elements, so that no sequence has room for a row.
  static constexpr std::int32_t kNone = 0;
  if (!table.data) params.page_table.data = &kNone;
}

void AppendProblem::read_places(const AppendCall& call) {
  const Dims at = dims_of(layout_);
  const std::int64_t entries = k_cache_->shape[at.batch], rows = k_cache_->shape[at.row];
  if (!call.slots.is_none()) {
    read_slots(import_tensor(call.slots, "slots"));
  } else if (call.seqused_k.is_none()) {
    unsupported(
        "seqused_k is None; accepted: int32 (batch,), the lengths before the call, or "
        "slots");
  }
  const auto read_list = [&](nb::handle list, const char* name) -> const std::int32_t* {
    if (list.is_none()) return nullptr;
    return int32s_of(import_tensor(list, name), params.batch_size, "(batch,)");
  };
  params.seqused_k = read_list(call.seqused_k, "seqused_k");
  params.leftpad_k = read_list(call.leftpad_k, "leftpad_k");
  params.cache_batch_idx = read_list(call.cache_batch_idx, "cache_batch_idx");
  if (params.cache_batch_idx) params.cache_batch_size = entries;
  const bool paged = params.slots || !call.page_table.is_none();
  if (paged) params.page_size = rows, params.num_pages = entries;
  if (!call.page_table.is_none()) {
    read_page_table(call.page_table, rows);
  } else if (!params.slots) {
    params.seqlen_k = rows;
    if (!params.cache_batch_idx && entries != params.batch_size) {
      unsupported("k_cache: batch size is ", entries, "; accepted: ", params.batch_size,
                  ", that of k, or any with cache_batch_idx or page_table");
    }
  }
}

void AppendProblem::read_slots(const Tensor& slots) {
  if (!same(slots.dtype, kInt64) && !same(slots.dtype, kInt32))
    unsupported("slots: dtype is ", dtype_text(slots.dtype), "; accepted: int64 or int32");
  const Shape shape = is_list_ || params.cu_seqlens_q
                          ? Shape{1, {num_rows_}}
                          : Shape{2, {params.batch_size, params.seqlen_new}};
  check_shape(slots, shape, "one for each row of k");
  Tensor contiguous = slots;
  contiguous_strides(&contiguous);
  for (int i = 0; i < slots.ndim; ++i) {
    if (slots.strides[i] == contiguous.strides[i] || slots.shape[i] <= 1 || num_rows_ == 0)
      continue;
    unsupported("slots: the stride of dimension ", i, " is ", slots.strides[i],
                "; accepted: ", contiguous.strides[i], ", a contiguous tensor");
  }
  params.slot_bytes = slots.dtype.bits / 8;
  static constexpr std::int64_t kNone = -1;
  params.slots = slots.data ? slots.data : &kNone;
}

void AppendProblem::read_rotary(const AppendCall& call) {
  const auto read = [&](nb::handle object, const char* name, TensorView* view) {
    if (object.is_none()) return;
    const Tensor& table = import_tensor(object, name);
    check_rank(table, 2, "(positions, rotary_dim / 2)");
    check_last_stride(table);
    if (table.num_elements() == 0) {
      unsupported(name, ": shape is ", shape_text(table.shape, 2),
                  "; accepted: at least one position and one column");
    }
    view->dtype = to_dtype(table, "that of k, or float32");
    view->data = table.data;
    view->row_stride = table.strides[0];
    if (params.rotary_dim != 0) {
      check_shape(table, {2, {params.rotary_positions, params.rotary_dim / 2}},
                  "that of rotary_cos");
    }
    params.rotary_positions = table.shape[0];
    params.rotary_dim = 2 * table.shape[1];
  };
  read(call.rotary_cos, "rotary_cos", &params.rotary_cos);
  read(call.rotary_sin, "rotary_sin", &params.rotary_sin);
}

void AppendProblem::read_descale(nb::handle object, const char* name,
                                 BasicTensorView<const float>* view) {
  if (!object.is_none())
    read_descales(import_tensor(object, name), params.batch_size, params.num_heads_kv, view);
}

}  // namespace dlattn::python
