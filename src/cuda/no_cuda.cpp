// The CUDA backend of a build without nvcc: same symbols, nothing behind them.
#include "core/backend.h"
#include "core/operations/operation.h"

namespace dlattn::cuda {

namespace {
constexpr char kNoCuda[] =
    "this build of dlattn has no CUDA kernels; rebuild it without DLATTN_CUDA=OFF";
}

bool compiled() {
  return false;
}
const char* toolkit_version() {
  return "";
}
const char* archs() {
  return "";
}
const char* family_archs() {
  return "";
}
const char* archs_reason() {
  return "";
}
int device_count() {
  return 0;
}
std::string device_status() {
  return kNoCuda;
}
const DeviceInfo& device_info(int) {
  throw DeviceError(kNoCuda);
}
int device_of(const void*) {
  throw DeviceError(kNoCuda);
}
void wait_for_stream(int, void*, void*) {
  throw DeviceError(kNoCuda);
}
template <typename Params>
Launcher<Params> find_launcher(std::string_view, DType, int) {
  return nullptr;
}
#define DLATTN_FIND(enumerator, name, Params) \
  template Launcher<Params> find_launcher(std::string_view, DType, int);
DLATTN_OPERATIONS(DLATTN_FIND)
#undef DLATTN_FIND

}  // namespace dlattn::cuda
