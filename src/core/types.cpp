#include "dlattn/types.h"

#include "core/operations/operations.h"

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
    case DType::kFloat8E4M3:
      return "float8_e4m3fn";
    case DType::kInt8:
      return "int8";
  }
  return "unknown";
}

const char* to_string(DeviceType type) {
  return type == DeviceType::kCuda ? "cuda" : type == DeviceType::kCpu ? "cpu" : "unknown";
}

const char* to_string(Operation operation) {
  switch (operation) {
#define DLATTN_NAME(enumerator, name, Params) \
  case Operation::enumerator:                 \
    return #name;
    DLATTN_OPERATIONS(DLATTN_NAME)
#undef DLATTN_NAME
  }
  return "unknown";
}

const char* to_string(Precision precision) {
  return precision == Precision::kInputs     ? "inputs"
         : precision == Precision::kInt8Fp8  ? "int8_fp8"
         : precision == Precision::kFp8      ? "fp8"
         : precision == Precision::kInt8Fp16 ? "int8_fp16"
                                             : "unknown";
}

std::int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat8E4M3:
    case DType::kInt8:
      return 1;
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
