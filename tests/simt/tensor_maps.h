#pragma once

#include <cstdint>
#include <cstring>

#include "cuda/plan/tensor_box.h"
#include "cuda/ptx/tma.cuh"
#include "harness/block.h"
#include "tensor.h"

// Makes of a tensor and its box what the driver makes (src/cuda/tensor_map.cpp), for the model of
// the TMA. The driver and TMA may read at the address that a map has, whatever its boxes are: where
// no memory is, that is a fault.
namespace simt {

inline dlattn::ptx::TensorMap encode(const dlattn::cuda::TensorBox& box) {
  TensorMap map{};
  if (!box.data) return {};
  map.address = static_cast<unsigned char*>(const_cast<void*>(box.data));
  if (!is_in_a_tensor(map.address)) die("a tensor map that begins outside of every tensor");
  map.rank = box.rank;
  map.element_bytes = box.element_bytes;
  map.swizzle = box.box_columns * box.element_bytes;
  const int sizes[] = {box.box_columns, box.box_rows, box.box_depth, 1, 1};
  for (int i = 0; i < box.rank; ++i) {
    map.sizes[i] = static_cast<std::uint32_t>(box.sizes[i]);
    map.strides[i] = box.strides[i];
    map.box[i] = static_cast<std::uint16_t>(sizes[i]);
  }
  dlattn::ptx::TensorMap encoded;
  std::memcpy(encoded.encoded, &map, sizeof map);
  return encoded;
}

}  // namespace simt
