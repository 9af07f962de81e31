// Every message of core/validate: what is wrong, the value got, what is accepted.
#include "core/validate/validate.h"

#include <cmath>
#include <limits>

#include "check.h"
#include "core/operations/append.h"
#include "core/operations/merge.h"
#include "dlattn/attention.h"

using namespace dlattn;

namespace {

// Where tensors would lie, this far apart. Never read: validation looks at addresses only.
char* const memory = reinterpret_cast<char*>(std::uintptr_t{1} << 40);
constexpr std::int64_t kApart = 1 << 20;
float lse[64];
float numbers[8];
const std::int32_t used[2] = {1, 1};

const std::string kNothing = "(nothing thrown)";
const std::string kShared =
    "; accepted: memory of its own, or a slice of the same buffer whose strides show that it has "
    "no element in common";
const std::string kOdd =
    "outs: its address is 3 byte(s) past a multiple of 4; accepted: multiples of the element's "
    "size";

AttentionParams good() {
  AttentionParams p;
  p.q.data = memory, p.k.data = memory + kApart, p.v.data = memory + 2 * kApart,
  p.out.data = memory + 3 * kApart;
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat32;
  p.batch_size = 2, p.seqlen_q = 3, p.seqlen_k = 5, p.num_heads = 4, p.num_heads_kv = 2;
  p.head_dim = 8, p.head_dim_v = 8;
  p.q.batch_stride = 3 * 32, p.q.row_stride = 32, p.q.head_stride = 8;
  p.k.batch_stride = 5 * 16, p.k.row_stride = 16, p.k.head_stride = 8;
  p.v.batch_stride = 5 * 16, p.v.row_stride = 16, p.v.head_stride = 8;
  p.out.batch_stride = 3 * 32, p.out.row_stride = 32, p.out.head_stride = 8;
  p.softmax_scale = 0.5;
  return p;
}

AttentionParams good_varlen() {
  static const std::int32_t offsets[3] = {0, 1, 3};
  AttentionParams p = good();
  p.cu_seqlens_q = p.cu_seqlens_k = offsets;
  p.total_q = p.total_k = 3;
  return p;
}

template <typename Change>
void refuses(Change change, const std::string& message, AttentionParams p = good()) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, message);
  const Support support = supported(p, DeviceInfo{});
  CHECK(!support.ok && support.reasons.size() == 1 && support.reasons[0] == message);
}

template <typename Change>
void accepts(Change change, AttentionParams p = good()) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, kNothing);
}

void sizes() {
  refuses([](auto& p) { p.batch_size = -1; }, "batch_size is -1; accepted: at least 0");
  refuses([](auto& p) { p.seqlen_q = -2; }, "seqlen_q is -2; accepted: at least 0");
  refuses([](auto& p) { p.seqlen_k = -3; }, "seqlen_k is -3; accepted: at least 0");
  refuses([](auto& p) { p.num_heads = 0; }, "num_heads is 0; accepted: at least 1");
  refuses([](auto& p) { p.num_heads_kv = 0; }, "num_heads_kv is 0; accepted: at least 1");
  refuses([](auto& p) { p.num_heads_kv = 3; },
          "k: num_heads_kv = 3 does not divide num_heads = 4 of q; accepted: a divisor of 4");
  refuses([](auto& p) { p.num_heads_kv = 8; },
          "k: num_heads_kv = 8 does not divide num_heads = 4 of q; accepted: a divisor of 4");
  refuses([](auto& p) { p.head_dim = 0; }, "head_dim is 0; accepted: at least 1");
  refuses([](auto& p) { p.head_dim_v = 0; }, "head_dim of v is 0; accepted: at least 1");
  accepts([](auto& p) { p.batch_size = 0; });
  accepts([](auto& p) { p.seqlen_q = 0; });
  accepts([](auto& p) { p.seqlen_k = 0, p.k.data = p.v.data = nullptr; });
}

