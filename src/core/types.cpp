#include "dlattn/types.h"

namespace dlattn {

Error::~Error() = default;
UnsupportedError::~UnsupportedError() = default;
DeviceError::~DeviceError() = default;

const char* to_string(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return "float16";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat32:
      return "float32";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

const char* to_string(DeviceType type) {
  return type == DeviceType::kCuda ? "cuda" : "cpu";
}

const char* to_string(Kernel kernel) {
  switch (kernel) {
    case Kernel::kAuto:
      return "auto";
    case Kernel::kCpu:
      return "cpu";
    case Kernel::kScalar:
      return "scalar";
    case Kernel::kWmmaQk:
      return "wmma_qk";
    case Kernel::kWmmaSmem:
      return "wmma_smem";
    case Kernel::kWmma:
      return "wmma";
    case Kernel::kSm90:
      return "sm90";
  }
  return "unknown";
}

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
    case DType::kBFloat16:
      return 2;
    case DType::kFloat32:
      return 4;
    case DType::kFloat64:
      return 8;
  }
  return 0;
}

}  // namespace dlattn
