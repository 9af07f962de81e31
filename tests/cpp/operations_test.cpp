// Plans of operations beside attention, plans of several launches, and the workspace of a call.
#include <cstdint>
#include <locale>
#include <stdexcept>
#include <string>

#include "check.h"
#include "core/backend.h"
#include "core/plan/plan.h"
#include "devices.h"

namespace {

using namespace dlattn;

alignas(kWorkspaceAlignment) char memory[2 * kWorkspaceAlignment];

MergeParams merge(DType dtype) {
  MergeParams p;
  p.num_states = 1;
  p.device.type = DeviceType::kCuda;
  p.batch_size = 2, p.seqlen_q = 5, p.num_heads = 3, p.head_dim_v = 8;
  static char parts[4][1 << 12];
  p.outs[0] = {parts[0], 5 * 24, 24, 8, 1, dtype};
  p.lses[0] = {reinterpret_cast<float*>(parts[1]), 15, 1, 5};
  p.out = {parts[2], 5 * 24, 24, 8, 1, dtype};
  p.lse = {reinterpret_cast<float*>(parts[3]), 15, 1, 5};
  return p;
}

void merges() {
  const DeviceInfo device = test::gpu("RTX 4090", 8, 9, 128, 101376);
  const Plan plan = dlattn::plan(merge(DType::kBFloat16), device);
  CHECK(plan.operation == Operation::kMerge);
  CHECK(plan.kernel == "row_per_warp");
  CHECK(plan.dtype == DType::kBFloat16);
  CHECK_EQ(plan.grid, 8);  // 30 rows, 4 at a time
  CHECK(describe(plan).find("operation: merge\n") != std::string::npos);
  MergeParams many = merge(DType::kFloat16);
  many.batch_size = std::int64_t{1} << 40;
  many.outs[0].batch_stride = many.out.batch_stride = 120;
  CHECK_EQ(core::make_plan(many, device).grid, 1 << 20);  // blocks go on to further rows
  CHECK_THROWS(
      dlattn::plan(merge(DType::kFloat64), device), UnsupportedError,
      "no kernel can run this: row_per_warp: dtype is float64; accepted: float16, bfloat16, "
      "float32");
  DeviceInfo cpu;
  cpu.num_threads = 3;
  CHECK(dlattn::plan(merge(DType::kFloat64), cpu).kernel == "cpu");
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    const bool found = cuda::find_launcher<MergeParams>("row_per_warp", dtype, 0);
    CHECK_EQ(found, cuda::compiled());
    CHECK(!cuda::find_launcher<AttentionParams>("row_per_warp", dtype, 0));
  }
}

// Every launch of a plan must fit the device, and is told of.
void several_launches() {
  const DeviceInfo device = test::gpu("RTX 4090", 8, 9, 128, 101376);
  Plan plan;
  plan.kernel = "wmma";
  plan.before[0].operation = Operation::kForward, plan.before[0].kernel = "first";
  plan.before[0].variant_name = "wide";
  plan.after[0].operation = Operation::kMerge, plan.after[0].kernel = "row_per_warp";
  plan.num_before = plan.num_after = 1;
  CHECK_EQ(plan.num_launches(), 0);  // there is nothing to compute
  plan.grid = 1;
  CHECK_EQ(plan.num_launches(), 3);
  CHECK(&plan.launch(0) == &plan.before[0]);
  CHECK(&plan.launch(1) == &plan);
  CHECK(&plan.launch(2) == &plan.after[0]);
  CHECK(core::can_launch(plan, device, nullptr));
  const std::string text = describe(plan);
  const std::size_t before = text.find("before: forward by first:wide, 0 blocks of 0 warps\n");
  const std::size_t own = text.find("kernel: wmma\n");
  const std::size_t after = text.find("after: merge by row_per_warp, 0 blocks of 0 warps\n");
  CHECK(before < own && own < after && after != std::string::npos);
  for (Launch* launch : {static_cast<Launch*>(&plan), &plan.before[0], &plan.after[0]}) {
    launch->smem_bytes = device.max_smem_per_block + 1;
    std::string why;
    CHECK(!core::can_launch(plan, device, &why));
    CHECK(why.find("bytes of shared memory per block; ") != std::string::npos);
    launch->smem_bytes = 0, launch->grid = std::int64_t{1} << 31;
    CHECK(!core::can_launch(plan, device, &why));
    CHECK(why == "needs 2147483648 thread blocks; accepted: up to 2147483647");
    launch->grid = 1;
  }
}

