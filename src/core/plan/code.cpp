#include "core/plan/code.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>

#include "core/plan/family.h"
#include "core/util/concat.h"

namespace dlattn::core {
namespace {

constexpr char kRebuild[] =
    "; DLATTN_ARCHS=native pip install . in the source builds for the GPUs of this machine, "
    "DLATTN_ARCHS=all pip install . for all";

std::string decimal(int capability) {
  return concat(capability / 10, ".", capability % 10);
}
std::string cuda(int version) {
  return concat(version / 1000, ".", version % 1000 / 10);
}

std::string separated(const std::string& archs) {
  std::string text;
  for (const char c : archs) text += c == ';' ? std::string(", ") : std::string(1, c);
  return text;
}

// Whether a driver compiles what a toolkit writes: its PTX is not newer. 12.6 writes that of 12.5.
bool compiles_ptx(CudaVersions versions) {
  const int toolkit = versions.toolkit / 10 * 10;
  return versions.driver >= (toolkit == 12060 ? 12050 : toolkit);
}

}  // namespace

Code code_for(const std::string& archs, const std::string& family_archs, int compute_major,
              int compute_minor) {
  const int wanted = compute_major * 10 + compute_minor;
  if (!family_archs.empty()) {
    Code code = code_for(archs, {}, compute_major, compute_minor);
    code.arch_specific |= code_for(family_archs, {}, compute_major, compute_minor).arch_specific;
    return code;
  }
  int machine_code = 0, ptx_code = 0;
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
    const bool real_runs = real && arch / 10 == compute_major;
    if (!real_runs && !ptx) continue;
    if (real_runs) machine_code = std::max(machine_code, arch);
    if (ptx) ptx_code = std::max(ptx_code, arch);
    code.arch_specific |= specific;
  }
  code.ptx = machine_code == 0 && ptx_code > 0;
  code.capability = code.ptx ? ptx_code : machine_code;
  return code;
}

std::string unserved(const DeviceInfo& device, const Code& code, const std::string& archs,
                     CudaVersions versions) {
  const int capability = 10 * device.compute_major + device.compute_minor;
  const std::string has =
      concat(device.name, " has compute capability ", decimal(capability), "; ");
  if (capability < kMinCapability)
    return concat(has, "the kernels need ", decimal(kMinCapability), " or later");
  if (code.capability == 0)
    return concat(has, "this build has kernels for ", separated(archs), kRebuild);
  if (!code.ptx || compiles_ptx(versions)) return {};
  return concat(has, "of this build's kernels, for ", separated(archs),
                ", it can run the PTX alone, which CUDA ", cuda(versions.toolkit),
                " wrote; the driver compiles that of CUDA up to ", cuda(versions.driver),
                ": update it, or rebuild", kRebuild);
}

bool has_code(const DeviceInfo& device, int capability, std::string* why) {
  const int own = 10 * device.compute_major + device.compute_minor;
  if (own < capability) {
    return refuse(why, "needs compute capability ", decimal(capability), " or later; ", device.name,
                  " has ", decimal(own));
  }
  if (device.code >= capability) return true;
  return refuse(why, "needs code for compute capability ", decimal(capability),
                " or later; this build has for ", device.name, " that for ", decimal(device.code),
                ": build with DLATTN_ARCHS=native or all");
}

}  // namespace dlattn::core
