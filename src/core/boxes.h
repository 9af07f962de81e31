#pragma once

#include <string>

#include "cuda/tile/boxes.h"

namespace dlattn::core {

// Says why TMA cannot read a tensor; empty if it can.
std::string misfit(const tile::TensorBox& box);

}  // namespace dlattn::core
