// Which code of a build runs on which GPU, and what is said where none does.
#include "core/plan/code.h"

#include <string>

#include "check.h"
#include "devices.h"

using namespace dlattn;

namespace {

void archs() {
  const auto check = [](const char* archs, int major, int minor, int capability,
                        bool specific = false, const char* family_archs = "") {
    const core::Code code = core::code_for(archs, family_archs, major, minor);
    CHECK_EQ(code.capability, capability);
    CHECK_EQ(code.arch_specific, specific);
  };
  const char* release = "80-real;89-real;90-real;120-real;89-virtual";
  check(release, 7, 5, 0);
  check(release, 8, 0, 80);
  check(release, 8, 6, 80);  // machine code for 8.0
  check(release, 8, 9, 89);
  check(release, 9, 0, 90, true, "90a-real");
  check(release, 9, 0, 90);
  check(release, 10, 0, 89, false, "90a-real");  // PTX for 8.9
  check(release, 12, 1, 120);
  check("89-real", 8, 6, 0);  // machine code does not run on older minors
  check("89-real", 9, 0, 0);  // nor on another major
  check("80-real;89-virtual", 9, 0, 89);
  check("89;90-real", 9, 0, 90);
  check("90", 12, 0, 90);
  check("90-real;89-virtual", 12, 0, 89);
  check("89-virtual", 9, 0, 89);
  check("89-virtual", 8, 6, 0);
  check("89", 8, 9, 89);  // without a suffix: both
  check("89", 12, 0, 89);
  check("90a", 9, 0, 90, true);
  check("90a", 10, 0, 0);
  check("90a-virtual", 10, 0, 0);
  check("", 8, 9, 0);
  check("native", 8, 9, 0);
  // The build of a machine without a GPU: code for 9.0 is that of sm90's families alone.
  const char* common = "89-real;80-virtual;89-virtual";
  check(common, 8, 0, 80, false, "90a-real");
  check(common, 8, 6, 80, false, "90a-real");
  check(common, 8, 9, 89, false, "90a-real");
  check(common, 9, 0, 89, true, "90a-real");
  check(common, 12, 0, 89, false, "90a-real");
  check("89-real", 9, 0, 0, true, "90a-real");
}

// PTX is for devices that no machine code runs on.
void ptx() {
  const auto check = [](const char* archs, int major, int minor, int capability, bool ptx) {
    const core::Code code = core::code_for(archs, "90a-real", major, minor);
    CHECK_EQ(code.capability, capability);
    CHECK_EQ(code.ptx, ptx);
  };
  for (const int other : {80, 86, 87, 90, 100, 120})
    check("89-real;80-virtual", other / 10, other % 10, 80, true);
  check("89-real;80-virtual", 8, 9, 89, false);
  check("86-real;80-virtual", 8, 9, 86, false);
  check("80-real;89-virtual", 8, 9, 80, false);
  check("90-real;80-virtual", 9, 0, 90, false);
  check("89-real;80-virtual;89-virtual", 9, 0, 89, true);
  check("80-virtual", 9, 0, 80, true);
  check("89", 8, 9, 89, false);
  check("89", 12, 0, 89, true);
  check("89-real", 9, 0, 0, false);
}

std::string unserved(const char* name, int major, int minor, const char* archs,
                     core::CudaVersions versions = {13000, 13000}) {
  const DeviceInfo device = test::gpu(name, major, minor, 100, 101376);
  return core::unserved(device, core::code_for(archs, "", major, minor), archs, versions);
}

const std::string rebuild =
    "; DLATTN_ARCHS=native pip install . in the source builds for the GPUs of this machine, "
    "DLATTN_ARCHS=all pip install . for all";

void unserved_devices() {
  CHECK(unserved("NVIDIA L4", 8, 9, "89-real;80-virtual").empty());
  CHECK(unserved("NVIDIA A100", 8, 0, "89-real;80-virtual").empty());
  CHECK(unserved("NVIDIA A100", 8, 0, "89-real;89-virtual") ==
        "NVIDIA A100 has compute capability 8.0; this build has kernels for 89-real, 89-virtual" +
            rebuild);
  CHECK(unserved("NVIDIA H200", 9, 0, "89-real") ==
        "NVIDIA H200 has compute capability 9.0; this build has kernels for 89-real" + rebuild);
  CHECK(unserved("Tesla T4", 7, 5, "89-real;80-virtual") ==
        "Tesla T4 has compute capability 7.5; the kernels need 8.0 or later");
}

// A driver compiles the PTX of toolkits up to its own version of CUDA.
void drivers() {
  const auto served = [](int major, int minor, int toolkit, int driver) {
    return unserved("GPU", major, minor, "89-real;80-virtual", {toolkit, driver}).empty();
  };
  CHECK(served(9, 0, 12090, 12090));
  CHECK(served(9, 0, 12090, 13000));
  CHECK(!served(9, 0, 12090, 12080));
  CHECK(served(9, 0, 12060, 12050));  // the same PTX
  CHECK(!served(9, 0, 12060, 12040));
  CHECK(served(8, 9, 12090, 12000));  // machine code
  CHECK(unserved("NVIDIA H200", 9, 0, "89-real;80-virtual", {13010, 13000}) ==
        "NVIDIA H200 has compute capability 9.0; of this build's kernels, for 89-real, "
        "80-virtual, it can run the PTX alone, which CUDA 13.1 wrote; the driver compiles that of "
        "CUDA up to 13.0: update it, or rebuild" +
            rebuild);
}

}  // namespace

int main() {
  archs();
  ptx();
  unserved_devices();
  drivers();
  return test::summary();
}
