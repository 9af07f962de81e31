// Plans of the kernels for prefill, sm90 and wmma, over keys in a cache.
#include <cstdint>
#include <string>

#include "check.h"
#include "core/plan/plan.h"
#include "plan_problems.h"

using namespace dlattn;
using test::force;
using test::gpus;
using test::memory;

namespace {

const DeviceInfo h200 = gpus()[3], l4 = gpus()[0];
const std::int32_t numbers[4096] = {};
const std::string prefill_of_h200 = "sm90";

// Shape (batch_size, seqlen_q x seqlen_k, 32 heads over 8), keys in pages of 64.
AttentionParams paged(std::int64_t batch_size, std::int64_t seqlen_q, std::int64_t seqlen_k,
                      std::int64_t head_dim = 128) {
  AttentionParams p = test::problem(DType::kBFloat16, head_dim);
  p.batch_size = batch_size, p.seqlen_q = seqlen_q, p.seqlen_k = seqlen_k;
  p.num_heads = 32, p.causal = Causal::kBottomRight;
  p.q.row_stride = p.out.row_stride = 32 * head_dim;
  p.q.batch_stride = p.out.batch_stride = seqlen_q * 32 * head_dim;
  p.page_size = 64, p.num_pages = 4096;
  p.page_table.data = numbers, p.page_table.batch_stride = (seqlen_k + 63) / 64;
  p.k.batch_stride = p.v.batch_stride = 64 * 8 * head_dim;
  p.seqused_k = numbers;
  return p;
}

AttentionParams entries(AttentionParams p) {
  p.page_table.data = nullptr;
  p.page_size = p.num_pages = 0;
  p.cache_batch_idx = numbers, p.cache_batch_size = p.batch_size;
  return p;
}

void refuses(const char* kernel, const char* variant, const AttentionParams& p,
             const DeviceInfo& device, const std::string& why) {
  Options options = force(kernel);
  options.variant = variant;
  CHECK_THROWS(dlattn::plan(p, device, options), UnsupportedError,
               "no kernel can run this: " + std::string(kernel) + ": " + why);
}

// By their predicted times: chunks of prompts have the kernels for prefill, a few tokens decode.
void automatic_choice() {
  for (const int head_dim : {64, 128}) {
    for (const bool in_pages : {true, false}) {
      const auto kernel = [&](std::int64_t batch_size, std::int64_t seqlen_q, std::int64_t seqlen_k,
                              const DeviceInfo& device) {
        const AttentionParams p = paged(batch_size, seqlen_q, seqlen_k, head_dim);
        return std::string(dlattn::plan(in_pages ? p : entries(p), device).kernel);
      };
      CHECK(kernel(1, 512, 8192, h200) == prefill_of_h200 && kernel(1, 512, 8192, l4) == "wmma");
      CHECK(kernel(4, 2048, 2048, h200) == prefill_of_h200 && kernel(4, 2048, 2048, l4) == "wmma");
      for (const std::int64_t batch_size : {1, 4, 128}) {
        for (const std::int64_t seqlen_k : {512, 65536}) {
          CHECK(kernel(batch_size, 1, seqlen_k, h200) == "decode");
          CHECK(kernel(batch_size, 8, seqlen_k, l4) == "decode");
        }
      }
    }
  }
  AttentionParams p = paged(1, 512, 8192);
  CHECK_EQ(dlattn::plan(p, h200, force("sm90")).grid, 4 * 32);
  CHECK(dlattn::plan(p, h200, force("sm90")).variant_name == std::string("short"));
  CHECK_EQ(dlattn::plan(p, l4).grid, 8 * 32);
  CHECK(dlattn::plan(p, l4).variant_name == std::string("narrow"));
  CHECK_EQ(dlattn::plan(p, l4).packed_heads, 1);
  // Queries of variable length have short blocks too, and a tile of each sequence in wmma.
  p.cu_seqlens_q = numbers, p.total_q = 512, p.batch_size = 3;
  Options options = force("sm90");
  options.variant = "short";
  CHECK(dlattn::plan(p, h200, options).variant_name == std::string("short"));
  CHECK(dlattn::plan(p, l4, force("wmma")).grid == 3 * 8 * 32);
  // A step that mixes a part of a prompt with single tokens has few rows.
  p = paged(101, 512, 4096);
  p.cu_seqlens_q = numbers, p.total_q = 512 + 100;
  CHECK(dlattn::plan(p, h200).kernel == "decode" && dlattn::plan(p, l4).kernel == "decode");
  p.batch_size = 20, p.total_q = 20 * 512;
  CHECK(dlattn::plan(p, h200).kernel == prefill_of_h200 && dlattn::plan(p, l4).kernel == "wmma");
  // Others have what these lack.
  p = paged(1, 512, 8192);
  p.softcap = 5.0;
  CHECK(dlattn::plan(p, h200).kernel == "decode");
  p = paged(1, 512, 8192);
  p.leftpad_k = numbers;
  CHECK(dlattn::plan(p, h200).kernel == "wmma");
  p = paged(1, 512, 8192);
  p.page_size = 12;
  CHECK(dlattn::plan(p, h200).kernel == "wmma");
}

// One kernel for any number of new queries, unless the caller names another.
void batch_invariance() {
  const AttentionParams p = paged(1, 512, 8192);
  for (const DeviceInfo& device : {h200, l4}) {
    Options options;
    options.batch_invariant = true;
    CHECK(dlattn::plan(p, device, options).kernel == "decode");
    options.kernel = device.compute_major == 9 ? "sm90" : "wmma";
    const Plan plan = dlattn::plan(p, device, options);
    CHECK(plan.kernel == options.kernel && plan.variant_name != std::string("short"));
  }
}

void refused() {
  AttentionParams p = paged(1, 512, 8192);
  p.page_size = 12;
  refuses("sm90", nullptr, p, h200, "page_size is 12; accepted: multiples of 8");
  // TMA counts the rows of all pages, from one to the next.
  p = paged(1, 512, 8192);
  p.k.batch_stride += 8;
  refuses("sm90", nullptr, p, h200,
          "k has a batch stride of 65544 elements; accepted: multiples of its row stride, 1024");
  p.num_pages = 1;  // of which there is no next one
  CHECK(dlattn::plan(p, h200, force("sm90")).kernel == "sm90");
  p = entries(paged(2, 512, 8192));
  p.v.row_stride = 0;
  refuses("sm90", nullptr, p, h200,
          "v has a batch stride of 65536 elements; accepted: multiples of its row stride, 0");
  p = paged(1, 512, 8192);
  p.num_pages = std::int64_t{1} << 25;
  refuses("sm90", nullptr, p, h200,
          "k has 33554432 pages or entries, 64 rows apart; accepted: up to 2147483647 rows");
  p.num_pages -= 1;
  CHECK(dlattn::plan(p, h200, force("sm90")).kernel == "sm90");
  p = paged(1, 512, 8192);
  p.leftpad_k = numbers;
  refuses("sm90", nullptr, p, h200, "does not implement leftpad_k");
  p = paged(1, 512, 8192);
  p.softcap = 5.0;
  refuses("sm90", nullptr, p, h200, "does not implement softcap with keys in a cache");
  refuses("wmma", nullptr, p, l4, "with keys in a cache: does not implement softcap");
  for (const int head_dim : {96, 256}) {
    const AttentionParams other = paged(1, 512, 8192, head_dim);
    refuses("sm90", nullptr, other, h200, "has no instance for this head_dim with keys in a cache");
    refuses("wmma", nullptr, other, l4, "has no instance for this head_dim with keys in a cache");
  }
  p = paged(1, 512, 8192);
  refuses("wmma", "wide", p, l4, "variant wide does not read keys in a cache: page_table is given");
  refuses("wmma", "general+packed", entries(p), l4,
          "variant general does not read keys in a cache: cache_batch_idx is given");
  refuses("wmma", "narrow+packed", p, l4,
          "packed: does not read keys in a cache: page_table is given");
  p.seqlen_k = 131073;
  refuses("wmma", nullptr, p, l4, "variant narrow: seqlen_k is 131073; accepted: up to 131072");
  refuses("sm90", nullptr, p, h200, "seqlen_k is 131073; accepted: up to 131072");
  p = paged(1, 512, 8192);
  p.v.row_stride = std::int64_t{1} << 33, p.v.batch_stride = 64 * p.v.row_stride;
  refuses("sm90", nullptr, p, h200,
          "v has a row stride of 17179869184 bytes; accepted: multiples of 16 from 0 to "
          "17179869168");
}

}  // namespace

int main() {
  automatic_choice();
  batch_invariance();
  refused();
  return test::summary();
}
