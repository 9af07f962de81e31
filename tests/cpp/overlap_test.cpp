// Which outputs share memory with an input: judged by core/overlap, and by looking at every byte.
#include "core/validate/overlap.h"

#include <random>
#include <vector>

#include "check.h"
#include "core/validate/validate.h"

using namespace dlattn;
using core::Region;

namespace {

// Never read: validation looks at addresses only.
char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
constexpr std::int64_t kApart = 1 << 20;

template <typename Visit>
void each_byte(const Region& region, Visit visit) {
  std::int64_t at[4];
  for (at[0] = 0; at[0] < region.sizes[0]; ++at[0]) {
    for (at[1] = 0; at[1] < region.sizes[1]; ++at[1]) {
      for (at[2] = 0; at[2] < region.sizes[2]; ++at[2]) {
        for (at[3] = 0; at[3] < region.sizes[3]; ++at[3]) {
          std::int64_t element = 0;
          for (int dim = 0; dim < 4; ++dim) {
            if (region.sizes[dim] > 1) element += at[dim] * region.strides[dim];
          }
          for (std::int64_t byte = 0; byte < region.run * region.element_bytes; ++byte) {
            visit(static_cast<const char*>(region.data) - memory + element * region.element_bytes +
                  byte);
          }
        }
      }
    }
  }
}

bool share_a_byte(const Region& a, const Region& b) {
  std::vector<bool> taken(1 << 16);
  bool shared = false;
  each_byte(a, [&](std::int64_t byte) { taken[static_cast<std::size_t>(byte)] = true; });
  each_byte(b, [&](std::int64_t byte) { shared |= taken[static_cast<std::size_t>(byte)]; });
  return shared;
}

// Regions that are called disjoint have no byte in common, whatever the strides.
void random_regions() {
  std::mt19937 random(12);
  const auto pick = [&](int from, int to) {
    return std::uniform_int_distribution<std::int64_t>(from, to)(random);
  };
  const auto draw = [&](std::int64_t unit) {
    Region region{};
    region.element_bytes = std::int64_t{1} << pick(0, 3);
    region.data = memory + pick(0, 60) * region.element_bytes;
    region.run = pick(0, 20) ? pick(1, 6) : 0;
    for (int dim = 0; dim < 4; ++dim) {
      region.sizes[dim] = pick(0, 40) ? pick(1, 4) : 0;
      region.strides[dim] = pick(0, 2) ? unit * pick(0, 8) : pick(0, 40);
      if (region.sizes[dim] == 1) region.strides[dim] = pick(0, 1) ? -5 : INT64_MAX;
    }
    return region;
  };
  int interleaved = 0, refused = 0;
  for (int n = 0; n < 200000; ++n) {
    const std::int64_t unit = pick(1, 24);
    const Region a = draw(unit), b = draw(unit);
    const bool shared = share_a_byte(a, b);
    const bool judged = core::disjoint(a, b);
    CHECK(judged == core::disjoint(b, a));
    CHECK(!(judged && shared));
    interleaved += judged;
    refused += !judged && shared;
  }
  CHECK(interleaved > 10000 && refused > 10000);
}

void beyond_the_address_space() {
  const Region far = {memory, 8, 8, {2, 1, 1, 1}, {INT64_MAX, 0, 0, 0}};
  const Region near = {memory + 4096, 8, 8, {4, 1, 1, 1}, {8, 0, 0, 0}};
  CHECK(!core::disjoint(far, near) && !core::disjoint(near, far));
}

constexpr std::int64_t kBatch = 2, kRows = 6, kHeads = 4, kDim = 8;

// q, k, v and out of one buffer: (batch, seqlen, part, num_heads, head_dim), parts of `part`
// elements, rows of `row`.
AttentionParams packed(std::int64_t row, std::int64_t part, std::int64_t head) {
  AttentionParams p;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat32;
  p.batch_size = kBatch, p.seqlen_q = p.seqlen_k = kRows;
  p.num_heads = p.num_heads_kv = kHeads, p.head_dim = p.head_dim_v = kDim;
  p.softmax_scale = 0.5;
  const std::int64_t batch = kRows * row;
  p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride = batch;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = row;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = head;
  p.q.data = memory, p.k.data = memory + 4 * part, p.v.data = memory + 8 * part,
  p.out.data = memory + 12 * part;
  return p;
}

std::string verdict(const AttentionParams& params) {
  try {
    core::validate(params);
  } catch (const UnsupportedError& error) {
    return error.what();
  }
  return "accepted";
}

std::string shared(const std::string& output, const std::string& input) {
  return output + " shares memory with " + input +
         "; accepted: memory of its own, or a slice of the same buffer whose strides show that it "
         "has no element in common";
}

void slices_of_one_buffer() {
  const std::int64_t width = kHeads * kDim;
  CHECK(verdict(packed(4 * width, width, kDim)) == "accepted");     // (b, s, 4, h, d)
  CHECK(verdict(packed(4 * width, kDim, 4 * kDim)) == "accepted");  // (b, s, h, 4, d)
  AttentionParams p = packed(width, kRows * width, kDim);           // (b, 4, s, h, d)
  p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride = 4 * kRows * width;
  CHECK(verdict(p) == "accepted");
  CHECK(verdict(packed(width, kBatch * kRows * width, kDim)) == "accepted");  // (4, b, s, h, d)

  // (b, s, 3, h, d) with out in the place of one part.
  for (int part = 0; part < 3; ++part) {
    p = packed(3 * width, width, kDim);
    p.out.data = memory + 4 * part * width;
    CHECK(verdict(p) == shared("out", part == 0 ? "q" : part == 1 ? "k" : "v"));
  }
  // GQA: (b, s, 2 h + 2 h_kv, d).
  p = packed(3 * width, width, kDim);
  p.num_heads_kv = kHeads / 2;
  p.v.data = memory + 4 * (3 * width / 2), p.out.data = memory + 4 * 2 * width;
  CHECK(verdict(p) == "accepted");
  p.v.data = memory + 4 * (3 * width / 2) + 4;
  CHECK(verdict(p) == shared("out", "v"));
  // Every other row of one buffer.
  p = packed(2 * width, kApart, kDim);
  p.out.data = memory + 4 * width;
  CHECK(verdict(p) == "accepted");
  p.out.data = memory + 4 * width - 4;
  CHECK(verdict(p) == shared("out", "q"));
}

void overlaps() {
  const std::int64_t width = kHeads * kDim, all = kBatch * kRows * width;
  for (const std::int64_t step :
       {std::int64_t{1}, width, all - 1, std::int64_t{-1}, -width, 1 - all}) {
    AttentionParams p = packed(width, kApart, kDim);
    p.out.data = memory + 4 * (4 * kApart + step), p.v.data = memory + 4 * 4 * kApart;
    CHECK(verdict(p) == shared("out", "v"));
    p = packed(width, kApart, kDim);
    p.out.data = memory + 4 * (4 * kApart + step), p.q.data = memory + 4 * 4 * kApart;
    CHECK(verdict(p) == shared("out", "q"));
  }
  for (const std::int64_t step : {all, -all}) {
    AttentionParams p = packed(width, kApart, kDim);
    p.out.data = memory + 4 * (4 * kApart + step), p.v.data = memory + 4 * 4 * kApart;
    CHECK(verdict(p) == "accepted");
  }
  // Rows of out between those of q, but wider than the room there is.
  AttentionParams p = packed(2 * width, kApart, kDim);
  p.head_dim_v = 2 * kDim, p.v.head_stride = p.out.head_stride = 2 * kDim;
  p.out.data = memory + 4 * width;
  CHECK(verdict(p) == shared("out", "q"));
}

template <typename Set>
void with_each_output(const std::string& name, Set set) {
  const std::int64_t width = kHeads * kDim;
  AttentionParams p = packed(width, kApart, kDim);
  p.cu_seqlens_q = p.cu_seqlens_k = reinterpret_cast<std::int32_t*>(memory + 4 * 6 * kApart);
  p.total_q = p.total_k = kBatch * kRows;
  p.device.type = DeviceType::kCuda;  // whose lengths the host does not read
  const bool cache = name == "page_table" || name == "cache_batch_idx" || name == "leftpad_k";
  if (cache || name == "bias" || name == "mask") p.cu_seqlens_q = p.cu_seqlens_k = nullptr;
  p.lse.data = reinterpret_cast<float*>(memory + 4 * 5 * kApart);
  p.lse.batch_stride = kHeads * kRows, p.lse.head_stride = kBatch * kRows;
  if (!p.cu_seqlens_q) p.lse.head_stride = kRows;
  p.workspace = memory + 4 * 8 * kApart, p.workspace_bytes = 4096;
  CHECK(verdict(p) == "accepted");
  AttentionParams of_out = p, of_lse = p, of_workspace = p;
  set(of_out, static_cast<char*>(p.out.data) + 4 * 100);
  CHECK(verdict(of_out) == shared("out", name));
  set(of_lse, reinterpret_cast<char*>(p.lse.data) + 4 * 11);
  CHECK(verdict(of_lse) == shared("lse", name));
  set(of_workspace, static_cast<char*>(p.workspace) + 4096 - 4);
  CHECK(verdict(of_workspace) == shared("workspace", name));
  set(of_workspace, static_cast<char*>(p.workspace) + 4096);
  CHECK(verdict(of_workspace) == "accepted");
}

void every_input() {
  const auto int32s = [](char* at) { return reinterpret_cast<const std::int32_t*>(at); };
  with_each_output("q", [](auto& p, char* at) { p.q.data = at; });
  with_each_output("k", [](auto& p, char* at) { p.k.data = at; });
  with_each_output("v", [](auto& p, char* at) { p.v.data = at; });
  with_each_output("bias",
                   [](auto& p, char* at) { p.bias.data = at, p.bias.dtype = DType::kFloat32; });
  with_each_output("mask", [](auto& p, char* at) {
    p.mask.data = reinterpret_cast<const std::uint8_t*>(at), p.mask.row_stride = 3;
  });
  with_each_output("alibi_slopes", [](auto& p, char* at) {
    p.alibi_slopes.data = reinterpret_cast<const float*>(at), p.alibi_slopes.head_stride = 1;
  });
  with_each_output("sinks", [](auto& p, char* at) {
    p.sinks.data = reinterpret_cast<const float*>(at), p.sinks.head_stride = 2;
  });
  with_each_output("cu_seqlens_q", [&](auto& p, char* at) { p.cu_seqlens_q = int32s(at); });
  with_each_output("cu_seqlens_k", [&](auto& p, char* at) { p.cu_seqlens_k = int32s(at); });
  with_each_output("seqused_k", [&](auto& p, char* at) { p.seqused_k = int32s(at); });
  with_each_output("cache_batch_idx", [&](auto& p, char* at) {
    p.cache_batch_idx = int32s(at), p.cache_batch_size = kBatch;
  });
  with_each_output("leftpad_k", [&](auto& p, char* at) { p.leftpad_k = int32s(at); });
  with_each_output("page_table", [&](auto& p, char* at) {
    p.page_table.data = int32s(at), p.page_table.batch_stride = kRows;
    p.page_size = 2, p.num_pages = 1;
  });

  AttentionParams p = packed(kHeads * kDim, kApart, kDim);
  p.lse.data = static_cast<float*>(p.out.data);
  p.lse.batch_stride = kHeads * kRows, p.lse.head_stride = kRows;
  CHECK(verdict(p) == shared("out", "lse"));

  p = packed(kHeads * kDim, kApart, kDim);
  p.lse.data = reinterpret_cast<float*>(memory + 4 * 5 * kApart);
  p.lse.batch_stride = kHeads * kRows, p.lse.head_stride = kRows;
  p.workspace = static_cast<char*>(p.out.data) - 255, p.workspace_bytes = 256;
  CHECK(verdict(p) == shared("out", "workspace"));
  p.workspace = reinterpret_cast<char*>(p.lse.data) - 255;
  CHECK(verdict(p) == shared("lse", "workspace"));
  p.workspace_bytes = 255;
  CHECK(verdict(p) == "accepted");
}

// k and v of a cache are its entries or its pages, however long a sequence can be.
void caches() {
  const auto* const numbers = reinterpret_cast<const std::int32_t*>(memory + 4 * 6 * kApart);
  const std::int64_t width = kHeads * kDim;
  AttentionParams paged = packed(width, kApart, kDim);
  paged.device.type = DeviceType::kCuda;
  paged.page_table.data = numbers, paged.page_table.batch_stride = kRows;
  paged.page_size = 3, paged.num_pages = 7;
  paged.k.batch_stride = paged.v.batch_stride = 3 * width;
  AttentionParams chosen = packed(width, kApart, kDim);
  chosen.device.type = DeviceType::kCuda;
  chosen.cache_batch_idx = numbers, chosen.cache_batch_size = 5;
  for (const AttentionParams& p : {paged, chosen}) {
    const std::int64_t rows = p.page_size ? 3 * 7 : 5 * kRows;
    AttentionParams at = p;
    at.out.data = static_cast<char*>(const_cast<void*>(p.v.data)) + 4 * rows * width;
    CHECK(verdict(at) == "accepted");
    at.out.data = static_cast<char*>(at.out.data) - 4;
    CHECK(verdict(at) == shared("out", "v"));
    at.out.data = static_cast<char*>(const_cast<void*>(p.k.data)) + 4 * (rows * width - 1);
    CHECK(verdict(at) == shared("out", "k"));
  }
}

void nothing_to_write_or_to_read() {
  AttentionParams p = packed(kHeads * kDim, kApart, kDim);
  p.k.data = p.v.data = p.out.data, p.seqlen_k = 0;
  CHECK(verdict(p) == "accepted");
  p = packed(kHeads * kDim, kApart, kDim);
  p.k.data = p.v.data = p.out.data, p.seqlen_q = 0;
  CHECK(verdict(p) == "accepted");
}

}  // namespace

int main() {
  random_regions();
  beyond_the_address_space();
  slices_of_one_buffer();
  overlaps();
  every_input();
  caches();
  nothing_to_write_or_to_read();
  return test::summary();
}
