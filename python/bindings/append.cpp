#include "append.h"

#include <optional>
#include <vector>

#include "attention.h"
#include "dlattn/append.h"
#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

constexpr dlpack::DLDataType kInt8{dlpack::kInt, 8, 1}, kInt64{dlpack::kInt, 64, 1},
    kFloat32{dlpack::kFloat, 32, 1};

// The arguments as Python passed them, borrowed for the length of the call.
struct AppendCall {
  nb::handle k, v, k_cache, v_cache, seqused_k, page_table, slots, cu_seqlens_q, cache_batch_idx,
      leftpad_k, q, rotary_cos, rotary_sin, rotary_interleaved, q_fixed_position, k_scale, v_scale,
      layout, stream;
};

// Its tensors, as they come in, and the parameters made of them.
class AppendProblem {
 public:
  AppendProblem(const AppendCall& call, Layout layout, const Target& target)
      : layout_(layout), target_(target) {
    tensors_.reserve(kMaxTensors);  // references to them are kept
    params.device = target.device;
    params.rotary_interleaved = parse_flag(call.rotary_interleaved, "rotary_interleaved");
    params.q_fixed_position = parse_flag(call.q_fixed_position, "q_fixed_position");
    read_new_rows(call);
    read_caches(call);
    read_places(call);
    read_rotary(call);
    read_scale(call.k_scale, "k_scale", &params.k_scale);
    read_scale(call.v_scale, "v_scale", &params.v_scale);
  }

  // Makes room for q_out.
  std::optional<Allocation> allocate_queries() {
    if (!q_) return {};
    std::optional<Allocation> made(allocate(target_, "q_out", q_->shape, q_->ndim, params.q.dtype));
    set_view(made->tensor, varlen(), &params.q_out);
    return made;
  }

  void check_unchanged() const {
    python::check_unchanged(tensors_.data(), tensors_.data() + tensors_.size());
  }
  void wait_for_owners() const {
    python::wait_for_owners(tensors_.data(), tensors_.data() + tensors_.size(), target_);
  }

  AppendParams params;

 private:
  static constexpr int kMaxTensors = 14;

  bool varlen() const { return params.cu_seqlens_q || is_list_; }

  const Tensor& take_in(nb::handle object, const char* name, bool to_write = false) {
    tensors_.push_back(import_tensor(object, name, target_, to_write));
    return tensors_.back();
  }

  DType dtype_of(const Tensor& tensor) const {
    return same(tensor.dtype, kInt8)
               ? DType::kInt8
               : to_dtype(tensor, "float16, bfloat16, float32, float64, int8, float8_e4m3fn");
  }

  // `listed`: rows lie one behind the other, without a dimension for the batch.
  template <typename View>
  void set_view(const Tensor& tensor, bool listed, View* view) const {
    const Dims at = dims_of(layout_);
    view->data = tensor.data;
    view->dtype = dtype_of(tensor);
    view->batch_stride = listed ? 0 : tensor.strides[at.batch];
    view->row_stride = tensor.strides[at.row - listed];
    view->head_stride = tensor.strides[at.head - listed];
  }

  const char* rows_text() const {
    if (!varlen()) return dims_text(layout_);
    return layout_ == Layout::kBshd ? "(total, num_heads, head_dim)"
                                    : "(num_heads, total, head_dim)";
  }

