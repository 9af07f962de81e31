#pragma once

#include "cuda/ptx/smem.cuh"
#include "cuda/ptx/tensor_map.cuh"

namespace dlattn::ptx {

struct BoxAt {
  int column, row, head, batch;
};

inline void tma_load(SmemAddress dst, const TensorMap& map, SmemAddress mbarrier, BoxAt at) {
  const int coordinates[4] = {at.column, at.row, at.head, at.batch};
  simt::issue_bulk_load(model::decoded(map), at_smem_address(dst), at_smem_address(mbarrier),
                        coordinates, 4);
}

inline void tma_load(SmemAddress dst, const TensorMap& map, SmemAddress mbarrier, BoxAt at,
                     int last) {
  const int coordinates[5] = {at.column, at.row, at.head, at.batch, last};
  simt::issue_bulk_load(model::decoded(map), at_smem_address(dst), at_smem_address(mbarrier),
                        coordinates, 5);
}

namespace model {

template <typename Load>
void for_each_block(unsigned blocks, Load load) {
  if (blocks == 0 || blocks >> simt::num_cluster_blocks() != 0)
    simt::die("a copy to blocks %x of a cluster of %d", blocks, simt::num_cluster_blocks());
  for (unsigned rank = 0; blocks >> rank != 0; ++rank) {
    if ((blocks >> rank & 1) == 0) continue;
    simt::as_block(rank, [](void* f) { (*static_cast<Load*>(f))(); }, &load);
  }
}

}  // namespace model

inline void tma_load_to_blocks(SmemAddress dst, const TensorMap& map, SmemAddress mbarrier,
                               BoxAt at, unsigned blocks) {
  model::for_each_block(blocks, [&] { tma_load(dst, map, mbarrier, at); });
}

inline void tma_load_to_blocks(SmemAddress dst, const TensorMap& map, SmemAddress mbarrier,
                               BoxAt at, int last, unsigned blocks) {
  model::for_each_block(blocks, [&] { tma_load(dst, map, mbarrier, at, last); });
}

inline void tma_store(const TensorMap& map, SmemAddress src, BoxAt at, int last) {
  const int coordinates[5] = {at.column, at.row, at.head, at.batch, last};
  simt::issue_bulk_store(model::decoded(map), at_smem_address(src), coordinates, 5);
}

inline void tma_store(const TensorMap& map, SmemAddress src, BoxAt at) {
  const int coordinates[4] = {at.column, at.row, at.head, at.batch};
  simt::issue_bulk_store(model::decoded(map), at_smem_address(src), coordinates, 4);
}

inline void tma_store_commit() {
  simt::commit_bulk_stores();
}

inline void tma_store_wait_read() {
  simt::wait_bulk_stores(0);
}

inline void bulk_reduce_add(float* to, SmemAddress src, int bytes) {
  simt::issue_bulk_write(to, at_smem_address(src), bytes, simt::BulkWrite::kAddition);
}

inline void prefetch_tensor_map(const TensorMap&) {}

inline void fence_proxy_async() {
  simt::fence_async_proxy();
}

}  // namespace dlattn::ptx
