#pragma once

#include "cuda/ptx/cp_async.cuh"

namespace dlattn::ptx {

inline void cp_async_once(SmemAddress smem, const void* gmem, bool valid) {
  cp_async<16>(smem, gmem, valid);
}

}  // namespace dlattn::ptx
