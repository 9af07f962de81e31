#pragma once

#include <string>

#include "cuda/tile/boxes.h"

namespace dlattn::core {

// What of a tensor the copy engine cannot be told; empty if it can.
std::string misfit(const tile::TensorBox& box);

}  // namespace dlattn::core
