// The C API (dlattn/c.h) in terms of the C++ one: structs of any version are translated, exceptions
// become codes and words.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "core/operations/append.h"
#include "core/operations/backward.h"
#include "core/operations/forward.h"
#include "core/operations/merge.h"
#include "core/operations/quantize.h"
#include "core/validate/fail.h"
#include "dlattn/attention.h"
#include "dlattn/c.h"

namespace dlattn {
namespace {

using core::fail;

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

// Cuts off what does not fit; `to` may be null.
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

struct Cancelled {};

template <typename F>
std::int32_t guarded(F&& f) noexcept {
  try {
    f();
    return DLATTN_OK;
  } catch (const UnsupportedError& error) {
    return failed(DLATTN_UNSUPPORTED, error.what());
  } catch (const DeviceError& error) {
    return failed(DLATTN_DEVICE_ERROR, error.what());
  } catch (const Cancelled&) {
    return failed(DLATTN_CANCELLED, "poll ended the call");
  } catch (const std::bad_alloc&) {
    return failed(DLATTN_OUT_OF_MEMORY, "out of memory on the host");
  } catch (const std::exception& error) {
    return failed(DLATTN_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(DLATTN_INTERNAL_ERROR, "an exception of a type that dlattn does not know");
  }
}

// The bytes that a struct had in the version that introduced it: up to its last field of then.
template <typename Struct>
constexpr std::size_t kFirstSize = sizeof(Struct);

template <typename Struct>
void check_struct(const char* name, const Struct* given) {
  if (!given) fail(name, " is null");
  if (given->struct_size < kFirstSize<Struct>) {
    fail(name, ": struct_size is ", given->struct_size, "; accepted: at least ", kFirstSize<Struct>,
         ", its sizeof");
  }
}

// A struct of an older version gets zeros for what it lacks. One of a newer version may bring
// zeros, which mean that it asks for nothing that this version lacks.
template <typename Struct>
Struct taken(const char* name, const Struct* given) {
  check_struct(name, given);
  const char* const bytes = reinterpret_cast<const char*>(given);
  for (std::size_t i = sizeof(Struct); i < given->struct_size; ++i) {
    if (bytes[i] == 0) continue;
    fail(name, ": struct_size is ", given->struct_size, " and byte ", i,
         " is not 0; accepted: zeros after the ", sizeof(Struct), " bytes that dlattn ",
         DLATTN_VERSION, " knows");
  }
  Struct own = {};
  std::memcpy(&own, given, std::min(given->struct_size, sizeof(Struct)));
  return own;
}

// Writes `own` to a struct of any version; what this one does not know becomes 0.
template <typename Struct>
void give(Struct own, Struct* to) {
  own.struct_size = to->struct_size;
  const std::size_t known = std::min(to->struct_size, sizeof(Struct));
  std::memcpy(to, &own, known);
  std::memset(reinterpret_cast<char*>(to) + known, 0, to->struct_size - known);
}

template <typename Enum>
Enum checked_enum(const char* name, const char* field, std::int32_t value, int last,
                  const char* accepted) {
  if (value < 0 || value > last) {
    fail(name, field, " is ", value, "; accepted: 0 to ", last, " (", accepted, ")");
  }
  return static_cast<Enum>(value);
}

bool flag(const char* name, std::int32_t value) {
  if (value != 0 && value != 1) fail(name, " is ", value, "; accepted: 0 or 1");
  return value == 1;
}

Device device_of(std::int32_t type, std::int32_t index) {
  return {checked_enum<DeviceType>("device_type", "", type, DLATTN_CUDA, "DLATTN_CPU, DLATTN_CUDA"),
          index};
}

Precision precision_of(std::int32_t precision) {
  return checked_enum<Precision>("precision", "", precision, DLATTN_INT8_FP16,
                                 "DLATTN_INPUTS, DLATTN_INT8_FP8, DLATTN_FP8, "
                                 "DLATTN_INT8_FP16");
}

// Takes a DlattnTensor into the view at `field`.
void take_tensor(const core::Operand& operand, const DlattnTensor& tensor, char* field) {
  if (tensor.reserved != 0) fail(operand.name, ": reserved is ", tensor.reserved, "; accepted: 0");
  TensorView view;
  view.data = tensor.data;
  view.batch_stride = tensor.batch_stride;
  view.row_stride = tensor.row_stride;
  view.head_stride = tensor.head_stride;
  if (operand.has_columns()) view.col_stride = tensor.col_stride;
  const bool is_cached = operand.elements == core::Elements::kCached;
  if (is_cached || operand.elements == core::Elements::kAny) {
    if (tensor.dtype < 0 || tensor.dtype > (is_cached ? DLATTN_INT8 : DLATTN_FLOAT8_E4M3)) {
      fail(operand.name, ": dtype is ", tensor.dtype, "; accepted: 0 to ", DLATTN_FLOAT8_E4M3,
           " (DLATTN_FLOAT16, DLATTN_BFLOAT16, DLATTN_FLOAT32, DLATTN_FLOAT64, "
           "DLATTN_FLOAT8_E4M3)",
           is_cached ? core::concat(" or ", DLATTN_INT8, " (DLATTN_INT8)") : "");
    }
    view.dtype = static_cast<DType>(tensor.dtype);
  }
  std::memcpy(field, &view, sizeof view);
}

// Takes what the table of the operation says that both structs have.
template <typename Struct, typename Params>
void take_fields(const Struct& given, Params* params) {
  const core::Operands table = core::operands_of(*params);
  for (const core::Operand* operand = table.sizes; operand < table.end; ++operand) {
    if (operand->c_offset == 0) continue;
    const char* const from = reinterpret_cast<const char*>(&given) + operand->c_offset;
    char* const to = reinterpret_cast<char*>(params) + operand->offset;
    if (operand->kind == core::Kind::kTensor) {
      take_tensor(*operand, core::load<DlattnTensor>(from, 0), to);
    } else {
      std::memcpy(to, from, 8);  // a size, or a pointer
    }
  }
}

// Page tables are a pointer and a stride.
template <typename Struct, typename Params>
void take_page_table(const Struct& given, Params* p) {
  p->page_table.data = given.page_table;
  p->page_table.batch_stride = given.page_table_batch_stride;
}

AttentionParams params_of(const DlattnAttention* given) {
  const DlattnAttention a = taken("DlattnAttention", given);
  AttentionParams p;
  p.device = device_of(a.device_type, a.device_index);
  take_fields(a, &p);
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

BackwardParams params_of(const DlattnBackward* given) {
  const DlattnBackward b = taken("DlattnBackward", given);
  if (b.reserved != 0) fail("reserved is ", b.reserved, "; accepted: 0");
  BackwardParams p;
  p.forward = params_of(b.attention);
  take_fields(b, &p);
  p.deterministic = flag("deterministic", b.deterministic);
  return p;
}

MergeParams params_of(const DlattnMerge* given) {
  const DlattnMerge m = taken("DlattnMerge", given);
  if (m.reserved != 0) fail("reserved is ", m.reserved, "; accepted: 0");
  if (m.num_states < 1 || m.num_states > kMaxMergeStates)
    fail("num_states is ", m.num_states, "; accepted: 1 to ", kMaxMergeStates);
  if (!m.outs) fail("outs is null");
  if (!m.lses) fail("lses is null");
  MergeParams p;
  p.num_states = m.num_states;
  const core::Operands table = core::operands_of(p);
  for (int n = 0; n < m.num_states; ++n) {
    take_tensor(*core::find(table, "outs"), m.outs[n], reinterpret_cast<char*>(&p.outs[n]));
    take_tensor(*core::find(table, "lses"), m.lses[n], reinterpret_cast<char*>(&p.lses[n]));
  }
  take_fields(m, &p);
  p.device = device_of(m.device_type, m.device_index);
  return p;
}

QuantizeParams params_of(const DlattnQuantize* given) {
  const DlattnQuantize q = taken("DlattnQuantize", given);
  if (q.reserved != 0) fail("reserved is ", q.reserved, "; accepted: 0");
  QuantizeParams p;
  p.precision = precision_of(q.precision);
  take_fields(q, &p);
  p.device = device_of(q.device_type, q.device_index);
  return p;
}

AppendParams params_of(const DlattnAppend* given) {
  const DlattnAppend a = taken("DlattnAppend", given);
  if (a.reserved != 0) fail("reserved is ", a.reserved, "; accepted: 0");
  AppendParams p;
  take_fields(a, &p);
  take_page_table(a, &p);
  p.device = device_of(a.device_type, a.device_index);
  if (a.slot_bytes != 0) p.slot_bytes = a.slot_bytes;
  p.rotary_interleaved = flag("rotary_interleaved", a.rotary_interleaved);
  p.q_fixed_position = flag("q_fixed_position", a.q_fixed_position);
  return p;
}

// The caller's options, and what those of C++ point to.
struct TakenOptions {
  DlattnOptions own = {};
  Options options;

  explicit TakenOptions(const DlattnOptions* given) {
    if (!given) return;
    own = taken("DlattnOptions", given);
    if (own.kernel) options.kernel = own.kernel;
    options.variant = own.variant;
    if (own.num_threads < 0)
      fail("num_threads is ", own.num_threads, "; accepted: at least 0, which is all");
    options.num_threads = own.num_threads;
    options.batch_invariant = flag("batch_invariant", own.batch_invariant);
    if (own.reserved != 0) fail("reserved is ", own.reserved, "; accepted: 0");
    options.num_splits = own.num_splits;
    options.split_size = own.split_size;
    if (own.poll) options.poll = {poll, &own};
    options.workspace = {own.allocate, own.allocate_context};
  }
  TakenOptions(const TakenOptions&) = delete;

  static void poll(void* context) {
    const auto& own = *static_cast<const DlattnOptions*>(context);
    if (own.poll(own.poll_context) != 0) throw Cancelled();
  }
};

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
}  // namespace dlattn

using namespace dlattn;

int32_t dlattn_version(void) {
  return 10000 * DLATTN_VERSION_MAJOR + 100 * DLATTN_VERSION_MINOR + DLATTN_VERSION_PATCH;
}

const char* dlattn_last_error(void) {
  return last_error;
}

int32_t dlattn_attention(const DlattnAttention* params, void* stream,
                         const DlattnOptions* options) {
  return guarded([&] {
    const TakenOptions taken(options);
    forward(params_of(params), stream, taken.options);
  });
}

int32_t dlattn_attention_plan(const DlattnAttention* params, const DlattnOptions* options,
                              DlattnPlan* plan, char* text, size_t text_bytes) {
  return guarded([&] {
    const TakenOptions taken(options);
    const AttentionParams p = params_of(params);
    check_struct("DlattnPlan", plan);
    const Plan made = dlattn::plan(p, device_info(p.device), taken.options);
    copy_text(describe(made), text, text_bytes);
    give(translated(made), plan);
  });
}

int32_t dlattn_attention_backward(const DlattnBackward* params, void* stream,
                                  const DlattnOptions* options) {
  return guarded([&] {
    const TakenOptions taken(options);
    backward(params_of(params), stream, taken.options);
  });
}

int32_t dlattn_attention_backward_plan(const DlattnBackward* params, const DlattnOptions* options,
                                       DlattnPlan* plan, char* text, size_t text_bytes) {
  return guarded([&] {
    const TakenOptions taken(options);
    const BackwardParams p = params_of(params);
    check_struct("DlattnPlan", plan);
    const Plan made = dlattn::plan(p, device_info(p.forward.device), taken.options);
    copy_text(describe(made), text, text_bytes);
    give(translated(made), plan);
  });
}

int32_t dlattn_supported(const DlattnAttention* params, const DlattnOptions* options, char* why,
                         size_t why_bytes) {
  copy_text("", why, why_bytes);
  const int32_t code = guarded([&] {
    const TakenOptions taken(options);
    const AttentionParams p = params_of(params);
    const Support support = supported(p, device_info(p.device), taken.options);
    if (!support.ok) throw UnsupportedError(lines_of(support.reasons));
  });
  if (code != DLATTN_OK) copy_text(last_error, why, why_bytes);
  return code;
}

int32_t dlattn_merge_states(const DlattnMerge* params, void* stream, const DlattnOptions* options) {
  return guarded([&] {
    const TakenOptions taken(options);
    merge_states(params_of(params), stream, taken.options.poll);
  });
}

int32_t dlattn_quantized_kv_bytes(const DlattnQuantize* params, int64_t* bytes) {
  return guarded([&] {
    if (!bytes) fail("bytes is null");
    *bytes = quantized_kv_bytes(params_of(params));
  });
}

int32_t dlattn_quantize_kv(const DlattnQuantize* params, void* stream) {
  return guarded([&] { quantize_kv(params_of(params), stream); });
}

int32_t dlattn_append_kv(const DlattnAppend* params, void* stream, const DlattnOptions* options) {
  return guarded([&] {
    const TakenOptions taken(options);
    append_kv(params_of(params), stream, taken.options.poll);
  });
}

int32_t dlattn_append_and_attend(const DlattnAppend* append, const DlattnAttention* attention,
                                 void* stream, const DlattnOptions* options) {
  return guarded([&] {
    const TakenOptions taken(options);
    append_and_attend(params_of(append), params_of(attention), stream, taken.options);
  });
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
