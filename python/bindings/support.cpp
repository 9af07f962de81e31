#include "support.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>

#include "dlattn/attention.h"
#include "errors.h"
#include "options.h"

namespace dlattn::python {
namespace {

constexpr std::int64_t kSeqlen = 64;
constexpr std::int64_t kHeads = 4;

// Where the tensors of made-up problems would lie, apart from each other. Nothing is read there.
void* memory(int tensor) {
  return reinterpret_cast<void*>(std::uintptr_t(tensor + 1) << 40);
}

DType parse_dtype(const std::string& name) {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    if (name == to_string(dtype)) return dtype;
  }
  unsupported("dtype is ", name, "; accepted: float16, bfloat16, float32, float64");
}

// A device of some compute capability (89 for 8.9) that this build serves, or the CPU for 0.
DeviceInfo made_up_device(int compute_capability) {
  DeviceInfo device;
  if (compute_capability == 0) return device;
  device.type = DeviceType::kCuda;
  device.name = "a GPU of compute capability " + std::to_string(compute_capability);
  device.compute_major = compute_capability / 10;
  device.compute_minor = compute_capability % 10;
  device.num_sms = 64;
  const bool datacenter = device.compute_major == 9 || device.compute_major == 10;
  const int smem_kb = datacenter ? 227 : compute_capability == 80 ? 163 : 99;
  device.max_smem_per_block = smem_kb * 1024;
  device.smem_per_sm = device.max_smem_per_block + 1024;
  device.code = compute_capability;
  device.arch_specific_code = true;
  return device;
}

AttentionParams made_up_problem(DType dtype, std::int64_t head_dim) {
  AttentionParams p;
  p.q.data = memory(0);
  p.k.data = memory(1);
  p.v.data = memory(2);
  p.out.data = memory(3);
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype;
  p.batch_size = 1;
  p.seqlen_q = p.seqlen_k = kSeqlen;
  p.num_heads = p.num_heads_kv = kHeads;
  p.head_dim = p.head_dim_v = head_dim;
  p.q.row_stride = p.k.row_stride = p.v.row_stride = p.out.row_stride = kHeads * head_dim;
  p.q.head_stride = p.k.head_stride = p.v.head_stride = p.out.head_stride = head_dim;
  p.q.batch_stride = p.k.batch_stride = p.v.batch_stride = p.out.batch_stride =
      kSeqlen * kHeads * head_dim;
  p.softmax_scale = 1.0;
  return p;
}

void add_feature(const std::string& feature, AttentionParams* p) {
  static constexpr std::int32_t cu_seqlens[2] = {0, kSeqlen};
  static constexpr float floats[1] = {0.0f};
  if (feature.empty()) return;
  if (feature == "causal") {
    p->causal = Causal::kBottomRight;
  } else if (feature == "gqa") {
    p->num_heads_kv = 1;
  } else if (feature == "head_dim_v") {
    p->head_dim_v = 2 * p->head_dim;
    p->v.row_stride = p->out.row_stride = kHeads * p->head_dim_v;
    p->v.head_stride = p->out.head_stride = p->head_dim_v;
    p->v.batch_stride = p->out.batch_stride = kSeqlen * kHeads * p->head_dim_v;
  } else if (feature == "window") {
    p->window_left = 8;
  } else if (feature == "softcap") {
    p->softcap = 30.0;
  } else if (feature == "bias") {
    p->bias.data = memory(4);
    p->bias.col_stride = 1;
  } else if (feature == "mask") {
    p->mask.data = static_cast<const std::uint8_t*>(memory(4));
    p->mask.col_stride = 1;
  } else if (feature == "alibi_slopes") {
    p->alibi_slopes.data = floats;
  } else if (feature == "sinks") {
    p->sinks.data = floats;
  } else if (feature == "varlen") {
    p->cu_seqlens_q = p->cu_seqlens_k = cu_seqlens;
    p->total_q = p->total_k = kSeqlen;
  } else {
    unsupported("feature is ", feature,
                "; accepted: causal, gqa, head_dim_v, window, softcap, bias, mask, ",
                "alibi_slopes, sinks, varlen");
  }
}

std::string refusal(nb::handle kernel, const std::string& dtype, std::int64_t head_dim,
                    const std::string& feature, int compute_capability) {
  AttentionParams params = made_up_problem(parse_dtype(dtype), head_dim);
  add_feature(feature, &params);
  Options options;
  parse_kernel(kernel, &options);
  const DeviceInfo device = made_up_device(compute_capability);
  params.device.type = device.type;
  const Support support = supported(params, device, options);
  std::string reasons;
  for (const std::string& reason : support.reasons)
    reasons += (reasons.empty() ? "" : "; ") + reason;
  return reasons;
}

}  // namespace

void register_support(nb::module_& module) {
  nb::list names;
  for (const std::string_view name : kernel_names())
    names.append(nb::str(name.data(), name.size()));
  module.attr("kernel_names") = nb::tuple(names);
  module.def("refusal", &refusal, nb::arg("kernel"), nb::arg("dtype"), nb::arg("head_dim"),
             nb::arg("feature"), nb::arg("compute_capability"));
}

}  // namespace dlattn::python
