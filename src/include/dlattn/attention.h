#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dlattn/export.h"
#include "dlattn/params.h"
#include "dlattn/types.h"
#include "dlattn/version.h"

// dlattn: attention with a streaming softmax. Fill an AttentionParams, call forward. All functions
// are thread-safe.
//
// Sources: Milakov, Gimelshein. Online normalizer calculation for softmax. arXiv:1805.02867, 2018;
// Dao. FlashAttention-2. arXiv:2307.08691, 2023. Those of the features stand in the documentation
// of the Python function dlattn.attention.
namespace dlattn {

// What the plan needs to know of a device.
struct DeviceInfo {
  DeviceType type = DeviceType::kCpu;
  int index = 0;
  std::string name;
  // CUDA
  int compute_major = 0;
  int compute_minor = 0;
  int num_sms = 0;
  std::int64_t max_smem_per_block = 0;  // bytes, with opt-in
  std::int64_t smem_per_sm = 0;         // bytes
  std::int64_t l2_bytes = 0;
  std::string unserved;  // why the kernels of this build do not run on it; empty if they do
  // Which code of this build runs on it, as a compute capability times ten: 90 on 9.0, 89 where PTX
  // for 8.9 is translated; 0 for none.
  int code = 0;
  // Whether there is code for this compute capability alone as well, as 90a is.
  bool arch_specific_code = false;
  // CPU
  int num_threads = 0;   // DLATTN_NUM_THREADS, else the cores this process may run on
  const char* isa = "";  // "avx512", "avx2" or "portable"
};

struct Options {
  // One of kernel_names(). "auto" lets the plan choose; any other forces that family, or says why
  // it cannot serve. Not copied: it must live as long as the call.
  std::string_view kernel = "auto";
  // Which tile shape of `kernel`, by name (Plan::variant_name), and whether heads are packed
  // (Plan::packed_heads): "split", "packed", "unpacked", "split+packed". Null: the plan chooses, as
  // it does what is not said.
  const char* variant = nullptr;
  int num_threads = 0;  // CPU only; 0: DeviceInfo::num_threads
  // Plan without regard to batch size, numbers of heads, lengths and packing, as for a large batch:
  // a sequence then gives the same bits alone, in any batch and in any pack on the same device, if
  // its rows are aligned alike. Costs speed where the batch is small, most of all with few queries.
  bool batch_invariant = false;
  Poll poll;  // CPU only
};

// How a problem will be computed. A plain struct: making one costs no allocation.
struct Plan {
  std::string_view kernel;  // the family, "cpu" on the CPU
  DType dtype = DType::kFloat16;
  int head_dim_tile = 0;             // both head dims rounded up to the instance that serves them
  int variant = 0;                   // which tile shape of wmma, or terms of scores of sm90
  const char* variant_name = "";     // its name; may be ""
  int packed_heads = 1;              // query heads of a KV head that are rows of the same tiles
  int block_m = 0;                   // query rows per tile
  int block_n = 0;                   // keys per tile
  int num_warps = 0;                 // per thread block
  int num_stages = 0;                // K/V tiles in flight
  int copy_bytes = 0;                // bytes per global-to-shared copy, by alignment: 16, 8, 4 or 2
  std::int64_t grid = 0;             // thread blocks (CUDA) or tasks (CPU)
  std::int64_t smem_bytes = 0;       // dynamic shared memory per thread block
  int num_splits = 1;                // parts into which the keys are split
  std::int64_t workspace_bytes = 0;  // memory beyond inputs, out and lse
  int num_threads = 0;               // CPU threads
  const char* isa = "";              // CPU instruction set
  double predicted_ns = 0.0;         // what it takes on a GPU, by the family's model; 0: unknown
};

struct Support {
  bool ok = false;
  std::vector<std::string> reasons;  // why not; empty if ok
};

// What this build contains.
struct BuildInfo {
  const char* version = DLATTN_VERSION;
  bool cuda = false;                 // compiled with CUDA kernels
  const char* cuda_version = "";     // of the toolkit that compiled them, "13.0"
  std::vector<std::string> archs;    // machine code and PTX: "80-real", "89-virtual", ...
  std::vector<std::string> kernels;  // families
};

// Number of CUDA devices; 0 where there is no GPU, no driver or no CUDA in this build. Never
// throws.
DLATTN_API int device_count();
// Why device_count() is 0, in words; empty if it is not.
DLATTN_API std::string device_status();
// Asked of the device once and kept. Throws DeviceError if there is no such device.
DLATTN_API const DeviceInfo& device_info(Device device);
DLATTN_API BuildInfo build_info();
// What Options::kernel may be: "auto", "cpu" and the families of kernels, whether this build has
// them or not.
DLATTN_API const std::vector<std::string_view>& kernel_names();

// Whether forward() would run `params` on `device`; never launches, never throws for wrong params.
DLATTN_API Support supported(const AttentionParams& params, const DeviceInfo& device,
                             const Options& options = {});
// The plan that forward() would follow on `device`. Throws UnsupportedError.
DLATTN_API Plan plan(const AttentionParams& params, const DeviceInfo& device,
                     const Options& options = {});
DLATTN_API std::string describe(const Plan& plan);  // one field a line

// Computes attention. On CUDA the work is enqueued on `stream` (a cudaStream_t; null is the legacy
// default stream) and the call returns; on the CPU it is done when the call returns. Allocates no
// device memory and never synchronises. Throws UnsupportedError before anything is launched,
// DeviceError if the launch fails.
DLATTN_API void forward(const AttentionParams& params, void* stream = nullptr,
                        const Options& options = {});

// Merges partial attention results; stream, poll and errors as forward().
DLATTN_API void merge_states(const MergeParams& params, void* stream = nullptr, Poll poll = {});

}  // namespace dlattn