void strides() {
  const struct {
    const char* name;
    TensorView AttentionParams::* tensor;
  } tensors[] = {
      {"q", &AttentionParams::q}, {"k", &AttentionParams::k}, {"v", &AttentionParams::v}};
  const char* end = " is -8; negative strides are not accepted";
  for (const auto& t : tensors) {
    const std::string start = std::string(t.name) + ": the stride of dimension ";
    refuses([&](auto& p) { (p.*t.tensor).batch_stride = -8; }, start + "batch" + end);
    refuses([&](auto& p) { (p.*t.tensor).row_stride = -8; }, start + "seqlen" + end);
    refuses([&](auto& p) { (p.*t.tensor).head_stride = -8; }, start + "num_heads" + end);
    accepts([&](auto& p) {
      (p.*t.tensor).batch_stride = (p.*t.tensor).row_stride = (p.*t.tensor).head_stride = 0;
    });
  }
  // Dimensions of one element may have any stride.
  accepts([](auto& p) {
    p.batch_size = p.num_heads = p.num_heads_kv = 1;
    p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride = -5;
    p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = -7;
  });
}

void outputs() {
  const auto overlap = [](int stride, int least) {
    return "out: a stride of " + std::to_string(stride) +
           " elements makes elements share memory; accepted: at least " + std::to_string(least) +
           " there";
  };
  refuses([](auto& p) { p.out.head_stride = 7; }, overlap(7, 8));
  refuses([](auto& p) { p.out.head_stride = 0; }, overlap(0, 8));
  refuses([](auto& p) { p.out.row_stride = 31; }, overlap(31, 32));
  refuses([](auto& p) { p.out.batch_stride = 95; }, overlap(95, 96));
  refuses([](auto& p) { p.out.batch_stride = -96; },
          "out: the stride of dimension batch is -96; negative strides are not accepted");
  accepts([](auto& p) { p.out.head_stride = 24, p.out.row_stride = 8; });  // bhsd
  accepts([](auto& p) { p.out.head_stride = 9, p.out.row_stride = 40, p.out.batch_stride = 1000; });

  const auto lse_overlap = [](int stride, int least) {
    return "lse: a stride of " + std::to_string(stride) +
           " elements makes elements share memory; accepted: at least " + std::to_string(least) +
           " there";
  };
  refuses([](auto& p) { p.lse.data = lse, p.lse.head_stride = 2, p.lse.batch_stride = 12; },
          lse_overlap(2, 3));
  refuses([](auto& p) { p.lse.data = lse, p.lse.head_stride = 3, p.lse.batch_stride = 11; },
          lse_overlap(11, 12));
  accepts([](auto& p) { p.lse.data = lse, p.lse.head_stride = 3, p.lse.batch_stride = 12; });
}

void pointers() {
  const char* const mixed = ": dtype is bfloat16; accepted: float32, that of q";
  refuses([](auto& p) { p.k.dtype = DType::kBFloat16; }, std::string("k") + mixed);
  refuses([](auto& p) { p.v.dtype = DType::kBFloat16; }, std::string("v") + mixed);
  refuses([](auto& p) { p.out.dtype = DType::kBFloat16; }, std::string("out") + mixed);
  refuses([](auto& p) { p.q.data = nullptr; }, "q is null");
  refuses([](auto& p) { p.k.data = nullptr; }, "k is null");
  refuses([](auto& p) { p.v.data = nullptr; }, "v is null");
  refuses([](auto& p) { p.out.data = nullptr; }, "out is null");
  const std::string past =
      ": its address is 2 byte(s) past a multiple of 4; accepted: multiples of the element's size";
  refuses([](auto& p) { p.q.data = memory + 2; }, "q" + past);
  refuses([](auto& p) { p.k.data = memory + kApart + 2; }, "k" + past);
  refuses([](auto& p) { p.v.data = memory + 2 * kApart + 2; }, "v" + past);
  refuses([](auto& p) { p.out.data = memory + 3 * kApart + 2; }, "out" + past);
  refuses([](auto& p) { p.lse.data = reinterpret_cast<float*>(memory + 2); }, "lse" + past);
  refuses([](auto& p) { p.bias.data = memory + 2, p.bias.dtype = DType::kFloat32; }, "bias" + past);
  refuses([](auto& p) { p.alibi_slopes.data = reinterpret_cast<const float*>(memory + 2); },
          "alibi_slopes" + past);
  refuses([](auto& p) { p.sinks.data = reinterpret_cast<const float*>(memory + 2); },
          "sinks" + past);
  accepts([](auto& p) {
    p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat16, p.q.data = memory + 2;
  });
  accepts([](auto& p) { p.batch_size = 0, p.q.data = p.k.data = p.v.data = p.out.data = nullptr; });
}

