#pragma once

#include "core/problem/tensor_sizes.h"
#include "cpu/forward/task.h"
#include "cpu/simd.h"

namespace dlattn::cpu::DLATTN_CPU_ISA {

// The rows of K or V of a task's sequence and KV head: at one stride from each other, or in pages.
class KeyRows {
 public:
  // `x`: k or v of the problem, with `width` columns.
  KeyRows(const AttentionParams& p, const Task& task, const TensorView& x, std::int64_t width)
      : size_(size_of(x.dtype)),
        first_(static_cast<const char*>(x.data) + task.head_kv * x.head_stride * size_),
        stride_(core::key_sizes(p).rows > 1 ? x.row_stride : 0),  // any, of one row
        width_(width) {
    if (has_pages(p)) {
      page_table_ = p.page_table.data + task.entry_k * p.page_table.batch_stride;
      page_size_ = p.page_size;
      page_stride_ = x.batch_stride;
    } else {
      first_ += (task.entry_k * x.batch_stride + task.first_k * x.row_stride) * size_;
    }
  }

  static bool has_pages(const AttentionParams& p) { return p.page_table.data != nullptr; }

  std::int64_t stride() const { return stride_; }  // in elements
  std::int64_t width() const { return width_; }

  // The row of key j, which the sequence has.
  const char* row(std::int64_t j) const {
    if (!page_table_) return first_ + j * stride_ * size_;
    return first_ + (page_table_[j / page_size_] * page_stride_ + j % page_size_ * stride_) * size_;
  }

  // How many of `count` keys from j on lie at the stride behind it.
  std::int64_t run(std::int64_t j, std::int64_t count) const {
    if (!page_table_) return count;
    const std::int64_t rest = page_size_ - j % page_size_;
    return rest < count ? rest : count;
  }

 private:
  const std::int64_t size_;  // of an element
  const char* first_;
  const std::int64_t stride_;
  const std::int64_t width_;
  const std::int32_t* page_table_ = nullptr;
  std::int64_t page_size_ = 0;
  std::int64_t page_stride_ = 0;
};

}  // namespace dlattn::cpu::DLATTN_CPU_ISA
