#include "support.h"

#include <nanobind/stl/string.h>

#include <cstdint>
#include <string>
#include <utility>

#include "core/operations/append.h"
#include "core/operations/backward.h"
#include "core/operations/forward.h"
#include "core/operations/merge.h"
#include "core/operations/quantize.h"
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
  std::string accepted;
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    if (name == to_string(dtype)) return dtype;
    accepted += concat(i ? ", " : "", to_string(dtype));
  }
  unsupported("dtype is ", name, "; accepted: ", accepted);
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
  if (dtype == DType::kFloat8E4M3) p.out.dtype = DType::kBFloat16;
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

void set_head_dim_v(AttentionParams* p) {
  p->head_dim_v = (p->head_dim + 1) / 2;
  p->v.row_stride = p->out.row_stride = kHeads * p->head_dim_v;
  p->v.head_stride = p->out.head_stride = p->head_dim_v;
  p->v.batch_stride = p->out.batch_stride = kSeqlen * kHeads * p->head_dim_v;
}

void set_tensor(const core::Operand& operand, AttentionParams* p) {
  TensorView view;
  view.data = memory(4);
  view.dtype = DType::kFloat32;
  core::store(p, operand.offset, view);
}

void set_varlen(AttentionParams* p) {
  static constexpr std::int32_t cu_seqlens[2] = {0, kSeqlen};
  p->cu_seqlens_q = p->cu_seqlens_k = cu_seqlens;
  p->total_q = p->total_k = kSeqlen;
}

void set_kvcache(AttentionParams* p) {
  static constexpr std::int32_t page_table[1] = {0}, seqused_k[1] = {kSeqlen};
  p->page_table.data = page_table;
  p->page_table.batch_stride = 1;
  p->page_size = kSeqlen;
  p->num_pages = 1;
  p->seqused_k = seqused_k;
}

// Features that a kernel may lack, in the order of the table of what is supported.
struct Feature {
  const char* name;
  void (*add)(AttentionParams* p);  // to a made-up problem
};
constexpr Feature kFeaturesBeforeTensors[] = {
    {"causal", [](AttentionParams* p) { p->causal = Causal::kBottomRight; }},
    {"gqa", [](AttentionParams* p) { p->num_heads_kv = 1; }},
    {"head_dim_v", set_head_dim_v},
    {"window", [](AttentionParams* p) { p->window_left = 8; }},
    {"softcap", [](AttentionParams* p) { p->softcap = 30.0; }},
};
constexpr Feature kFeaturesBehindTensors[] = {{"varlen", set_varlen}, {"kvcache", set_kvcache}};

// visit(name, add) for each feature that a kernel may lack, in the order of the table of what is
// supported.
template <typename Visit>
void for_each_feature(const Visit& visit) {
  for (const Feature& feature : kFeaturesBeforeTensors) visit(feature.name, feature.add);
  for (const core::Operand& operand : core::kForwardOperands) {
    if (operand.has(core::kIsFeature))
      visit(operand.name, [&](AttentionParams* p) { set_tensor(operand, p); });
  }
  for (const Feature& feature : kFeaturesBehindTensors) visit(feature.name, feature.add);
}

void add_feature(const std::string& name, AttentionParams* p) {
  if (name.empty()) return;
  std::string accepted;
  bool found = false;
  for_each_feature([&](const char* feature, const auto& add) {
    if (name == feature) add(p), found = true;
    accepted += concat(accepted.empty() ? "" : ", ", feature);
  });
  if (!found) unsupported("feature is ", name, "; accepted: ", accepted);
}

std::string refusal(nb::handle kernel, const std::string& dtype, std::int64_t head_dim,
                    const std::string& feature, int compute_capability) {
  AttentionParams params = made_up_problem(parse_dtype(dtype), head_dim);
  add_feature(feature, &params);
  Options options;
  parse_kernel(kernel, kernel_names(), &options);
  const DeviceInfo device = made_up_device(compute_capability);
  params.device.type = device.type;
  const Support support = supported(params, device, options);
  std::string reasons;
  for (const std::string& reason : support.reasons)
    reasons += (reasons.empty() ? "" : "; ") + reason;
  return reasons;
}

// The tensors of an operation as the table has them: their names, dimensions, and which functions
// and faces take them as optional arguments.
nb::tuple tensors_of(const core::Operands& table) {
  constexpr std::pair<int, const char*> kSurfaces[] = {{core::kInAttention, "attention"},
                                                       {core::kInVarlen, "attention_varlen"},
                                                       {core::kInKvcache, "attention_with_kvcache"},
                                                       {core::kInTorch, "torch"}};
  nb::list tensors;
  for (const core::Operand* operand = table.tensors; operand < table.end; ++operand) {
    nb::list takers;
    for (const auto& [bit, name] : kSurfaces) {
      if (operand->has(bit)) takers.append(nb::str(name));
    }
    tensors.append(
        nb::make_tuple(nb::str(operand->name), nb::str(operand->dims), nb::tuple(takers)));
  }
  return nb::tuple(tensors);
}

}  // namespace

void register_support(nb::module_& module) {
  nb::dict operands;
  operands["forward"] = tensors_of(core::kForwardOperands);
  operands["backward"] = tensors_of(core::kBackwardOperands);
  operands["append"] = tensors_of(core::kAppendOperands);
  operands["merge"] = tensors_of(core::kMergeOperands);
  operands["quantize"] = tensors_of(core::kQuantizeOperands);
  module.attr("operands") = operands;
  nb::list names;
  for (const std::string_view name : kernel_names())
    names.append(nb::str(name.data(), name.size()));
  module.attr("kernel_names") = nb::tuple(names);
  nb::list features;
  for_each_feature([&](const char* name, const auto&) { features.append(nb::str(name)); });
  module.attr("feature_names") = nb::tuple(features);
  module.def("refusal", &refusal, nb::arg("kernel"), nb::arg("dtype"), nb::arg("head_dim"),
             nb::arg("feature"), nb::arg("compute_capability"));
}

}  // namespace dlattn::python
