#pragma once

#include <mma.h>

#include "harness/block.h"

namespace dlattn::ptx {

template <typename Use, typename T, typename Layout>
void load_matrix(nvcuda::wmma::fragment<Use, 16, 16, 16, T, Layout>& to, const T* smem,
                 unsigned ldm) {
  if (!simt::in_dynamic_smem(smem, (15 * ldm + 16) * sizeof(T))) {
    simt::die("load_matrix of 16 x 16 elements at %p, not all of them in shared memory", smem);
  }
  nvcuda::wmma::load_matrix_sync(to, smem, ldm);
}

}  // namespace dlattn::ptx
