#include "core/plan.h"

#include <cstdlib>
#include <limits>

#include "core/backend.h"
#include "core/concat.h"
#include "core/registry.h"
#include "core/sm90_plan.h"
#include "core/wmma_plan.h"
#include "cuda/forward/scalar/traits.h"
#include "cuda/forward/sm90/boxes.h"
#include "cuda/forward/wmma/traits.h"
#include "cuda/forward/wmma_qk/traits.h"
#include "cuda/forward/wmma_smem/traits.h"
#include "cuda/tile/alignment.h"
#include "cuda/tile/launch_shape.h"
#include "cuda/tile/span.h"

namespace dlattn::core {
namespace {

// Grids are one-dimensional: (m_block, head, batch) flattened.
constexpr std::int64_t kMaxGrid = 2147483647;

// Order of preference on a GPU, by measured speed; sm90 only where sm90_preferred() says so.
constexpr Kernel kCudaKernels[] = {Kernel::kSm90, Kernel::kWmma, Kernel::kWmmaSmem, Kernel::kScalar,
                                   Kernel::kWmmaQk};

// Whether `options` admit a kernel.
bool admits(const Options& options, Kernel kernel, const AttentionParams& p,
            const DeviceInfo& device) {
  if (options.kernel != Kernel::kAuto) return options.kernel == kernel;
  return kernel != Kernel::kSm90 || sm90_preferred(p, device, options);
}

std::int64_t larger_head_dim(const AttentionParams& p) {
  return p.head_dim > p.head_dim_v ? p.head_dim : p.head_dim_v;
}

TileConfig tile_config(Kernel kernel, const AttentionParams& p, int head_dim_tile, int variant) {
  switch (kernel) {
    case Kernel::kWmmaQk:
      return wmma_qk::tile_config(head_dim_tile, p.seqlen_k);
    case Kernel::kWmma: {
      TileConfig config = wmma::tile_config(head_dim_tile, variant);
      if (variant == wmma::kGeneral) {
        const int bias_bytes = p.bias ? static_cast<int>(size_of(p.bias_dtype)) : 0;
        config.smem_bytes = wmma::general_smem_bytes(head_dim_tile, p.mask != nullptr, bias_bytes);
      }
      return config;
    }
    case Kernel::kWmmaSmem:
      return wmma_smem::tile_config(head_dim_tile);
    case Kernel::kSm90:
      return sm90_tile_config(p, head_dim_tile);
    default:
      return scalar::tile_config(static_cast<int>(size_of(p.dtype)), head_dim_tile, p.seqlen_k);
  }
}

std::int64_t num_blocks(const AttentionParams& p, int block_m, int packed_heads) {
  const std::int64_t m_blocks = (p.seqlen_q * packed_heads + block_m - 1) / block_m;
  return m_blocks * (p.num_heads / packed_heads) * p.batch_size;
}

std::string cpu_refusal(const DeviceInfo& device) {
  if (device.type == DeviceType::kCpu) return {};
  return "cpu: the tensors are on a CUDA device";
}

std::string dtype_refusal(Kernel kernel, const AttentionParams& p) {
  const bool half = p.dtype == DType::kFloat16 || p.dtype == DType::kBFloat16;
  if (half) return {};
  if (kernel != Kernel::kScalar) {
    return concat(to_string(kernel), ": dtype is ", to_string(p.dtype),
                  "; accepted: float16, bfloat16");
  }
  if (p.dtype == DType::kFloat64) {
    return "scalar: dtype is float64; accepted on a GPU: float16, bfloat16, float32";
  }
  return {};
}

std::string head_dim_refusal(Kernel kernel, const AttentionParams& p) {
  // Columns of the instructions' operands, which scalar has not and wmma fills up by itself.
  const bool steps = kernel == Kernel::kWmmaQk || kernel == Kernel::kWmmaSmem;
  const int step = steps ? 16 : kernel == Kernel::kSm90 ? 8 : 1;
  const struct {
    const char* name;
    std::int64_t value;
  } dims[] = {{"head_dim", p.head_dim}, {"head_dim of v", p.head_dim_v}};
  for (const auto& dim : dims) {
    if (head_dim_tile(kernel, p.dtype, dim.value) == 0 || dim.value % step != 0) {
      return concat(to_string(kernel), ": ", dim.name, " is ", dim.value, "; accepted: ",
                    step == 1   ? "1 to 256"
                    : step == 8 ? "multiples of 8 up to 256"
                                : "multiples of 16 up to 128");
    }
  }
  return {};
}

// What of a problem's features sm90 takes for sequences of one length alone; null if none.
const char* packed_feature(const AttentionParams& p) {
  if (!p.cu_seqlens_q) return nullptr;
  if (p.mask) return "mask with cu_seqlens_q";
  return p.bias ? "bias with cu_seqlens_q" : nullptr;
}

// The score features that a family does not compute; scalar and wmma have them all.
std::string feature_refusal(Kernel kernel, const AttentionParams& p) {
  if (kernel == Kernel::kScalar || kernel == Kernel::kWmma) return {};
  const char* feature = kernel == Kernel::kSm90 ? packed_feature(p) : score_feature(p);
  return feature ? concat(to_string(kernel), ": does not implement ", feature) : std::string();
}

std::string device_refusal(Kernel kernel, const DeviceInfo& device) {
  if (device.type != DeviceType::kCuda)
    return concat(to_string(kernel), ": the tensors are on the CPU");
  if (!device.unserved.empty()) return concat(to_string(kernel), ": ", device.unserved);
  return {};
}

std::string variant_refusal(Kernel kernel, const AttentionParams& p, const DeviceInfo& device,
                            const Options& options) {
  if (!options.variant) return {};
  WmmaRequest request;
  if (kernel != Kernel::kWmma || !parse_wmma_request(options.variant, &request)) {
    return concat(to_string(kernel), ": variant is ", options.variant, "; accepted: ",
                  kernel == Kernel::kWmma ? accepted_wmma_requests()
                                          : "none, this kernel has one tile shape");
  }
  const int tile = head_dim_tile(kernel, p.dtype, larger_head_dim(p));
  const std::string why = wmma_refusal(p, device, tile, request);
  return why.empty() ? why : concat(to_string(kernel), ": ", why);
}

// Why a plan's kernel would not add up a row's keys right, or not as in other packs; empty if it
// does.
std::string length_refusal(const Plan& plan, const AttentionParams& p, const Options& options) {
  std::int64_t most = std::numeric_limits<std::int64_t>::max();
  if (plan.kernel == Kernel::kWmmaSmem || plan.kernel == Kernel::kSm90) most = tile::kMostKeys;
  if (plan.kernel == Kernel::kWmma) most = wmma_most_keys(p, plan.head_dim_tile, plan.variant);
  const char* with = "";
  if (plan.kernel == Kernel::kWmma && plan.variant == wmma::kGeneral)
    with = " where pairs of out's columns are not aligned to 4 bytes";
  // A sequence alone, of fewer keys, would be another kernel's.
  if (options.batch_invariant && p.cu_seqlens_q && p.seqlen_k > tile::kMostKeys)
    most = tile::kMostKeys, with = " of packs with batch_invariant";
  if (p.seqlen_k <= most) return {};
  const std::string variant =
      plan.kernel == Kernel::kWmma ? concat("variant ", plan.variant_name, ": ") : std::string();
  return concat(to_string(plan.kernel), ": ", variant, "seqlen_k is ", p.seqlen_k, "; accepted",
                with, ": up to ", most);
}

// What a plan asks of the device that it does not have.
std::string launch_refusal(const Plan& plan, const AttentionParams& p, const DeviceInfo& device) {
  const char* kernel = to_string(plan.kernel);
  if (plan.smem_bytes > device.max_smem_per_block) {
    return concat(kernel, ": needs ", plan.smem_bytes, " bytes of shared memory per block; ",
                  device.name, " has ", device.max_smem_per_block);
  }
  const struct {
    const char* name;
    std::int64_t value;
  } lengths[] = {{"seqlen_q", p.seqlen_q}, {"seqlen_k", p.seqlen_k}};
  for (const auto& length : lengths) {
    if (length.value > kMaxSeqlen) {
      return concat(kernel, ": ", length.name, " is ", length.value, "; accepted: up to ",
                    kMaxSeqlen);
    }
  }
  if (plan.grid > kMaxGrid) {
    return concat(kernel, ": needs ", plan.grid, " thread blocks; accepted: up to ", kMaxGrid);
  }
  return {};
}

Plan cpu_plan(const AttentionParams& p, const DeviceInfo& device, const Options& options) {
  Plan plan;
  plan.kernel = Kernel::kCpu;
  plan.dtype = p.dtype;
  cpu::plan(p, device, options, &plan);
  return plan;
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
  Alignment all(size_of(p.dtype));
  const auto add = [&](const void* data, std::int64_t batch_stride, std::int64_t rows,
                       std::int64_t row_stride, std::int64_t heads, std::int64_t head_stride) {
    all.add_address(data);
    all.add_stride(batch, batch_stride);
    all.add_stride(rows, row_stride);
    all.add_stride(heads, head_stride);
  };
  add(p.q, p.q_batch_stride, rows_q, p.q_row_stride, p.num_heads, p.q_head_stride);
  add(p.k, p.k_batch_stride, rows_k, p.k_row_stride, p.num_heads_kv, p.k_head_stride);
  add(p.v, p.v_batch_stride, rows_k, p.v_row_stride, p.num_heads_kv, p.v_head_stride);
  // A row is copied in whole steps, so its length counts as well.
  all.add_length(p.head_dim);
  all.add_length(p.head_dim_v);
  return all.bytes();
}

const char* score_feature(const AttentionParams& p) {
  if (p.softcap != 0.0) return "softcap";
  if (p.bias) return "bias";
  if (p.mask) return "mask";
  return p.alibi_slopes ? "alibi_slopes" : nullptr;
}

namespace {

// The plan of a problem that a CUDA family accepts as `options` ask.
Plan cuda_plan(Kernel kernel, const AttentionParams& p, const DeviceInfo& device,
               const Options& options) {
  Plan plan;
  plan.kernel = kernel;
  plan.dtype = p.dtype;
  plan.head_dim_tile = head_dim_tile(kernel, p.dtype, larger_head_dim(p));
  if (kernel == Kernel::kWmma) {
    WmmaRequest request;
    parse_wmma_request(options.variant, &request);
    const WmmaChoice choice =
        choose_wmma(p, device, plan.head_dim_tile, request, options.batch_invariant);
    plan.variant = choice.variant;
    plan.variant_name = wmma::kVariantNames[choice.variant];
    plan.packed_heads = choice.packed_heads;
  }
  if (kernel == Kernel::kSm90) {
    plan.variant = static_cast<int>(sm90::terms_of(p));
    plan.variant_name = sm90::kTermsNames[plan.variant];
  }
  const TileConfig config = tile_config(kernel, p, plan.head_dim_tile, plan.variant);
  plan.block_m = config.block_m;
  plan.block_n = config.block_n;
  plan.num_warps = config.num_warps;
  plan.num_stages = config.num_stages;
  plan.smem_bytes = config.smem_bytes;
  plan.copy_bytes = copy_bytes(p);
  plan.grid = num_blocks(p, config.block_m, plan.packed_heads);
  if (kernel == Kernel::kWmma)
    plan.grid = wmma_grid(p, device, plan.head_dim_tile, plan.variant, plan.grid);
  if (kernel == Kernel::kSm90) plan.grid = sm90_grid(p, device, plan.head_dim_tile, kMaxGrid);
  return plan;
}

// Why a CUDA family cannot run a problem; empty if it can, and then `plan` is how.
std::string plan_on(Kernel kernel, const AttentionParams& params, const DeviceInfo& device,
                    const Options& options, Plan* plan) {
  std::string why = device_refusal(kernel, device);
  if (why.empty() && kernel == Kernel::kSm90) why = sm90_device_refusal(device);
  if (why.empty()) why = dtype_refusal(kernel, params);
  if (why.empty()) why = head_dim_refusal(kernel, params);
  if (why.empty()) why = feature_refusal(kernel, params);
  if (why.empty() && kernel == Kernel::kSm90) why = sm90_tensor_refusal(params);
  if (why.empty() && kernel == Kernel::kSm90) why = sm90_score_refusal(params);
  if (why.empty()) why = variant_refusal(kernel, params, device, options);
  if (!why.empty()) return why;
  *plan = cuda_plan(kernel, params, device, options);
  why = length_refusal(*plan, params, options);
  return why.empty() ? launch_refusal(*plan, params, device) : why;
}

}  // namespace

bool archs_serve(const std::string& archs, int compute_major, int compute_minor, int least) {
  const int wanted = compute_major * 10 + compute_minor;
  std::istringstream list(archs);
  for (std::string entry; std::getline(list, entry, ';');) {
    const int arch = std::atoi(entry.c_str());
    if (arch == 0 || arch < least) continue;
    const bool real = entry.find("-virtual") == std::string::npos;
    const bool ptx = entry.find("-real") == std::string::npos;
    if (real && arch / 10 == compute_major && arch <= wanted) return true;
    // Architecture-specific targets ("90a") serve their own compute capability only.
    const bool specific = entry.find('a') < entry.find('-');
    if (ptx && arch <= wanted && !specific) return true;
  }
  return false;
}

std::string refusal(Kernel kernel, const AttentionParams& params, const DeviceInfo& device,
                    const Options& options) {
  if (kernel == Kernel::kCpu) {
    const std::string why = cpu_refusal(device);
    return why.empty() ? variant_refusal(kernel, params, device, options) : why;
  }
  Plan plan;
  return plan_on(kernel, params, device, options, &plan);
}

std::vector<std::string> refusals(const AttentionParams& params, const DeviceInfo& device,
                                  const Options& options) {
  std::vector<std::string> reasons;
  const auto serves = [&](Kernel kernel) {
    const std::string why = refusal(kernel, params, device, options);
    if (!why.empty()) reasons.push_back(why);
    return why.empty();
  };
  if (options.kernel != Kernel::kAuto) {
    serves(options.kernel);
    return reasons;
  }
  if (device.type == DeviceType::kCpu) {
    serves(Kernel::kCpu);
    return reasons;
  }
  for (const Kernel kernel : kCudaKernels) {
    if (admits(options, kernel, params, device) && serves(kernel)) return {};
  }
  return reasons;
}

Plan make_plan(const AttentionParams& params, const DeviceInfo& device, const Options& options) {
  if (device.type == DeviceType::kCpu &&
      (options.kernel == Kernel::kAuto || options.kernel == Kernel::kCpu) && !options.variant) {
    return cpu_plan(params, device, options);
  }
  for (const Kernel kernel : kCudaKernels) {
    Plan plan;
    if (admits(options, kernel, params, device) &&
        plan_on(kernel, params, device, options, &plan).empty())
      return plan;
  }
  throw UnsupportedError("no kernel can run this: " + join(refusals(params, device, options)));
}

}  // namespace dlattn::core