AttentionParams good_float8() {
  AttentionParams p = good();
  p.q.dtype = p.k.dtype = p.v.dtype = DType::kFloat8E4M3;
  return p;
}

void float8() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32})
    accepts([dtype](auto& p) { p.out.dtype = dtype; }, good_float8());
  for (const DType dtype : {DType::kFloat64, DType::kFloat8E4M3}) {
    refuses([dtype](auto& p) { p.out.dtype = dtype; },
            std::string("out: dtype is ") + to_string(dtype) +
                "; accepted: bfloat16, float16, float32, as q is of float8_e4m3fn",
            good_float8());
  }
  refuses([](auto& p) { p.k.dtype = DType::kBFloat16; },
          "k: dtype is bfloat16; accepted: float8_e4m3fn, that of q", good_float8());
  const struct {
    const char* name;
    BasicTensorView<const float> AttentionParams::* descale;
  } descales[] = {{"q_descale", &AttentionParams::q_descale},
                  {"k_descale", &AttentionParams::k_descale},
                  {"v_descale", &AttentionParams::v_descale}};
  for (const auto& d : descales) {
    const std::string name = d.name;
    const auto set = [&d](auto& p) -> BasicTensorView<const float>& {
      (p.*d.descale).data = numbers;
      return p.*d.descale;
    };
    accepts([&](auto& p) { set(p); }, good_float8());
    refuses([&](auto& p) { set(p); },
            name + " is given with q of float32; accepted: none, as descales are for " +
                (name == "q_descale" ? "float8_e4m3fn alone" : "8-bit elements alone"));
    const std::string stride = name + ": the stride of dimension ";
    const std::string end = " is -1; negative strides are not accepted";
    refuses([&](auto& p) { set(p).batch_stride = -1; }, stride + "batch" + end, good_float8());
    refuses([&](auto& p) { set(p).head_stride = -1; }, stride + "num_heads" + end, good_float8());
    refuses([&](auto& p) { set(p).data = reinterpret_cast<const float*>(memory + 2); },
            name +
                ": its address is 2 byte(s) past a multiple of 4; accepted: multiples of the "
                "element's size",
            good_float8());
    refuses(
        [&](auto& p) {
          set(p).head_stride = 1, (p.*d.descale).data = static_cast<const float*>(p.out.data);
        },
        "out shares memory with " + name + kShared, good_float8());
  }
  for (const std::int64_t heads : {1, 2})
    accepts([heads](auto& p) { p.heads_per_q_descale = heads; }, good_float8());
  for (const std::int64_t heads : {0, 3, 4, -1}) {
    refuses([heads](auto& p) { p.heads_per_q_descale = heads; },
            "heads_per_q_descale is " + std::to_string(heads) +
                "; accepted: 1 or num_heads / num_heads_kv = 2",
            good_float8());
  }
  accepts([](auto& p) { p.mask.data = reinterpret_cast<std::uint8_t*>(memory); }, good_float8());
  const auto set_bias = [](DType dtype) {
    return [dtype](auto& p) { p.bias.data = memory, p.bias.dtype = dtype; };
  };
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32})
    accepts(set_bias(dtype), good_float8());
  for (const DType dtype : {DType::kFloat8E4M3, DType::kFloat64}) {
    refuses(set_bias(dtype),
            std::string("bias: dtype is ") + to_string(dtype) +
                "; accepted: float16, bfloat16 or float32 with q of float8_e4m3fn",
            good_float8());
  }
  refuses([](auto& p) { p.alibi_slopes.data = numbers; },
          "alibi_slopes is given with q of float8_e4m3fn; accepted: none", good_float8());
}

