#pragma once

#include <cstdint>
#include <string>

#include "cuda/plan/tensor_box.h"

namespace dlattn::cuda {

// Says why page_box() does not describe a cache of such strides; empty if it does.
std::string page_refusal(const char* name, std::int64_t batch_stride, std::int64_t row_stride,
                         std::int64_t rows, std::int64_t pages);

// Says why TMA cannot read a tensor; empty if it can.
std::string tma_refusal(const TensorBox& box);

}  // namespace dlattn::cuda
