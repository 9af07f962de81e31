#pragma once

#include "dlattn/attention.h"

namespace dlattn::core {

// The predicted time of one of wmma's variants, which must not be kGeneral and must have an
// instance for the head_dim tile; infinite where its blocks do not fit the device. In microseconds
// of an H200, that is of 1.8 GHz: good for comparing variants on one device.
double wmma_cost(const AttentionParams& params, const DeviceInfo& device, int head_dim_tile,
                 int variant);

}  // namespace dlattn::core