void scores() {
  const double nan = std::nan(""), inf = std::numeric_limits<double>::infinity();
  for (const auto& [value, text] : {std::pair<double, std::string>{0.0, "0"},
                                    {-0.5, "-0.5"},
                                    {1e-46, "1e-46"},
                                    {0x1.fffffffffffffp-127, "1.17549e-38"},
                                    {0x1.0000000000001p126, "8.50706e+37"},
                                    {2.4e38, "2.4e+38"},
                                    {nan, "nan"},
                                    {inf, "inf"},
                                    {-inf, "-inf"}}) {
    const double v = value;
    refuses([v](auto& p) { p.softmax_scale = v; },
            "softmax_scale is " + text + "; accepted: 1.18e-38 to 8.5e37 (2^-126 to 2^126)");
    if (v == 0.0) continue;
    refuses(
        [v](auto& p) { p.softcap = v; },
        "softcap is " + text + "; accepted: 7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none");
  }
  for (const double v : {0x1p-126, 0x1p126}) accepts([v](auto& p) { p.softmax_scale = v; });
  for (const double v : {0.0, -0.0, 0x1p-100, 0x1p100}) accepts([v](auto& p) { p.softcap = v; });
  for (const double v : {0x1.fffffffffffffp-101, 0x1.0000000000001p100}) {
    AttentionParams p = good();
    p.softcap = v;
    CHECK(!supported(p, DeviceInfo{}).ok);
  }
  refuses([](auto& p) { p.window_left = -2; },
          "window left is -2; accepted: 0 to 1099511627776 tokens, or -1 for no limit");
  refuses([](auto& p) { p.window_right = -7; },
          "window right is -7; accepted: 0 to 1099511627776 tokens, or -1 for no limit");
  refuses([](auto& p) { p.window_right = INT64_MAX; },
          "window right is 9223372036854775807; accepted: 0 to 1099511627776 tokens, or -1 for no "
          "limit");
  refuses([](auto& p) { p.bias.data = memory, p.bias.dtype = DType::kFloat16; },
          "bias: dtype is float16; accepted: float32");
  refuses(
      [](auto& p) {
        p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kBFloat16, p.bias.data = memory,
        p.bias.dtype = DType::kFloat64;
      },
      "bias: dtype is float64; accepted: bfloat16 (that of q) or float32");
  accepts([](auto& p) {
    p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kBFloat16, p.bias.data = memory,
    p.bias.dtype = DType::kBFloat16;
  });

  using Mask = BasicTensorView<const std::uint8_t>;
  const struct {
    const char* dim;
    std::int64_t TensorView::* bias;
    std::int64_t Mask::* mask;
  } dims[] = {
      {"batch", &TensorView::batch_stride, &Mask::batch_stride},
      {"num_heads", &TensorView::head_stride, &Mask::head_stride},
      {"seqlen_q", &TensorView::row_stride, &Mask::row_stride},
      {"seqlen_k", &TensorView::col_stride, &Mask::col_stride},
  };
  const std::string end = " is -1; negative strides are not accepted";
  for (const auto& d : dims) {
    const std::string middle = std::string(": the stride of dimension ") + d.dim + end;
    refuses(
        [&](auto& p) { p.bias.data = memory, p.bias.dtype = DType::kFloat32, p.bias.*d.bias = -1; },
        "bias" + middle);
    refuses(
        [&](auto& p) {
          p.mask.data = reinterpret_cast<std::uint8_t*>(memory), p.mask.*d.mask = -1;
        },
        "mask" + middle);
  }
  refuses([](auto& p) { p.alibi_slopes.data = numbers, p.alibi_slopes.batch_stride = -1; },
          "alibi_slopes: the stride of dimension batch" + end);
  refuses([](auto& p) { p.alibi_slopes.data = numbers, p.alibi_slopes.head_stride = -1; },
          "alibi_slopes: the stride of dimension num_heads" + end);
  refuses([](auto& p) { p.sinks.data = numbers, p.sinks.head_stride = -1; },
          "sinks: the stride of dimension num_heads" + end);
}