  void read_new_rows(const AppendCall& call) {
    const Tensor& k = take_in(call.k, "k");
    // Slots tell all of a list of tokens, so it needs no offsets.
    is_list_ = !call.slots.is_none() && k.ndim == 3;
    if (!call.cu_seqlens_q.is_none()) {
      const Tensor& offsets = take_in(call.cu_seqlens_q, "cu_seqlens_q");
      params.cu_seqlens_q = int32s_of(offsets, -1, "(batch + 1,)");
      params.batch_size = offsets.shape[0] - 1;
    }
    const Dims dims = dims_of(layout_);
    const int listed = varlen(), last = 3 - listed;
    const int row = dims.row - listed, head = dims.head - listed;
    const auto check = [&](const Tensor& tensor, const Tensor& like, bool same_heads) {
      check_rank(tensor, 4 - listed, rows_text());
      check_last_stride(tensor);
      for (int i = 0; i < last; ++i) {
        if (tensor.shape[i] == like.shape[i] || (i == head && !same_heads)) continue;
        unsupported(tensor.name, ": shape is ", shape_text(tensor.shape, tensor.ndim),
                    "; accepted: that of k but for ", same_heads ? "" : "num_heads and ",
                    "head_dim, ", shape_text(like.shape, like.ndim));
      }
    };
    check(k, k, true);
    const Tensor& v = take_in(call.v, "v");
    check(v, k, true);
    set_view(k, listed, &params.k);
    set_view(v, listed, &params.v);
    (params.cu_seqlens_q ? params.total_new : params.seqlen_new) = k.shape[row];
    if (!params.cu_seqlens_q) params.batch_size = is_list_ ? 1 : k.shape[dims.batch];
    params.num_heads_kv = k.shape[head];
    params.head_dim = k.shape[last];
    params.head_dim_v = v.shape[last];
    num_rows_ = params.cu_seqlens_q ? params.total_new : params.batch_size * params.seqlen_new;
    if (call.q.is_none()) return;
    q_ = &take_in(call.q, "q");
    check(*q_, k, false);
    if (q_->shape[last] != params.head_dim) {
      unsupported("q: head_dim is ", q_->shape[last], "; accepted: ", params.head_dim,
                  ", that of k");
    }
    set_view(*q_, listed, &params.q);
    params.num_heads = q_->shape[head];
  }

