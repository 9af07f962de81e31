// The C API (dlattn/c.h) of attention, its gradients and devices in terms of the C++ one. Other
// operations have a file of their own.
#include <algorithm>
#include <cmath>

#include "core/c_api/translate.h"
#include "core/operations/backward.h"
#include "core/operations/forward.h"

namespace dlattn::c_api {
namespace {

static_assert(DLATTN_FLOAT16 == static_cast<int>(DType::kFloat16));
static_assert(DLATTN_BFLOAT16 == static_cast<int>(DType::kBFloat16));
static_assert(DLATTN_FLOAT32 == static_cast<int>(DType::kFloat32));
static_assert(DLATTN_FLOAT64 == static_cast<int>(DType::kFloat64));
static_assert(DLATTN_FLOAT8_E4M3 == static_cast<int>(DType::kFloat8E4M3));
static_assert(DLATTN_FLOAT8_E4M3 == kNumDTypes - 1);
static_assert(DLATTN_INT8 == static_cast<int>(DType::kInt8));
static_assert(DLATTN_CPU == static_cast<int>(DeviceType::kCpu));
static_assert(DLATTN_CUDA == static_cast<int>(DeviceType::kCuda));
static_assert(DLATTN_NOT_CAUSAL == static_cast<int>(Causal::kNone));
static_assert(DLATTN_BOTTOM_RIGHT == static_cast<int>(Causal::kBottomRight));
static_assert(DLATTN_TOP_LEFT == static_cast<int>(Causal::kTopLeft));
static_assert(DLATTN_INPUTS == static_cast<int>(Precision::kInputs));
static_assert(DLATTN_INT8_FP8 == static_cast<int>(Precision::kInt8Fp8));
static_assert(DLATTN_FP8 == static_cast<int>(Precision::kFp8));
static_assert(DLATTN_INT8_FP16 == static_cast<int>(Precision::kInt8Fp16));
static_assert(sizeof(DlattnTensor) == sizeof(void*) + 4 * sizeof(std::int64_t) + 8);

// An array, not a std::string: nothing here may throw, and a thread that ends destroys nothing.
thread_local char last_error[4096] = "";

}  // namespace

void copy_text(std::string_view text, char* to, std::size_t bytes) {
  if (!to || bytes == 0) return;
  const std::size_t count = std::min(text.size(), bytes - 1);
  std::memcpy(to, text.data(), count);
  to[count] = '\0';
}

std::int32_t failed(std::int32_t code, const char* what) {
  copy_text(what, last_error, sizeof last_error);
  return code;
}

AttentionParams params_of(const DlattnAttention* given) {
  const DlattnAttention a = taken("DlattnAttention", given);
  AttentionParams p;
  p.device = device_of(a.device_type, a.device_index);
  take_fields(core::operands_of(p), a, &p);
  take_page_table(a, &p);
  p.softmax_scale =
      a.softmax_scale != 0.0 ? a.softmax_scale : 1.0 / std::sqrt(static_cast<double>(a.head_dim));
  p.softcap = a.softcap;
  p.causal = checked_enum<Causal>("causal", "", a.causal, DLATTN_TOP_LEFT,
                                  "DLATTN_NOT_CAUSAL, DLATTN_BOTTOM_RIGHT, DLATTN_TOP_LEFT");
  p.precision = precision_of(a.precision);
  if (flag("has_window_left", a.has_window_left)) p.window_left = a.window_left;
  if (flag("has_window_right", a.has_window_right)) p.window_right = a.window_right;
  if (a.heads_per_q_descale != 0) p.heads_per_q_descale = a.heads_per_q_descale;
  return p;
}

namespace {

BackwardParams params_of(const DlattnBackward* given) {
  const DlattnBackward b = taken("DlattnBackward", given);
  if (b.reserved != 0) fail("reserved is ", b.reserved, "; accepted: 0");
  BackwardParams p;
  p.forward = c_api::params_of(b.attention);
  take_fields(core::operands_of(p), b, &p);
  p.deterministic = flag("deterministic", b.deterministic);
  return p;
}

Device device_of_params(const AttentionParams& params) {
  return params.device;
}
Device device_of_params(const BackwardParams& params) {
  return params.forward.device;
}

std::string lines_of(const std::vector<std::string>& reasons) {
  std::string text;
  for (const std::string& reason : reasons) text += (text.empty() ? "" : "\n") + reason;
  return text;
}

DlattnDeviceInfo translated(const DeviceInfo& info) {
  DlattnDeviceInfo made = {};
  made.device_type = static_cast<std::int32_t>(info.type);
  made.device_index = info.index;
  made.compute_major = info.compute_major;
  made.compute_minor = info.compute_minor;
  made.num_sms = info.num_sms;
  made.code = info.code;
  made.ptx = info.ptx;
  made.arch_specific_code = info.arch_specific_code;
  made.max_smem_per_block = info.max_smem_per_block;
  made.smem_per_sm = info.smem_per_sm;
  made.l2_bytes = info.l2_bytes;
  copy_text(info.unserved, made.unserved, sizeof made.unserved);
  made.num_threads = info.num_threads;
  copy_text(info.isa, made.isa, sizeof made.isa);
  copy_text(info.name, made.name, sizeof made.name);
  return made;
}

DlattnPlan translated(const Plan& plan) {
  DlattnPlan made = {};
  made.workspace_bytes = plan.workspace_bytes;
  made.predicted_ns = plan.predicted_ns;
  made.num_splits = plan.num_splits;
  made.num_launches = plan.num_launches();
  copy_text(plan.kernel, made.kernel, sizeof made.kernel);
  copy_text(plan.variant_name, made.variant, sizeof made.variant);
  return made;
}

}  // namespace

// A plan of `given`, as the struct and as text.
template <typename Given>
std::int32_t give_plan(const Given* given, const DlattnOptions* options, DlattnPlan* plan,
                       char* text, std::size_t text_bytes) {
  return guarded(options, [&](const Options& taken) {
    const auto params = params_of(given);
    check_struct("DlattnPlan", plan);
    const Plan made = dlattn::plan(params, device_info(device_of_params(params)), taken);
    copy_text(describe(made), text, text_bytes);
    give(translated(made), plan);
  });
}

}  // namespace dlattn::c_api