void varlen() {
  accepts([](auto&) {}, good_varlen());
  refuses([](auto& p) { p.cu_seqlens_k = nullptr; },
          "cu_seqlens_k is null; variable length needs both, or seqused_k for keys in a cache",
          good_varlen());
  refuses([](auto& p) { p.cu_seqlens_q = nullptr; },
          "cu_seqlens_q is null; variable length needs both", good_varlen());
  accepts([](auto& p) { p.seqused_k = used; }, good_varlen());
  refuses([](auto& p) { p.total_q = -1; }, "total_q is -1; accepted: at least 0", good_varlen());
  refuses(
      [](auto& p) { p.batch_size = 0; },
      "batch_size is 0, by a cu_seqlens_q of one offset, but q has 3 tokens; accepted: at least "
      "1 sequence, or a q without tokens",
      good_varlen());
  accepts([](auto& p) { p.batch_size = p.total_q = 0; }, good_varlen());
  refuses([](auto& p) { p.total_q = 2; },
          "cu_seqlens_q[2] is 3; accepted: up to the 2 tokens of the tensor", good_varlen());
  // A GPU's memory is not read.
  accepts([](auto& p) { p.total_q = 2, p.device.type = DeviceType::kCuda; }, good_varlen());
  refuses([](auto& p) { p.total_k = -1; }, "total_k is -1; accepted: at least 0", good_varlen());
  constexpr std::int64_t kMost = 2147483647;  // of rows that int32 counts
  accepts([](auto& p) { p.total_k = kMost, p.out.data = memory - kApart; }, good_varlen());
  refuses([](auto& p) { p.total_q = kMost + 1; },
          "total_q is 2147483648; accepted: up to 2147483647", good_varlen());
  refuses([](auto& p) { p.total_k = kMost + 1; },
          "total_k is 2147483648; accepted: up to 2147483647", good_varlen());
}

MergeParams good_merge() {
  const auto numbers = [](int n) { return reinterpret_cast<float*>(memory + n * kApart); };
  MergeParams p;
  p.num_states = 2;
  p.out.dtype = p.outs[0].dtype = p.outs[1].dtype = DType::kFloat32;
  p.batch_size = 2, p.seqlen_q = 3, p.num_heads = 4, p.head_dim_v = 8;
  for (int n = 0; n < 2; ++n) {
    p.outs[n].data = numbers(n), p.lses[n].data = numbers(2 + n);
    p.outs[n].batch_stride = 96, p.outs[n].row_stride = 32, p.outs[n].head_stride = 8;
    p.lses[n].batch_stride = 12, p.lses[n].head_stride = 3, p.lses[n].row_stride = 1;
  }
  p.out.data = numbers(4), p.lse.data = numbers(5);
  p.out.batch_stride = 96, p.out.row_stride = 32, p.out.head_stride = 8;
  p.lse.batch_stride = 12, p.lse.head_stride = 3;
  return p;
}

template <typename Change>
void merge_refuses(Change change, const std::string& message) {
  MergeParams p = good_merge();
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, message);
}

