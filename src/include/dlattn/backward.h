#pragma once

#include "dlattn/forward.h"

namespace dlattn {
struct BackwardParams {
  AttentionParams forward;
  TensorView dout;
  BasicTensorView<const float> dlse;
  MutableTensorView dq, dk, dv, dbias;
  BasicTensorView<float> dalibi_slopes, dsinks;
  bool deterministic = false;
};
}  // namespace dlattn
