#pragma once

#include <cstdint>
#include <vector>

#include "devices.h"
#include "dlattn/attention.h"

// Problems and GPUs that plans are made for.
namespace test {

using namespace dlattn;

inline std::vector<DeviceInfo> gpus() {
  return {gpu("L4", 8, 9, 58, 101376), gpu("RTX 4090", 8, 9, 128, 101376),
          gpu("A100", 8, 0, 108, 166912), gpu("H200", 9, 0, 132, 232448)};
}

// Where the tensors of made-up problems would lie, this far apart. Nothing is read there.
inline char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 60);
constexpr std::int64_t kApart = std::int64_t{1} << 56;

// Shape (2, 2048, 8, head_dim), contiguous bshd, at 16-byte aligned addresses.
inline AttentionParams problem(DType dtype, std::int64_t head_dim) {
  AttentionParams p;
  p.device = {DeviceType::kCuda, 0};
  p.q.data = memory, p.k.data = memory + kApart, p.v.data = memory + 2 * kApart,
  p.out.data = memory + 3 * kApart;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype;
  p.batch_size = 2, p.seqlen_q = p.seqlen_k = 2048, p.num_heads = p.num_heads_kv = 8;
  p.head_dim = p.head_dim_v = head_dim;
  const std::int64_t row = 8 * head_dim;
  p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride = 2048 * row;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = row;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = head_dim;
  p.softmax_scale = 0.125;
  return p;
}

// Latents of 576 columns in pages of 64 keys, of which the first 512 are V, for a query of many
// heads in each sequence.
inline AttentionParams latents(std::int64_t batch, std::int64_t keys, std::int64_t heads) {
  alignas(16) static const std::int32_t numbers[64] = {};
  AttentionParams p = problem(DType::kBFloat16, 576);
  p.head_dim_v = 512, p.batch_size = batch, p.num_heads = heads, p.num_heads_kv = 1;
  p.seqlen_q = 1, p.seqlen_k = keys;
  p.q.row_stride = p.q.batch_stride = heads * 576, p.q.head_stride = 576;
  p.out.row_stride = p.out.batch_stride = heads * 512, p.out.head_stride = 512;
  p.k.row_stride = p.k.head_stride = 576, p.k.batch_stride = 64 * 576;
  p.v = p.k;
  p.page_table.data = numbers, p.page_table.batch_stride = keys / 64, p.page_size = 64;
  p.num_pages = batch * keys / 64;
  p.seqused_k = numbers;
  return p;
}

inline Options force(std::string_view kernel) {
  Options options;
  options.kernel = kernel;
  return options;
}

}  // namespace test