void merges() {
  merge_refuses([](auto&) {}, kNothing);
  merge_refuses([](auto& p) { p.outs[1].dtype = DType::kFloat16; },
                "outs: dtype is float16; accepted: float32, that of out");
  merge_refuses([](auto& p) { p.num_states = 0; }, "outs holds 0 parts; accepted: 1 to 32");
  merge_refuses([](auto& p) { p.num_states = 33; }, "outs holds 33 parts; accepted: 1 to 32");
  merge_refuses([](auto& p) { p.batch_size = -1; }, "batch_size is -1; accepted: at least 0");
  merge_refuses([](auto& p) { p.seqlen_q = -1; }, "seqlen_q is -1; accepted: at least 0");
  merge_refuses([](auto& p) { p.num_heads = 0; }, "num_heads is 0; accepted: at least 1");
  merge_refuses([](auto& p) { p.head_dim_v = 0; }, "head_dim of outs is 0; accepted: at least 1");
  merge_refuses([](auto& p) { p.out.data = nullptr; }, "out is null");
  merge_refuses([](auto& p) { p.lse.data = nullptr; }, "lse is null");
  merge_refuses([](auto& p) { p.outs[1].data = nullptr; }, "outs[1] is null");
  merge_refuses([](auto& p) { p.lses[0].data = nullptr; }, "lses[0] is null");
  merge_refuses([](auto& p) { p.lses[0].data = reinterpret_cast<const float*>(memory + 2); },
                "lses: its address is 2 byte(s) past a multiple of 4; accepted: multiples of the "
                "element's size");
  const std::string end = " is -1; negative strides are not accepted";
  merge_refuses([](auto& p) { p.outs[1].batch_stride = -1; },
                "outs: the stride of dimension batch" + end);
  merge_refuses([](auto& p) { p.outs[0].row_stride = -1; },
                "outs: the stride of dimension seqlen" + end);
  merge_refuses([](auto& p) { p.outs[0].head_stride = -1; },
                "outs: the stride of dimension num_heads" + end);
  merge_refuses([](auto& p) { p.lses[0].batch_stride = -1; },
                "lses: the stride of dimension batch" + end);
  merge_refuses([](auto& p) { p.lses[0].head_stride = -1; },
                "lses: the stride of dimension num_heads" + end);
  merge_refuses([](auto& p) { p.lses[1].row_stride = -1; },
                "lses: the stride of dimension seqlen" + end);
  const auto shared = [](const std::string& output, const std::string& input) {
    return output + " shares memory with " + input + kShared;
  };
  merge_refuses([](auto& p) { p.out.data = const_cast<void*>(p.outs[1].data); },
                shared("out", "outs"));
  merge_refuses([](auto& p) { p.outs[1].data = static_cast<char*>(p.out.data) + 767; }, kOdd);
  merge_refuses([](auto& p) { p.outs[1].data = static_cast<char*>(p.out.data) + 764; },
                shared("out", "outs"));
  merge_refuses([](auto& p) { p.outs[1].data = static_cast<char*>(p.out.data) + 768; }, kNothing);
  merge_refuses([](auto& p) { p.lse.data = const_cast<float*>(p.lses[0].data); },
                shared("lse", "lses"));
  merge_refuses([](auto& p) { p.lse.data = static_cast<float*>(p.out.data); },
                shared("out", "lse"));
  merge_refuses([](auto& p) { p.out.head_stride = 7; },
                "out: a stride of 7 elements makes elements share memory; accepted: at "
                "least 8 there");
  merge_refuses([](auto& p) { p.lse.head_stride = 2; },
                "lse: a stride of 2 elements makes elements share memory; accepted: at "
                "least 3 there");
}

AttentionParams good_precision() {
  AttentionParams p = good();
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat16;
  p.precision = Precision::kInt8Fp8;
  return p;
}

void precision() {
  void* const buffer = memory + 4 * kApart;
  for (const Precision precision : {Precision::kInt8Fp8, Precision::kFp8, Precision::kInt8Fp16}) {
    accepts([precision](auto& p) { p.precision = precision; }, good_precision());
    accepts([&](auto& p) { p.precision = precision, p.quantized_kv = buffer; }, good_precision());
    accepts(
        [precision](auto& p) {
          p.precision = precision;
          p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kBFloat16;
        },
        good_precision());
  }
  // Keys and values that were quantised before are read instead of k and v.
  accepts(
      [&](auto& p) {
        p.quantized_kv = buffer, p.k.data = p.v.data = nullptr;
        p.k.dtype = p.v.dtype = DType::kFloat32;
      },
      good_precision());
  refuses([&](auto& p) { p.quantized_kv = buffer; },
          "quantized_kv is given with precision inputs; accepted: none");
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat8E4M3}) {
    refuses([dtype](auto& p) { p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype; },
            std::string("precision is int8_fp8 with q of ") + to_string(dtype) +
                "; accepted: with float16 or bfloat16",
            good_precision());
  }
  refuses([](auto& p) { p.k.dtype = DType::kBFloat16; },
          "k: dtype is bfloat16; accepted: float16, that of q", good_precision());
  refuses([](auto& p) { p.head_dim = 257; },
          "head_dim is 257; accepted: 1 to 256 with precision int8_fp8", good_precision());
  refuses([](auto& p) { p.head_dim_v = 258, p.precision = Precision::kFp8; },
          "head_dim of v is 258; accepted: 1 to 256 with precision fp8", good_precision());
  const std::string end = " is given with precision int8_fp8; accepted: none";
  refuses([](auto& p) { p.softcap = 2.0; }, "softcap" + end, good_precision());
  accepts([](auto& p) { p.bias.data = memory, p.bias.dtype = p.q.dtype; }, good_precision());
  refuses([](auto& p) { p.alibi_slopes.data = numbers; }, "alibi_slopes" + end, good_precision());
  refuses(
      [&](auto& p) {
        p.device.type = DeviceType::kCuda;
        p.quantized_kv = static_cast<char*>(buffer) + 64;
      },
      "quantized_kv: its address is 64 byte(s) past a multiple of 256; accepted: multiples of "
      "it",
      good_precision());
  refuses([](auto& p) { p.quantized_kv = p.out.data; },
          "out shares memory with quantized_kv" + kShared, good_precision());
}

