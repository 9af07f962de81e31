#pragma once

#include <cstdint>

#include "core/quantized.h"
#include "core/tensor_sizes.h"
#include "cuda/quantize/key_blocks/traits.h"
#include "cuda/tile/alignment.h"
#include "cuda/tile/divider.h"

namespace dlattn::quantize::key_blocks {

// What kernels need beside the parameters. Made by the launcher.
struct Shape {
  QuantizedView to;
  Divider heads;
  Divider blocks;         // of keys, of a batch entry
  bool whole_k, whole_v;  // rows are made of chunks, each aligned to 16 bytes
};

// Blocks of keys are numbered as their scales: those of a varlen batch from first_block() on.
inline Shape make_shape(const QuantizeParams& p) {
  const QuantizedLayout layout = quantized_layout(p);
  const bool varlen = p.cu_seqlens_k;
  const core::TensorSizes keys = {varlen ? 1 : p.batch_size, layout.rows, layout.heads};
  const auto is_whole = [&](const TensorView& x, std::int64_t columns) {
    return columns % kChunk == 0 && row_alignment(x, keys, 2) == 16;
  };
  Shape shape;
  shape.to = view_of(layout, p.quantized_kv, varlen);
  shape.heads = Divider(static_cast<std::uint32_t>(layout.heads));
  shape.blocks = Divider(static_cast<std::uint32_t>(layout.blocks));
  shape.whole_k = is_whole(p.k, p.head_dim);
  shape.whole_v = is_whole(p.v, p.head_dim_v);
  return shape;
}

}  // namespace dlattn::quantize::key_blocks
