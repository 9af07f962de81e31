#pragma once

#include "harness/bulk_copy.h"

namespace dlattn::ptx {

// Holds a simt::TensorMap here.
struct alignas(64) TensorMap {
  unsigned char encoded[128];
};

namespace model {

inline const simt::TensorMap& decoded(const TensorMap& map) {
  return *reinterpret_cast<const simt::TensorMap*>(map.encoded);
}

}  // namespace model

}  // namespace dlattn::ptx