QuantizeParams good_quantize() {
  QuantizeParams p;
  p.precision = Precision::kInt8Fp8;
  p.k.data = memory, p.v.data = memory + kApart, p.quantized_kv = memory + 2 * kApart;
  p.k.dtype = p.v.dtype = DType::kFloat16;
  p.batch_size = 2, p.seqlen_k = 5, p.num_heads_kv = 2, p.head_dim = p.head_dim_v = 8;
  p.k.batch_stride = p.v.batch_stride = 5 * 16;
  p.k.row_stride = p.v.row_stride = 16;
  p.k.head_stride = p.v.head_stride = 8;
  return p;
}

QuantizeParams good_varlen_quantize() {
  alignas(4) static const std::int32_t offsets[3] = {0, 1, 3};
  QuantizeParams p = good_quantize();
  p.cu_seqlens_k = offsets, p.total_k = 3;
  return p;
}

template <typename Change>
void quantize_refuses(Change change, const std::string& message,
                      QuantizeParams p = good_quantize()) {
  change(p);
  CHECK_THROWS(core::validate(p), UnsupportedError, message);
}
// Sizes are checked where nothing else is read, too.
template <typename Change>
void size_refused(Change change, const std::string& message) {
  quantize_refuses(change, message);
  QuantizeParams p = good_quantize();
  change(p);
  CHECK_THROWS(quantized_kv_bytes(p), UnsupportedError, message);
}

void quantize_sizes() {
  size_refused([](auto&) {}, kNothing);
  size_refused([](auto& p) { p.precision = Precision::kInputs; },
               "precision is inputs; accepted: int8_fp8, fp8, int8_fp16");
  size_refused([](auto& p) { p.batch_size = -1; }, "batch_size is -1; accepted: at least 0");
  size_refused([](auto& p) { p.seqlen_k = -2; }, "seqlen_k is -2; accepted: at least 0");
  size_refused([](auto& p) { p.num_heads_kv = 0; }, "num_heads_kv is 0; accepted: at least 1");
  size_refused([](auto& p) { p.head_dim = 0; }, "head_dim is 0; accepted: at least 1");
  size_refused([](auto& p) { p.head_dim_v = 0; }, "head_dim of v is 0; accepted: at least 1");
  size_refused([](auto& p) { p.head_dim = 257; },
               "head_dim is 257; accepted: 1 to 256 with precision int8_fp8");
  size_refused([](auto& p) { p.head_dim_v = 257, p.precision = Precision::kFp8; },
               "head_dim of v is 257; accepted: 1 to 256 with precision fp8");
  size_refused([](auto& p) { p.total_k = -1; }, "total_k is -1; accepted: at least 0");
}

