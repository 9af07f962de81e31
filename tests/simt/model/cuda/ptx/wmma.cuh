#pragma once

#include <mma.h>

namespace dlattn::ptx {

template <typename Use, typename T, typename Layout>
void load_matrix(nvcuda::wmma::fragment<Use, 16, 16, 16, T, Layout>& to, const T* smem,
                 unsigned ldm) {
  nvcuda::wmma::load_matrix_sync(to, smem, ldm);
}

}  // namespace dlattn::ptx
