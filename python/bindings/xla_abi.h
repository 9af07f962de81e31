#pragma once

#include <cstddef>
#include <cstdint>

// The part of XLA's FFI C API (xla/ffi/api/c_api.h, https://openxla.org/xla/custom_call) that
// crosses this module's boundary, in version 0.1, which every jaxlib since 0.5 accepts. Structs
// grow at their end and begin with their size.
namespace dlattn::python::xla {

constexpr int kMajorVersion = 0;
constexpr int kMinorVersion = 1;

enum ExtensionType : std::int32_t { kMetadataExtension = 1 };

struct Extension {
  std::size_t struct_size;
  std::int32_t type;  // an ExtensionType, or one that XLA added since
  Extension* next;
};

struct ApiVersion {
  std::size_t struct_size;
  Extension* extensions;
  int major_version;
  int minor_version;
};

enum Traits : std::uint32_t { kNoTraits = 0, kCommandBufferCompatible = 1 };

struct Metadata {
  std::size_t struct_size;
  ApiVersion api_version;
  std::uint32_t traits;
};

struct MetadataExtension {
  Extension base;
  Metadata* metadata;
};

enum DataType : std::int32_t {
  kPred = 1,
  kS8 = 2,
  kS16 = 3,
  kS32 = 4,
  kS64 = 5,
  kU8 = 6,
  kU16 = 7,
  kU32 = 8,
  kU64 = 9,
  kF16 = 10,
  kF32 = 11,
  kF64 = 12,
  kC64 = 15,
  kBF16 = 16,
  kC128 = 18,
  kF8E4M3FN = 20,
};

struct Buffer {
  std::size_t struct_size;
  Extension* extensions;
  std::int32_t dtype;  // a DataType, or one that this library has no use for
  void* data;
  std::int64_t rank;
  std::int64_t* dims;  // row-major
};

enum ItemType : std::int32_t { kBuffer = 1, kArray = 1, kDictionary = 2, kScalar = 3, kString = 4 };

struct Items {  // arguments: inputs, results
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;
  void** items;
};

struct ByteSpan {
  const char* begin;
  std::size_t size;
};

struct Scalar {
  std::int32_t dtype;
  void* value;
};

struct Attributes {  // sorted by name
  std::size_t struct_size;
  Extension* extensions;
  std::int64_t size;
  std::int32_t* types;
  ByteSpan** names;
  void** values;
};

enum Stage : std::int32_t { kInstantiate = 0, kPrepare = 1, kInitialize = 2, kExecute = 3 };

enum ErrorCode : std::int32_t { kInvalidArgument = 3, kResourceExhausted = 8, kInternal = 13 };

struct Error;
struct Context;

struct ErrorArguments {
  std::size_t struct_size;
  Extension* extensions;
  const char* message;
  std::int32_t code;
};

struct StreamArguments {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  void* stream;  // out
};

struct OrdinalArguments {
  std::size_t struct_size;
  Extension* extensions;
  Context* context;
  std::int32_t ordinal;  // out
};

struct Api {
  std::size_t struct_size;
  Extension* extensions;
  ApiVersion version;
  const void* internal;
  Error* (*create_error)(ErrorArguments*);
  void (*get_message)(void*);
  void (*destroy_error)(void*);
  Error* (*register_handler)(void*);
  Error* (*get_stream)(StreamArguments*);
  void (*of_no_use_here[12])();
  Error* (*get_ordinal)(OrdinalArguments*);  // as struct_size tells
};

struct CallFrame {
  std::size_t struct_size;
  Extension* extensions;
  const Api* api;
  Context* context;
  std::int32_t stage;
  Items inputs;
  Items results;
  Attributes attributes;
};

using Handler = Error*(CallFrame*);

}  // namespace dlattn::python::xla