// Numbers read the same in programs whose locale groups digits and has a decimal comma.
void other_locale() {
  struct Grouped : std::numpunct<char> {
    char do_decimal_point() const override { return ','; }
    char do_thousands_sep() const override { return '.'; }
    std::string do_grouping() const override { return "\3"; }
  };
  const std::locale before = std::locale::global(std::locale(std::locale(), new Grouped));
  CHECK(core::concat(12345, " and ", 1.5) == "12345 and 1.5");
  Plan plan;
  plan.grid = plan.workspace_bytes = 12345;
  plan.predicted_ns = 1500;
  plan.num_after = 1;
  plan.after[0].grid = 67890;
  const std::string text = describe(plan);
  for (const char* part : {"grid: 12345 ", "workspace: 12345 ", "predicted: 1.5 us", ", 67890 "})
    CHECK_FOR(text.find(part) != std::string::npos, text);
  std::locale::global(before);
}

void workspace() {
  AttentionParams p;
  Plan plan;
  CHECK(!core::workspace_of(p, plan, {}));  // nothing is needed, so nobody is asked
  plan.workspace_bytes = 100;
  CHECK_THROWS(core::workspace_of(p, plan, {}), UnsupportedError,
               "workspace is null; accepted: 100 bytes of device memory, or an allocator in the "
               "options");
  struct Asked {
    std::int64_t bytes = 0;
    void* answer = memory;
  } asked;
  const WorkspaceAllocator allocator = {[](void* context, std::int64_t bytes) {
                                          static_cast<Asked*>(context)->bytes = bytes;
                                          return static_cast<Asked*>(context)->answer;
                                        },
                                        &asked};
  CHECK(core::workspace_of(p, plan, allocator) == memory);
  CHECK_EQ(asked.bytes, 100);
  asked.answer = nullptr;
  CHECK_THROWS(core::workspace_of(p, plan, allocator), UnsupportedError,
               "workspace is null; accepted: 100 bytes of device memory, or an allocator in the "
               "options");
  asked.answer = memory + 16;
  const char* const misaligned =
      "workspace: its address is 16 byte(s) past a multiple of 256; accepted: multiples of it";
  CHECK_THROWS(core::workspace_of(p, plan, allocator), UnsupportedError, misaligned);

  // Memory that the allocator gives may lie over a tensor.
  AttentionParams over = p;
  over.batch_size = over.seqlen_q = over.num_heads = over.num_heads_kv = over.head_dim_v = 1;
  over.out.data = memory + 96, over.out.dtype = DType::kFloat32;
  asked.answer = memory;
  CHECK_THROWS(core::workspace_of(over, plan, allocator), UnsupportedError,
               "workspace shares memory with out; accepted: memory of its own, or a slice of the "
               "same buffer whose strides show that it has no element in common");
  over.out.data = memory + 100;
  CHECK(core::workspace_of(over, plan, allocator) == memory);

  asked.bytes = 0;
  p.workspace = memory, p.workspace_bytes = 99;
  CHECK_THROWS(core::workspace_of(p, plan, allocator), UnsupportedError,
               "workspace has 99 bytes; accepted: at least 100");
  p.workspace_bytes = 100;
  CHECK(core::workspace_of(p, plan, allocator) == memory);
  CHECK_EQ(asked.bytes, 0);  // the parameters' comes first
  p.workspace = memory + 16;
  CHECK_THROWS(core::workspace_of(p, plan, allocator), UnsupportedError, misaligned);
  const WorkspaceAllocator fails = {
      [](void*, std::int64_t) -> void* { throw std::runtime_error("no memory"); }, nullptr};
  p.workspace = nullptr;
  CHECK_THROWS(core::workspace_of(p, plan, fails), std::runtime_error, "no memory");
}

}  // namespace

int main() {
  merges();
  several_launches();
  other_locale();
  workspace();
  return test::summary();
}
