#pragma once

#include <vector>

#include "attention.h"
#include "dlattn/append.h"

namespace dlattn::python {

// The arguments of append_kv as Python passed them, borrowed for the length of the call.
struct AppendCall {
  nb::handle k, v, k_cache, v_cache, seqused_k, page_table, slots, cu_seqlens_q, cache_batch_idx,
      leftpad_k, q, rotary_cos, rotary_sin, rotary_interleaved, q_fixed_position, k_descale,
      v_descale, layout, stream;
};

// Its tensors, as they come in, and the parameters made of them.
class AppendProblem {
 public:
  AppendProblem(const AppendCall& call, Layout layout, const Target& target);

  bool has_queries() const { return q_ != nullptr; }
  Allocation allocate_queries();  // q_out

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

  const Tensor& import_tensor(nb::handle object, const char* name, bool to_write = false);
  // `listed`: rows lie one behind the other, without a dimension for the batch.
  template <typename View>
  void set_view(const Tensor& tensor, bool listed, View* view) const;

  void check_rows(const Tensor& tensor, const Tensor& like, bool same_heads) const;
  void read_new_rows(const AppendCall& call);
  void read_cache(nb::handle object, const char* name, std::int64_t head_dim,
                  MutableTensorView* view, const Tensor* other);
  void read_caches(const AppendCall& call);
  void read_page_table(nb::handle object, std::int64_t rows);
  void read_places(const AppendCall& call);
  void read_slots(const Tensor& slots);
  void read_rotary(const AppendCall& call);
  void read_descale(nb::handle object, const char* name, BasicTensorView<const float>* view);

  const Layout layout_;
  const Target& target_;
  std::vector<Tensor> tensors_;
  const Tensor* q_ = nullptr;
  const Tensor* k_cache_ = nullptr;
  bool is_list_ = false;
  std::int64_t num_rows_ = 0;
};

}  // namespace dlattn::python
