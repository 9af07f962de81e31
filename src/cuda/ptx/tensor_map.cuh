#pragma once

namespace dlattn::ptx {

// PTX ISA, "Tensors: Tensor-map". A tensor in global memory and the box of it that one instruction
// copies, in the opaque form that TMA reads: 128 bytes that the driver has encoded (its
// CUtensorMap), in a parameter of the kernel (__grid_constant__).
struct alignas(128) TensorMap {
  unsigned char encoded[128];
};

}  // namespace dlattn::ptx
