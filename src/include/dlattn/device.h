#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "dlattn/export.h"
#include "dlattn/types.h"
#include "dlattn/version.h"

// The devices of this machine, and what this build has for them.
namespace dlattn {

// The properties of a device that a plan needs.
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
  bool ptx = false;  // whether that is PTX, which the driver compiles when it is first loaded
  // Whether there is code for this compute capability alone as well, as 90a is.
  bool arch_specific_code = false;
  // CPU
  // DLATTN_NUM_THREADS, else OMP_NUM_THREADS, else the cores this process may run on.
  int num_threads = 0;
  const char* isa = "";  // "avx512", "avx2" or "portable"; empty: what this processor has
};

// Number of CUDA devices; 0 where there is no GPU, no driver or no CUDA in this build. Never
// throws.
DLATTN_API int device_count();
// Why device_count() is 0, in words; empty if it is not.
DLATTN_API std::string device_status();
// Asked of the device once and kept. Throws DeviceError if there is no such device.
DLATTN_API const DeviceInfo& device_info(Device device);
// The index of the CUDA device that `pointer` is memory of; -1 if it is none's. Null: that of the
// calling thread's current device. 0 where there is no device, which device_info then says.
DLATTN_API int cuda_device_of(const void* pointer);
// Makes what is enqueued on `stream` from now on start after what is on the stream `earlier` now.
// Both are CUDA streams of `device`. Returns at once.
DLATTN_API void wait_for_stream(Device device, void* stream, void* earlier);

// The contents of this build.
struct BuildInfo {
  const char* version = DLATTN_VERSION;
  bool cuda = false;                 // compiled with CUDA kernels
  const char* cuda_version = "";     // of the toolkit that compiled them, "13.0"
  std::vector<std::string> archs;    // machine code and PTX: "80-real", "89-virtual", ...
  const char* archs_reason = "";     // why those: "GPU found: 8.9", "DLATTN_ARCHS=all", ...
  std::vector<std::string> kernels;  // families
  // Families that it lacks, as it has no code for the compute capability that they are for. Empty
  // without CUDA.
  std::vector<std::string> missing_kernels;
};

DLATTN_API BuildInfo build_info();
// The values of Options::kernel: "auto", "cpu" and the families of kernels, whether this build has
// them or not.
DLATTN_API const std::vector<std::string_view>& kernel_names();

// The values of Options::kernel for backward(), whether this build has the families or not.
DLATTN_API const std::vector<std::string_view>& backward_kernel_names();

}  // namespace dlattn