using namespace dlattn;
using namespace dlattn::c_api;

int32_t dlattn_version(void) {
  return 10000 * DLATTN_VERSION_MAJOR + 100 * DLATTN_VERSION_MINOR + DLATTN_VERSION_PATCH;
}

const char* dlattn_last_error(void) {
  return last_error;
}

int32_t dlattn_attention(const DlattnAttention* params, void* stream,
                         const DlattnOptions* options) {
  return guarded(options, [&](const Options& taken) { forward(params_of(params), stream, taken); });
}

int32_t dlattn_attention_plan(const DlattnAttention* params, const DlattnOptions* options,
                              DlattnPlan* plan, char* text, size_t text_bytes) {
  return give_plan(params, options, plan, text, text_bytes);
}

int32_t dlattn_attention_backward(const DlattnBackward* params, void* stream,
                                  const DlattnOptions* options) {
  return guarded(options,
                 [&](const Options& taken) { backward(params_of(params), stream, taken); });
}

int32_t dlattn_attention_backward_plan(const DlattnBackward* params, const DlattnOptions* options,
                                       DlattnPlan* plan, char* text, size_t text_bytes) {
  return give_plan(params, options, plan, text, text_bytes);
}

int32_t dlattn_supported(const DlattnAttention* params, const DlattnOptions* options, char* why,
                         size_t why_bytes) {
  copy_text("", why, why_bytes);
  const int32_t code = guarded(options, [&](const Options& taken) {
    const AttentionParams p = params_of(params);
    const Support support = supported(p, device_info(p.device), taken);
    if (!support.ok) throw UnsupportedError(lines_of(support.reasons));
  });
  if (code != DLATTN_OK) copy_text(last_error, why, why_bytes);
  return code;
}

int32_t dlattn_device_count(int32_t* count, char* why, size_t why_bytes) {
  return guarded([&] {
    if (!count) fail("count is null");
    *count = device_count();
    copy_text(*count ? "" : device_status(), why, why_bytes);
  });
}

int32_t dlattn_device_info(int32_t device_type, int32_t device_index, DlattnDeviceInfo* info) {
  return guarded([&] {
    const Device device = device_of(device_type, device_index);
    check_struct("DlattnDeviceInfo", info);
    give(translated(device_info(device)), info);
  });
}

const char* dlattn_kernel_name(int32_t index) {
  const char* name = nullptr;
  guarded([&] {
    const auto& names = kernel_names();  // views of whole literals
    if (index >= 0 && static_cast<std::size_t>(index) < names.size()) name = names[index].data();
  });
  return name;
}
