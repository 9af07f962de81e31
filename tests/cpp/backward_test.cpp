// backward(): every message of what it refuses, tensors that share memory, plans, and the
// workspace of a call.
#include "dlattn/backward.h"

#include <cstdint>
#include <string>

#include "check.h"
#include "core/backend.h"
#include "core/plan/plan.h"
#include "core/validate/validate.h"
#include "devices.h"

using namespace dlattn;

namespace {

// Where tensors would lie, this far apart. Never read: validation looks at addresses only.
char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
constexpr std::int64_t kApart = 1 << 20;
const std::int32_t used[2] = {1, 1};
const std::string kShared =
    "; accepted: memory of its own, or a slice of the same buffer whose strides show that it has "
    "no element in common";

void* place(int index) {
  return memory + index * kApart;
}
float* floats(int index) {
  return static_cast<float*>(place(index));
}

// 2 batch entries of 3 queries and 5 keys, 4 heads of q, 2 of k and v, head_dim 8 and 16.
BackwardParams good() {
  constexpr DType kDtype = DType::kBFloat16;
  BackwardParams b;
  AttentionParams& p = b.forward;
  p.q = {place(0), 3 * 32, 32, 8, 1, kDtype};
  p.k = {place(1), 5 * 16, 16, 8, 1, kDtype};
  p.v = {place(2), 5 * 32, 32, 16, 1, kDtype};
  p.out = {place(3), 3 * 64, 64, 16, 1, kDtype};
  p.lse = {floats(4), 12, 1, 3};
  p.batch_size = 2, p.seqlen_q = 3, p.seqlen_k = 5, p.num_heads = 4, p.num_heads_kv = 2;
  p.head_dim = 8, p.head_dim_v = 16;
  p.softmax_scale = 0.5;
  b.dout = {place(5), 3 * 64, 64, 16, 1, kDtype};
  b.dq = {place(6), 3 * 32, 32, 8, 1, kDtype};
  b.dk = {place(7), 5 * 16, 16, 8, 1, kDtype};
  b.dv = {place(8), 5 * 32, 32, 16, 1, kDtype};
  return b;
}

BackwardParams good_scores() {
  BackwardParams b = good();
  AttentionParams& p = b.forward;
  p.bias = {place(10), 0, 5, 15, 1, DType::kFloat32};
  p.alibi_slopes = {floats(11), 4, 0, 1};
  p.sinks = {floats(12), 0, 0, 1};
  b.dlse = {floats(13), 12, 1, 3};
  b.dbias = {place(14), 0, 5, 15, 1, DType::kFloat32};
  b.dalibi_slopes = {floats(15), 0, 0, 1};
  b.dsinks = {floats(16), 0, 0, 1};
  return b;
}

template <typename Change>
void refuses(Change change, const std::string& message, BackwardParams b = good()) {
  change(b);
  CHECK_THROWS(core::validate(b), UnsupportedError, message);
  CHECK_THROWS(backward(b), UnsupportedError, message);
  const Support support = supported(b, DeviceInfo{});
  CHECK(!support.ok && support.reasons.size() == 1 && support.reasons[0] == message);
}

template <typename Change>
void accepts(Change change, BackwardParams b = good()) {
  change(b);
  CHECK_THROWS(core::validate(b), UnsupportedError, "(nothing thrown)");
}

void what_has_no_gradients() {
  refuses([](auto& b) { b.forward.precision = Precision::kFp8; },
          "precision is fp8; accepted: inputs, as gradients are those of products of q, k and v as "
          "they are");
  refuses([](auto& b) { b.forward.quantized_kv = memory; },
          "quantized_kv is given; accepted: none, as it has no gradients");
  refuses([](auto& b) { b.forward.v_descale.data = floats(0); },
          "v_descale is given; accepted: none, as it has no gradients");
  refuses([](auto& b) { b.forward.cache_batch_idx = used; },
          "cache_batch_idx is given; accepted: none, as keys in a cache have no gradients");
  refuses([](auto& b) { b.forward.leftpad_k = used; },
          "leftpad_k is given; accepted: none, as keys in a cache have no gradients");
  refuses([](auto& b) { b.forward.page_table.data = used; },
          "page_table is given; accepted: none, as keys in a cache have no gradients");
  refuses([](auto& b) { b.forward.q.dtype = DType::kFloat8E4M3; },
          "q: dtype is float8_e4m3fn; accepted: float16, bfloat16, float32, float64, as 8-bit "
          "elements have no gradients");
}

void of_the_forward_pass() {
  refuses([](auto& b) { b.forward.head_dim = 0; }, "head_dim is 0; accepted: at least 1");
  refuses([](auto& b) { b.forward.softcap = -1; },
          "softcap is -1; accepted: 7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none");
  refuses([](auto& b) { b.forward.q.data = nullptr; }, "q is null");
  refuses([](auto& b) { b.forward.lse.data = nullptr; }, "lse is null");
  refuses([](auto& b) { b.forward.out.data = nullptr; }, "out is null");
  refuses([](auto& b) { b.forward.k.dtype = DType::kFloat16; },
          "k: dtype is float16; accepted: bfloat16, that of q");
}

void gradients() {
  accepts([](auto&) {});
  accepts([](auto&) {}, good_scores());
  refuses([](auto& b) { b.dout.data = nullptr; },
          "dout and dlse are null; accepted: at least one of them");
  accepts([](auto& b) { b.dout.data = nullptr; }, good_scores());
  accepts([](auto& b) {  // of frameworks whose tensors without elements are null
    b.forward.seqlen_q = 0;
    b.forward.q.data = b.dout.data = nullptr;
    b.forward.out.data = b.dq.data = nullptr, b.forward.lse.data = nullptr;
  });
  refuses([](auto& b) { b.dq.data = b.dk.data = b.dv.data = nullptr; },
          "dq, dk, dv, dbias, dalibi_slopes and dsinks are null; accepted: at least one of them");
  accepts([](auto& b) { b.dq.data = b.dk.data = nullptr; });
  refuses([](auto& b) { b.dbias = good_scores().dbias; },
          "dbias is given and bias is null; accepted: none");
  refuses([](auto& b) { b.dalibi_slopes = good_scores().dalibi_slopes; },
          "dalibi_slopes is given and alibi_slopes is null; accepted: none");
  refuses([](auto& b) { b.dsinks = good_scores().dsinks; },
          "dsinks is given and sinks is null; accepted: none");
  refuses([](auto& b) { b.dout.dtype = DType::kFloat32; },
          "dout: dtype is float32; accepted: bfloat16, that of out");
  refuses([](auto& b) { b.dq.dtype = DType::kFloat16; },
          "dq: dtype is float16; accepted: bfloat16, that of q");
  refuses([](auto& b) { b.dk.dtype = DType::kFloat16; },
          "dk: dtype is float16; accepted: bfloat16, that of k");
  refuses([](auto& b) { b.dv.dtype = DType::kFloat64; },
          "dv: dtype is float64; accepted: bfloat16, that of v");
  refuses([](auto& b) { b.dbias.dtype = DType::kBFloat16; },
          "dbias: dtype is bfloat16; accepted: float32, that of bias", good_scores());
}

void layouts() {
  accepts([](auto& b) { b.dout.batch_stride = b.dout.row_stride = b.dout.head_stride = 0; });
  accepts([](auto& b) { b.dlse.batch_stride = b.dlse.row_stride = b.dlse.head_stride = 0; },
          good_scores());
  // One element along a dimension is a sum in what bias and slopes have, and wrong elsewhere.
  accepts([](auto& b) { b.dbias.batch_stride = b.dbias.head_stride = b.dbias.row_stride = 0; },
          good_scores());
  refuses([](auto& b) { b.dk.head_stride = 0; },
          "dk: a stride of 0 elements makes elements share memory; accepted: at least 8 "
          "there");
  refuses([](auto& b) { b.dsinks.head_stride = 0; },
          "dsinks: a stride of 0 elements makes elements share memory; accepted: at "
          "least 1 there",
          good_scores());
  refuses([](auto& b) { b.dbias.row_stride = 2; },
          "dbias: a stride of 2 elements makes elements share memory; accepted: at "
          "least 5 there",
          good_scores());
  refuses([](auto& b) { b.dv.data = memory + 8 * kApart + 1; },
          "dv: its address is 1 byte(s) past a multiple of 2; accepted: multiples of the element's "
          "size");
}

void shared_memory() {
  refuses([](auto& b) { b.dq.data = place(0); }, "dq shares memory with q" + kShared);
  refuses([](auto& b) { b.dq.data = place(5); }, "dq shares memory with dout" + kShared);
  refuses([](auto& b) { b.dk.data = place(6); }, "dq shares memory with dk" + kShared);
  refuses([](auto& b) { b.dv.data = place(4); }, "dv shares memory with lse" + kShared);
  refuses([](auto& b) { b.dbias.data = place(10); }, "dbias shares memory with bias" + kShared,
          good_scores());
  refuses([](auto& b) { b.forward.workspace = place(8), b.forward.workspace_bytes = 1; },
          "dv shares memory with workspace" + kShared);
  accepts([](auto& b) { b.dout.data = b.forward.out.data; });  // both are read
  // dk and dv as slices of one buffer.
  accepts([](auto& b) {
    b.dk = {place(7), 5 * 96, 96, 48, 1, DType::kBFloat16};
    b.dv = {static_cast<char*>(place(7)) + 16, 5 * 96, 96, 48, 1, DType::kBFloat16};
  });
}

void options() {
  const auto refused = [](const Options& given, const std::string& message) {
    CHECK_THROWS(plan(good(), DeviceInfo{}, given), UnsupportedError, message);
    CHECK(!supported(good(), DeviceInfo{}, given).ok);
  };
  Options given;
  given.num_splits = 2;
  refused(given, "num_splits is 2; accepted: 0 in a backward pass");
  given = {};
  given.split_size = 128;
  refused(given, "split_size is 128; accepted: 0 in a backward pass");
  given = {};
  given.kernel = "decode";
  const Support support = supported(good(), test::gpu("RTX 4090", 8, 9, 128, 101376), given);
  CHECK(!support.ok && !support.reasons.empty());
  given = {};
  given.batch_invariant = true;
  CHECK_THROWS(plan(good(), test::gpu("RTX 4090", 8, 9, 128, 101376), given), UnsupportedError,
               "no kernel can run this: batch_invariant is true; accepted: false in a backward "
               "pass on a GPU, which has deterministic");
}

void plans() {
  DeviceInfo cpu;
  cpu.num_threads = 2;
  BackwardParams b = good();
  Plan one = plan(b, cpu);
  CHECK(one.operation == Operation::kBackward && one.kernel == "cpu");
  CHECK(one.dtype == DType::kBFloat16);
  CHECK_EQ(one.num_launches(), 1);
  CHECK(one.workspace_bytes > 0);
  CHECK(describe(one).find("operation: backward\n") != std::string::npos);
  // Memory is linear in the lengths, up to that of sums for dk and dv.
  const auto bytes = [&](std::int64_t length) {
    b.forward.seqlen_q = b.forward.seqlen_k = length;
    return plan(b, cpu).workspace_bytes;
  };
  b.forward.batch_size = 1;
  CHECK_EQ(bytes(4096) - bytes(2048), 2 * (bytes(2048) - bytes(1024)));
  const std::int64_t rows = std::int64_t{1} << 20;
  AttentionParams& p = b.forward;
  p.q.data = place(1 << 10), p.k.data = place(2 << 10), p.v.data = place(3 << 10);
  p.out.data = place(4 << 10), p.lse.data = floats(5 << 10), b.dout.data = place(6 << 10);
  b.dq.data = place(7 << 10), b.dk.data = place(8 << 10), b.dv.data = place(9 << 10);
  CHECK(bytes(2 * rows) - bytes(rows) == rows * 4 * 4);
  CHECK(bytes(rows) < (std::int64_t{1} << 28) + rows * 4 * 4);

  const DeviceInfo device = test::gpu("RTX 4090", 8, 9, 128, 101376);
  BackwardParams on_gpu = good();
  on_gpu.forward.device.type = DeviceType::kCuda;
  on_gpu.deterministic = true;
  one = plan(on_gpu, device);
  CHECK(one.operation == Operation::kBackward);
  CHECK(one.num_launches() > 1 && one.launch(0).operation == Operation::kDelta);
}

// Tensors without elements cost no memory, however many sequences they are said to have.
void sequences_without_rows() {
  BackwardParams b = good();
  b.forward.batch_size = kMaxCount;
  b.forward.seqlen_q = b.forward.seqlen_k = 0;
  b.dbias.data = nullptr;
  b.dalibi_slopes.data = b.dsinks.data = nullptr;
  CHECK_THROWS(backward(b), UnsupportedError, "(nothing thrown)");
}

}  // namespace

int main() {
  what_has_no_gradients();
  of_the_forward_pass();
  gradients();
  layouts();
  shared_memory();
  options();
  plans();
  sequences_without_rows();
  return test::summary();
}