void quantize_tensors() {
  for (const char* const name : {"k", "v"}) {
    const bool is_k = *name == 'k';
    const auto view = [is_k](auto& p) -> TensorView& { return is_k ? p.k : p.v; };
    const std::string start = name;
    quantize_refuses([&](auto& p) { view(p).dtype = DType::kFloat32; },
                     start +
                         ": dtype is float32; accepted: float16 or bfloat16 with precision "
                         "int8_fp8");
    quantize_refuses([&](auto& p) { view(p).data = nullptr; }, start + " is null");
    quantize_refuses([&](auto& p) { view(p).data = memory + 1; },
                     start +
                         ": its address is 1 byte(s) past a multiple of 2; accepted: multiples "
                         "of the element's size");
    const std::string end = " is -1; negative strides are not accepted";
    const std::string stride = start + ": the stride of dimension ";
    quantize_refuses([&](auto& p) { view(p).batch_stride = -1; }, stride + "batch" + end);
    quantize_refuses([&](auto& p) { view(p).row_stride = -1; }, stride + "seqlen" + end);
    quantize_refuses([&](auto& p) { view(p).head_stride = -1; }, stride + "num_heads" + end);
    quantize_refuses([&](auto& p) { view(p).data = p.quantized_kv; },
                     "quantized_kv shares memory with " + start + kShared);
  }
  quantize_refuses([](auto& p) { p.v.dtype = DType::kBFloat16; },
                   "v: dtype is bfloat16; accepted: float16, that of k");
  quantize_refuses([](auto& p) { p.quantized_kv = nullptr; }, "quantized_kv is null");
  quantize_refuses(
      [](auto& p) {
        p.device.type = DeviceType::kCuda;
        p.quantized_kv = memory + 2 * kApart + 128;
      },
      "quantized_kv: its address is 128 byte(s) past a multiple of 256; accepted: "
      "multiples of it");
  quantize_refuses([](auto& p) { p.seqlen_k = 0, p.k.data = p.v.data = p.quantized_kv = nullptr; },
                   kNothing);
}

void quantize_lengths() {
  quantize_refuses([](auto&) {}, kNothing, good_varlen_quantize());
  quantize_refuses([](auto& p) { p.seqused_k = used; }, kNothing, good_varlen_quantize());
  quantize_refuses([](auto& p) { p.seqused_k = used; }, "seqused_k needs cu_seqlens_k");
  const std::int64_t many = std::int64_t{1} << 31;
  quantize_refuses([many](auto& p) { p.total_k = many; },
                   "total_k is 2147483648; accepted: up to 2147483647", good_varlen_quantize());
  quantize_refuses([](auto& p) { p.total_k = 2; },
                   "cu_seqlens_k[2] is 3; accepted: up to the 2 tokens of the tensor",
                   good_varlen_quantize());
  const char* const past =
      ": its address is 2 byte(s) past a multiple of 4; accepted: multiples of the element's size";
  // A GPU's memory is not read.
  const auto on_gpu = [](auto change) {
    return [change](auto& p) { p.device.type = DeviceType::kCuda, change(p); };
  };
  const auto* const odd = reinterpret_cast<const std::int32_t*>(memory + 2);
  quantize_refuses(on_gpu([](auto& p) { p.total_k = 2; }), kNothing, good_varlen_quantize());
  quantize_refuses(on_gpu([odd](auto& p) { p.cu_seqlens_k = odd; }),
                   std::string("cu_seqlens_k") + past, good_varlen_quantize());
  quantize_refuses(on_gpu([odd](auto& p) { p.seqused_k = odd; }), std::string("seqused_k") + past,
                   good_varlen_quantize());
  const auto within = [](auto& p) { return static_cast<const std::int32_t*>(p.quantized_kv); };
  quantize_refuses(on_gpu([&](auto& p) { p.cu_seqlens_k = within(p); }),
                   "quantized_kv shares memory with cu_seqlens_k" + kShared,
                   good_varlen_quantize());
  quantize_refuses(on_gpu([&](auto& p) { p.seqused_k = within(p); }),
                   "quantized_kv shares memory with seqused_k" + kShared, good_varlen_quantize());
}

}  // namespace

int main() {
  sizes();
  strides();
  outputs();
  pointers();
  float8();
  scores();
  varlen();
  merges();
  precision();
  quantize_sizes();
  quantize_tensors();
  quantize_lengths();
  return test::summary();
}
