#pragma once

#include <cstdint>

#include "core/problem/alignment.h"
#include "core/problem/quantized.h"
#include "core/problem/tensor_sizes.h"
#include "cuda/quantize/key_blocks/traits.h"
#include "cuda/tile/divider.h"

namespace dlattn::quantize::key_blocks {

// The arguments of the kernels beside the parameters. Made by the launcher.
struct Shape {
  QuantizedView to;
  Divider heads;
  Divider blocks;           // of keys, of a batch entry
  std::uint32_t num_items;  // of a head: tensors of blocks of keys, of all batch entries
  int steps;                // items that a thread block does
  bool whole_k, whole_v;    // rows are made of chunks, each aligned to 16 bytes
};

// The items of a head: blocks of keys, or of q, of all batch entries, times the tensors of each.
inline std::int64_t num_items(const QuantizedLayout& layout, const QuantizeParams& p) {
  return num_parts(false) * layout.blocks * (p.cu_seqlens_k ? 1 : p.batch_size);
}
inline std::int64_t num_items(const QueryLayout& layout, const QuantizeTask& task) {
  return num_parts(true) * layout.blocks * (task.cu_seqlens_q ? 1 : task.batch_size);
}

// The steps of a launch's thread blocks, and the number of blocks: none where there is nothing to
// do.
struct Grid {
  int steps = 1;
  std::int64_t blocks = 0;
};
constexpr Grid grid_of(std::int64_t items, std::int64_t heads, int steps) {
  return {steps, heads * ((items + steps - 1) / steps)};
}
inline Grid grid_of_keys(const QuantizeTask& task) {
  if (!task.quantized_kv || task.batch_size == 0) return {};
  const QuantizedLayout layout = quantized_layout(task);
  if (layout.rows == 0) return {};
  const std::int64_t items = num_items(layout, task);
  return grid_of(items, layout.heads,
                 num_steps(items * layout.heads, layout.columns, layout.block_n));
}
inline Grid grid_of_queries(const QuantizeTask& task) {
  if (!task.quantized_q || task.batch_size == 0) return {};
  const QueryLayout layout = query_layout(task);
  if (layout.rows == 0) return {};
  const std::int64_t items = num_items(layout, task);
  return grid_of(items, layout.heads,
                 num_steps(items * layout.heads, layout.columns, layout.block_m));
}

// q as the kernels take it: as if it were k, of a problem of its own.
inline QuantizeParams queries_as_keys(const QuantizeTask& task) {
  QuantizeParams p = task;
  p.k = task.q;
  p.v = {};
  p.num_heads_kv = task.num_heads;
  p.seqlen_k = task.seqlen_q;
  p.total_k = task.total_q;
  p.cu_seqlens_k = task.cu_seqlens_q;
  p.seqused_k = nullptr;
  return p;
}
inline Shape make_query_shape(const QuantizeTask& task, int steps) {
  const QueryLayout layout = query_layout(task);
  const bool varlen = task.cu_seqlens_q;
  const QuantizedQueries to = view_of(layout, task.quantized_q, varlen);
  const core::TensorSizes rows = {varlen ? 1 : task.batch_size, layout.rows, layout.heads};
  Shape shape{};
  shape.to.k = to.q;
  shape.to.k_scale = to.scale;
  shape.to.batch_stride = to.batch_stride;
  shape.to.head_stride = to.head_stride;
  shape.to.scale_batch_stride = to.scale_batch_stride;
  shape.to.scale_head_stride = to.scale_head_stride;
  shape.heads = Divider(static_cast<std::uint32_t>(layout.heads));
  shape.blocks = Divider(static_cast<std::uint32_t>(layout.blocks));
  shape.num_items = static_cast<std::uint32_t>(num_items(layout, task));
  shape.steps = steps;
  shape.whole_k = task.head_dim % kChunk == 0 && core::row_alignment(task.q, rows, 2) == 16;
  return shape;
}

// Blocks of keys are numbered as their scales: those of a varlen batch from first_block() on.
inline Shape make_shape(const QuantizeParams& p, int steps) {
  const QuantizedLayout layout = quantized_layout(p);
  const bool varlen = p.cu_seqlens_k;
  const core::TensorSizes keys = {varlen ? 1 : p.batch_size, layout.rows, layout.heads};
  const auto is_whole = [&](const TensorView& x, std::int64_t columns) {
    return columns % kChunk == 0 && core::row_alignment(x, keys, 2) == 16;
  };
  Shape shape;
  shape.to = view_of(layout, p.quantized_kv, varlen);
  shape.heads = Divider(static_cast<std::uint32_t>(layout.heads));
  shape.blocks = Divider(static_cast<std::uint32_t>(layout.blocks));
  shape.num_items = static_cast<std::uint32_t>(num_items(layout, p));
  shape.steps = steps;
  shape.whole_k = is_whole(p.k, p.head_dim);
  shape.whole_v = is_whole(p.v, p.head_dim_v);
  return shape;
}

}  // namespace dlattn::quantize::key_blocks
