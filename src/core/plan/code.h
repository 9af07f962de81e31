#pragma once

#include <string>

#include "dlattn/device.h"

// Which code of a build runs on a device.
namespace dlattn::core {

constexpr int kMinCapability = 80;  // that the kernels need, as a compute capability times ten

// Finds the machine code and PTX for `archs` (CMAKE_CUDA_ARCHITECTURES, ';'-separated) that runs on
// a compute capability. Machine code for X.Y runs on X.Z with Z >= Y; PTX for X.Y on anything from
// X.Y up, and is taken where no machine code runs; code for X.Ya on X.Y alone.
// `family_archs` are those of families that are for one architecture alone ("90a-real"): code of
// the others is not among them.
struct Code {
  int capability = 0;          // of the newest that runs there, times ten; 0: none does
  bool ptx = false;            // whether that is PTX
  bool arch_specific = false;  // whether there is such for X.Ya
};
Code code_for(const std::string& archs, const std::string& family_archs, int compute_major,
              int compute_minor);

// Versions as CUDA has them: 12040 for 12.4.
struct CudaVersions {
  int toolkit;  // that compiled the build
  int driver;
};
// Why the kernels of a build do not run on a device, with what to do; empty if they do. `code` is
// what code_for() says of the device.
std::string unserved(const DeviceInfo& device, const Code& code, const std::string& archs,
                     CudaVersions versions);

// Whether a device is of a compute capability, times ten, or a later one, and the build has code
// for that which runs there; if not, `why`, unless it is null, says why not.
bool has_code(const DeviceInfo& device, int capability, std::string* why);

}  // namespace dlattn::core
