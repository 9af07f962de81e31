#pragma once

#include <string>

#include "cuda/tile/boxes.h"

namespace dlattn::core {

// What of a tensor TMA cannot be told; empty if it can be told all.
std::string misfit(const tile::TensorBox& box);

}  // namespace dlattn::core