  void read_cache(nb::handle object, const char* name, std::int64_t head_dim,
                  MutableTensorView* view, const Tensor* other) {
    if (tensor_type(object, name).deferred)
      unsupported(name, ": JAX arrays are immutable; accepted: a tensor that can be written");
    const Tensor& cache = take_in(object, name, true);
    if (cache.read_only) unsupported(name, " is read-only; accepted: a tensor that can be written");
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

  void read_caches(const AppendCall& call) {
    read_cache(call.k_cache, "k_cache", params.head_dim, &params.k_cache, nullptr);
    k_cache_ = &tensors_.back();
    read_cache(call.v_cache, "v_cache", params.head_dim_v, &params.v_cache, k_cache_);
  }

  void read_places(const AppendCall& call) {
    const Dims at = dims_of(layout_);
    const std::int64_t entries = k_cache_->shape[at.batch], rows = k_cache_->shape[at.row];
    if (!call.slots.is_none()) {
      read_slots(take_in(call.slots, "slots"));
    } else if (call.seqused_k.is_none()) {
      unsupported(
          "seqused_k is None; accepted: int32 (batch,), the lengths before the call, or "
          "slots");
    }
    if (!call.seqused_k.is_none())
      params.seqused_k =
          int32s_of(take_in(call.seqused_k, "seqused_k"), params.batch_size, "(batch,)");
    if (!call.leftpad_k.is_none())
      params.leftpad_k =
          int32s_of(take_in(call.leftpad_k, "leftpad_k"), params.batch_size, "(batch,)");
    if (!call.cache_batch_idx.is_none()) {
      params.cache_batch_idx = int32s_of(take_in(call.cache_batch_idx, "cache_batch_idx"),
                                         params.batch_size, "(batch,)");
      params.cache_batch_size = entries;
    }
    const bool paged = params.slots || !call.page_table.is_none();
    if (paged) params.page_size = rows, params.num_pages = entries;
    if (!call.page_table.is_none()) {
      const Tensor& table = take_in(call.page_table, "page_table");
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
      params.seqlen_k = table.shape[1] * rows;
      // Without elements, so that no sequence has room for a row.
      static constexpr std::int32_t kNone = 0;
      if (!table.data) params.page_table.data = &kNone;
    } else if (!params.slots) {
      params.seqlen_k = rows;
      if (!params.cache_batch_idx && entries != params.batch_size) {
        unsupported("k_cache: batch size is ", entries, "; accepted: ", params.batch_size,
                    ", that of k, or any with cache_batch_idx or page_table");
      }
    }
  }

  void read_slots(const Tensor& slots) {
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

  void read_rotary(const AppendCall& call) {
    const auto read = [&](nb::handle object, const char* name, TensorView* view) {
      if (object.is_none()) return;
      const Tensor& table = take_in(object, name);
      check_rank(table, 2, "(positions, rotary_dim / 2)");
      check_last_stride(table);
      if (table.num_elements() == 0) {
        unsupported(name, ": shape is ", shape_text(table.shape, 2),
                    "; accepted: at least one position and one column");
      }
      view->dtype = to_dtype(table, "float16, bfloat16, float32, float64");
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

  void read_scale(nb::handle object, const char* name, BasicTensorView<const float>* view) {
    if (object.is_none()) return;
    const Tensor& scale = take_in(object, name);
    check_dtype(scale, kFloat32);
    view->data = static_cast<const float*>(scale.data);
    if (scale.ndim < 2 && scale.num_elements() == 1) {
      view->batch_stride = view->head_stride = 0;
    } else if (scale.ndim == 1 && scale.shape[0] == params.num_heads_kv) {
      view->batch_stride = 0, view->head_stride = scale.strides[0];
    } else if (scale.ndim == 2 && scale.shape[0] == params.batch_size &&
               scale.shape[1] == params.num_heads_kv) {
      view->batch_stride = scale.strides[0], view->head_stride = scale.strides[1];
    } else {
      unsupported(name, ": shape is ", shape_text(scale.shape, scale.ndim),
                  "; accepted: one element, (", params.num_heads_kv, ",) or (", params.batch_size,
                  ", ", params.num_heads_kv, "), (batch, num_heads_kv)");
    }
  }

  const Layout layout_;
  const Target& target_;
  std::vector<Tensor> tensors_;
  const Tensor* q_ = nullptr;
  const Tensor* k_cache_ = nullptr;
  bool is_list_ = false;
  std::int64_t num_rows_ = 0;
};

nb::object append_kv(const AppendCall& call) {
  const Layout layout = parse_layout(call.layout);
  Target target = make_target(call.k, "k");
  if (target.type->deferred) {
    unsupported(
        "k is a JAX array; accepted: a tensor of k_cache's library, as a JAX array cannot "
        "be a cache");
  }
  set_stream(call.stream, &target);
  AppendProblem problem(call, layout, target);
  std::optional<Allocation> q_out = problem.allocate_queries();
  problem.check_unchanged();
  const auto tell_autograd = [&] {
    tell_written(call.k_cache, "k_cache");
    tell_written(call.v_cache, "v_cache");
  };
  try {
    without_gil([&](Poll poll) {
      problem.wait_for_owners();
      dlattn::append_kv(problem.params, target.stream, poll);
    });
  } catch (const nb::python_error&) {
    tell_autograd();  // a part may have been written
    throw;
  }
  tell_autograd();
  return q_out ? take(target, &*q_out) : nb::none();
}

}  // namespace

void register_append_kv(nb::module_& module) {
  module.def(
      "append_kv",
      [](nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle seqused_k,
         nb::handle page_table, nb::handle slots, nb::handle cu_seqlens_q,
         nb::handle cache_batch_idx, nb::handle leftpad_k, nb::handle q, nb::handle rotary_cos,
         nb::handle rotary_sin, nb::handle rotary_interleaved, nb::handle q_fixed_position,
         nb::handle k_scale, nb::handle v_scale, nb::handle layout, nb::handle stream) {
        return append_kv({k, v, k_cache, v_cache, seqused_k, page_table, slots, cu_seqlens_q,
                          cache_batch_idx, leftpad_k, q, rotary_cos, rotary_sin, rotary_interleaved,
                          q_fixed_position, k_scale, v_scale, layout, stream});
      },
      nb::arg("k").none(), nb::arg("v").none(), nb::arg("k_cache").none(),
      nb::arg("v_cache").none(), nb::arg("seqused_k").none(), nb::arg("page_table").none(),
      nb::arg("slots").none(), nb::arg("cu_seqlens_q").none(), nb::arg("cache_batch_idx").none(),
      nb::arg("leftpad_k").none(), nb::arg("q").none(), nb::arg("rotary_cos").none(),
      nb::arg("rotary_sin").none(), nb::arg("rotary_interleaved").none(),
      nb::arg("q_fixed_position").none(), nb::arg("k_scale").none(), nb::arg("v_scale").none(),
      nb::arg("layout").none(), nb::arg("stream").none());
}

}  // namespace dlattn::python
