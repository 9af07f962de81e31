#include "core/plan.h"

#include <algorithm>
#include <cstdlib>
#include <limits>

#include "core/backend.h"
#include "core/concat.h"
#include "core/family.h"
#include "cuda/tile/alignment.h"
#include "cuda/tile/launch_shape.h"

namespace dlattn::core {
namespace {

// The head_dim_tile of a problem's instance, 0 if there is none.
int instance_tile(const ListedFamily& family, const AttentionParams& p, std::string* why) {
  const int step = family.record->head_dim_step;
  const int tile = family.head_dim_tile(p.q.dtype, std::max(p.head_dim, p.head_dim_v));
  if (tile > 0 && p.head_dim % step == 0 && p.head_dim_v % step == 0) return tile;
  if (!why) return 0;
  std::string dtypes;
  int largest = 0;
  const Instance* before = nullptr;
  for (const Instance& instance : family.instances) {
    largest = std::max(largest, instance.head_dim_tile);
    if (!before || before->dtype != instance.dtype)
      dtypes += concat(dtypes.empty() ? "" : ", ", to_string(instance.dtype));
    before = &instance;
  }
  if (family.head_dim_tile(p.q.dtype, 1) == 0) {
    refuse(why, "dtype is ", to_string(p.q.dtype), "; accepted: ", dtypes);
    return 0;
  }
  const bool first = p.head_dim > largest || p.head_dim % step != 0;
  refuse(why, first ? "head_dim is " : "head_dim of v is ", first ? p.head_dim : p.head_dim_v,
         "; accepted: ", step == 1 ? "1 to " : concat("multiples of ", step, " up to "), largest);
  return 0;
}

// What a plan asks of the device, or of a kernel's arithmetic, that they do not have.
bool can_launch(const Plan& plan, const AttentionParams& p, const DeviceInfo& device,
                std::string* why) {
  if (plan.smem_bytes > device.max_smem_per_block) {
    return refuse(why, "needs ", plan.smem_bytes, " bytes of shared memory per block; ",
                  device.name, " has ", device.max_smem_per_block);
  }
  const struct {
    const char* name;
    std::int64_t value;
  } lengths[] = {{"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}};
  for (const auto& length : lengths) {
    if (length.value > kMaxSeqlen)
      return refuse(why, length.name, " is ", length.value, "; accepted: up to ", kMaxSeqlen);
  }
  if (plan.grid > kMaxGrid)
    return refuse(why, "needs ", plan.grid, " thread blocks; accepted: up to ", kMaxGrid);
  return true;
}

bool refuse_variant(const char* variant, std::string* why) {
  return refuse(why, "variant is ", variant, "; accepted: none, this kernel has one tile shape");
}

bool is_for(const ForwardFamily& family, const DeviceInfo& device) {
  return !family.capability ||
         family.capability == 10 * device.compute_major + device.compute_minor;
}

// Whether a family can run a problem. If so, `plan`, whose copy_bytes are set, is how; if not,
// `why` says why not, without the family's name, unless it is null.
bool plan_on(const ListedFamily& family, const AttentionParams& p, const DeviceInfo& device,
             const Options& options, Plan* plan, std::string* why) {
  const ForwardFamily& record = *family.record;
  if (device.type != DeviceType::kCuda) return refuse(why, "the tensors are on the CPU");
  if (!device.unserved.empty()) return refuse(why, device.unserved);
  if (!is_for(record, device)) {
    return refuse(why, "needs compute capability ", record.capability / 10, ".",
                  record.capability % 10, "; ", device.name, " has ", device.compute_major, ".",
                  device.compute_minor);
  }
  plan->kernel = record.name;
  plan->dtype = p.q.dtype;
  plan->head_dim_tile = instance_tile(family, p, why);
  if (plan->head_dim_tile == 0) return false;
  if (options.variant && !record.accepted_variants) return refuse_variant(options.variant, why);
  return record.plan(p, device, options, plan, why) && can_launch(*plan, p, device, why);
}

bool runs_on_cpu(const DeviceInfo& device, const Options& options, std::string* why) {
  if (device.type != DeviceType::kCpu) return refuse(why, "the tensors are on a CUDA device");
  return !options.variant || refuse_variant(options.variant, why);
}

std::string unknown_kernel(std::string_view kernel) {
  std::string names;
  for (const std::string_view name : kernel_names())
    names += concat(names.empty() ? "" : ", ", name);
  return concat("kernel is ", kernel, "; accepted: ", names);
}

bool asks_for_cpu(const DeviceInfo& device, const Options& options) {
  return options.kernel == kCpu || (options.kernel == kAuto && device.type == DeviceType::kCpu);
}

// Whether a family that `options` admit can run a problem on a GPU. If so, `best` is how, by the
// families' models the fastest; if not, `reasons` are why not, unless that is null.
bool best_plan(const AttentionParams& p, const DeviceInfo& device, const Options& options,
               Plan* best, std::vector<std::string>* reasons) {
  std::string text;
  std::string* why = reasons ? &text : nullptr;
  const bool any = options.kernel == kAuto;
  bool found = false, known = any;
  const int bytes = copy_bytes(p);
  for (const ListedFamily& family : forward_families()) {
    if (any ? !is_for(*family.record, device) : options.kernel != family.record->name) continue;
    known = true;
    Plan plan;
    plan.copy_bytes = bytes;
    plan.predicted_ns = found ? best->predicted_ns : std::numeric_limits<double>::infinity();
    if (!plan_on(family, p, device, options, &plan, why)) {
      if (reasons) reasons->push_back(concat(family.record->name, ": ", text));
    } else if (!found || plan.predicted_ns < best->predicted_ns) {
      *best = plan, found = true;
    }
  }
  if (!known && reasons) reasons->push_back(unknown_kernel(options.kernel));
  return found;
}

std::string join(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += (text.empty() ? "" : "; ") + line;
  return text;
}

}  // namespace

int copy_bytes(const AttentionParams& p) {
  const bool varlen = p.cu_seqlens_q != nullptr;
  const std::int64_t rows_q = varlen ? p.total_q : p.seqlen_q;
  const std::int64_t rows_k = varlen ? p.total_k : p.seqlen_k;
  const std::int64_t batch = varlen ? 1 : p.batch_size;
  Alignment all(size_of(p.q.dtype));
  const auto add = [&](const TensorView& x, std::int64_t rows, std::int64_t heads) {
    all.add_address(x.data);
    all.add_stride(batch, x.batch_stride);
    all.add_stride(rows, x.row_stride);
    all.add_stride(heads, x.head_stride);
  };
  add(p.q, rows_q, p.num_heads);
  add(p.k, rows_k, p.num_heads_kv);
  add(p.v, rows_k, p.num_heads_kv);
  // A row is copied in whole steps, so its length counts as well.
  all.add_length(p.head_dim);
  all.add_length(p.head_dim_v);
  return all.bytes();
}

const char* score_feature(const AttentionParams& p) {
  if (p.softcap != 0.0) return "softcap";
  if (p.bias.data) return "bias";
  if (p.mask.data) return "mask";
  return p.alibi_slopes.data ? "alibi_slopes" : nullptr;
}

Code code_for(const std::string& archs, int compute_major, int compute_minor) {
  const int wanted = compute_major * 10 + compute_minor;
  Code code;
  std::istringstream list(archs);
  for (std::string entry; std::getline(list, entry, ';');) {
    const int arch = std::atoi(entry.c_str());
    if (arch == 0 || arch > wanted) continue;
    const bool real = entry.find("-virtual") == std::string::npos;
    const bool ptx = entry.find("-real") == std::string::npos;
    // Architecture-specific targets ("90a") serve their own compute capability only.
    const bool specific = entry.find('a') < entry.find('-');
    if (specific && arch != wanted) continue;
    if (!(real && arch / 10 == compute_major) && !ptx) continue;
    code.capability = std::max(code.capability, arch);
    code.arch_specific |= specific;
  }
  return code;
}

std::vector<std::string> refusals(const AttentionParams& params, const DeviceInfo& device,
                                  const Options& options) {
  if (asks_for_cpu(device, options)) {
    std::string why;
    if (runs_on_cpu(device, options, &why)) return {};
    return {concat(kCpu, ": ", why)};
  }
  Plan plan;
  std::vector<std::string> reasons;
  if (best_plan(params, device, options, &plan, &reasons)) reasons.clear();
  return reasons;
}

Plan make_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  Plan plan;
  if (!asks_for_cpu(device, options)) {
    if (best_plan(params, device, options, &plan, nullptr)) return plan;
  } else if (runs_on_cpu(device, options, nullptr)) {
    plan.kernel = kCpu;
    plan.dtype = params.q.dtype;
    cpu::plan(params, device, options, &plan);
    return plan;
  }
  throw UnsupportedError("no kernel can run this: " + join(refusals(params, device, options)));
}

}  // namespace dlattn::core
