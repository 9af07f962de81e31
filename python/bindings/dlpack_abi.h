#pragma once

#include <cstdint>

// The part of DLPack's published ABI (version 1, https://dmlc.github.io/dlpack/latest/c_api.html)
// that crosses this module's boundary: tensors inside capsules, and the C exchange API that a
// tensor type may offer as type(x).__dlpack_c_exchange_api__. Layouts are fixed by DLPack's major
// version.
namespace dlattn::python::dlpack {

constexpr std::uint32_t kMajorVersion = 1;
constexpr std::uint32_t kMinorVersion = 1;  // the max_version passed to __dlpack__

struct Version {
  std::uint32_t major;
  std::uint32_t minor;
};

enum DeviceCode : std::int32_t {
  kCpu = 1,
  kCuda = 2,
  kCudaHost = 3,
  kOpenCl = 4,
  kVulkan = 7,
  kMetal = 8,
  kVpi = 9,
  kRocm = 10,
  kRocmHost = 11,
  kExtDev = 12,
  kCudaManaged = 13,
  kOneApi = 14,
  kWebGpu = 15,
  kHexagon = 16,
  kMaia = 17,
  kTrainium = 18,
};

struct DLDevice {
  std::int32_t type;  // a DeviceCode, or one that DLPack added since
  std::int32_t id;
};

enum TypeCode : std::uint8_t {
  kInt = 0,
  kUInt = 1,
  kFloat = 2,
  kBfloat = 4,
  kComplex = 5,
  kBool = 6,
  kFloat8E3m4 = 7,  // the first of eleven types of 8, 6 and 4 bits
  kFloat8E4m3fn = 10,
};

struct DLDataType {
  std::uint8_t code;  // a TypeCode, or one that this library has no use for
  std::uint8_t bits;
  std::uint16_t lanes;
};

struct DLTensor {
  void* data;
  DLDevice device;
  std::int32_t ndim;
  DLDataType dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null in old exports of a contiguous tensor
  std::uint64_t byte_offset;
};

struct ManagedTensor {  // in a capsule named "dltensor"
  DLTensor tensor;
  void* context;
  void (*deleter)(ManagedTensor*);
};

constexpr std::uint64_t kFlagReadOnly = 1;
constexpr std::uint64_t kFlagIsCopied = 2;  // of what was exported, in memory of its own

struct ManagedTensorVersioned {  // in a capsule named "dltensor_versioned"
  Version version;
  void* context;
  void (*deleter)(ManagedTensorVersioned*);
  std::uint64_t flags;
  DLTensor tensor;
};

struct ExchangeApiHeader {
  Version version;
  ExchangeApiHeader* previous;
};

// In a capsule named "dlpack_exchange_api". Functions return 0, or -1 with a Python exception set.
struct ExchangeApi {
  ExchangeApiHeader header;
  int (*allocate)(DLTensor* prototype, ManagedTensorVersioned** out, void* error_context,
                  void (*set_error)(void* error_context, const char* kind, const char* message));
  int (*export_managed)(void* object, ManagedTensorVersioned** out);
  int (*import_managed)(ManagedTensorVersioned* tensor, void** object);  // steals `tensor`
  int (*export_borrowed)(void* object, DLTensor* out);                   // may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device_id, void** stream);
};

}  // namespace dlattn::python::dlpack
