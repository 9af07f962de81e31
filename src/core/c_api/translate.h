#pragma once

#include <algorithm>
#include <cstring>
#include <new>
#include <string_view>

#include "core/operations/operand.h"
#include "core/validate/fail.h"
#include "dlattn/attention.h"
#include "dlattn/c.h"

// The structs of dlattn/c.h, of any version, in terms of the C++ API's, and exceptions as codes and
// words: what the functions of every operation share.
namespace dlattn::c_api {

using core::fail;

// Cuts off what does not fit; `to` may be null.
void copy_text(std::string_view text, char* to, std::size_t bytes);

// Keeps the words of this thread's last failing call; returns `code`.
std::int32_t failed(std::int32_t code, const char* what);

struct Cancelled {};

template <typename F>
std::int32_t guarded(F&& f) noexcept {
  try {
    f();
    return DLATTN_OK;
  } catch (const UnsupportedError& error) {
    return failed(DLATTN_UNSUPPORTED, error.what());
  } catch (const DeviceError& error) {
    return failed(DLATTN_DEVICE_ERROR, error.what());
  } catch (const Cancelled&) {
    return failed(DLATTN_CANCELLED, "poll ended the call");
  } catch (const std::bad_alloc&) {
    return failed(DLATTN_OUT_OF_MEMORY, "out of memory on the host");
  } catch (const std::exception& error) {
    return failed(DLATTN_INTERNAL_ERROR, error.what());
  } catch (...) {
    return failed(DLATTN_INTERNAL_ERROR, "an exception of a type that dlattn does not know");
  }
}

// The bytes that a struct had in the version that introduced it: up to its last field of then.
template <typename Struct>
constexpr std::size_t kFirstSize = sizeof(Struct);

// More than any version of a struct will have. A struct_size that nobody has set would make the
// library read or write as much memory.
constexpr std::size_t kMostSize = 1 << 16;

template <typename Struct>
void check_struct(const char* name, const Struct* given) {
  if (!given) fail(name, " is null");
  if (given->struct_size > kMostSize) {
    fail(name, ": struct_size is ", given->struct_size, "; accepted: ", kFirstSize<Struct>, " to ",
         kMostSize);
  }
  if (given->struct_size < kFirstSize<Struct>) {
    fail(name, ": struct_size is ", given->struct_size, "; accepted: at least ", kFirstSize<Struct>,
         ", its sizeof");
  }
}

// A struct of an older version gets zeros for what it lacks. One of a newer version may bring
// zeros, which mean that it asks for nothing that this version lacks.
template <typename Struct>
Struct taken(const char* name, const Struct* given) {
  check_struct(name, given);
  const char* const bytes = reinterpret_cast<const char*>(given);
  for (std::size_t i = sizeof(Struct); i < given->struct_size; ++i) {
    if (bytes[i] == 0) continue;
    fail(name, ": struct_size is ", given->struct_size, " and byte ", i,
         " is not 0; accepted: zeros after the ", sizeof(Struct), " bytes that dlattn ",
         DLATTN_VERSION, " knows");
  }
  Struct own = {};
  std::memcpy(&own, given, std::min(given->struct_size, sizeof(Struct)));
  return own;
}

// Writes `own` to a struct of any version; what this one does not know becomes 0.
template <typename Struct>
void give(Struct own, Struct* to) {
  own.struct_size = to->struct_size;
  const std::size_t known = std::min(to->struct_size, sizeof(Struct));
  std::memcpy(to, &own, known);
  std::memset(reinterpret_cast<char*>(to) + known, 0, to->struct_size - known);
}

template <typename Enum>
Enum checked_enum(const char* name, const char* field, std::int32_t value, int last,
                  const char* accepted) {
  if (value < 0 || value > last) {
    fail(name, field, " is ", value, "; accepted: 0 to ", last, " (", accepted, ")");
  }
  return static_cast<Enum>(value);
}

inline bool flag(const char* name, std::int32_t value) {
  if (value != 0 && value != 1) fail(name, " is ", value, "; accepted: 0 or 1");
  return value == 1;
}

inline Device device_of(std::int32_t type, std::int32_t index) {
  return {checked_enum<DeviceType>("device_type", "", type, DLATTN_CUDA, "DLATTN_CPU, DLATTN_CUDA"),
          index};
}

inline Precision precision_of(std::int32_t precision) {
  return checked_enum<Precision>("precision", "", precision, DLATTN_INT8_FP16,
                                 "DLATTN_INPUTS, DLATTN_INT8_FP8, DLATTN_FP8, "
                                 "DLATTN_INT8_FP16");
}

// Takes a DlattnTensor into the view at `field`.
inline void take_tensor(const core::Operand& operand, const DlattnTensor& tensor, char* field) {
  if (tensor.reserved != 0) fail(operand.name, ": reserved is ", tensor.reserved, "; accepted: 0");
  TensorView view;
  view.data = tensor.data;
  view.batch_stride = tensor.batch_stride;
  view.row_stride = tensor.row_stride;
  view.head_stride = tensor.head_stride;
  if (operand.has_columns()) view.col_stride = tensor.col_stride;
  const bool is_cached = operand.elements == core::Elements::kCached;
  if (is_cached || operand.elements == core::Elements::kAny) {
    if (tensor.dtype < 0 || tensor.dtype > (is_cached ? DLATTN_INT8 : DLATTN_FLOAT8_E4M3)) {
      fail(operand.name, ": dtype is ", tensor.dtype, "; accepted: 0 to ", DLATTN_FLOAT8_E4M3,
           " (DLATTN_FLOAT16, DLATTN_BFLOAT16, DLATTN_FLOAT32, DLATTN_FLOAT64, "
           "DLATTN_FLOAT8_E4M3)",
           is_cached ? core::concat(" or ", DLATTN_INT8, " (DLATTN_INT8)") : "");
    }
    view.dtype = static_cast<DType>(tensor.dtype);
  }
  std::memcpy(field, &view, sizeof view);
}

// Takes what the table of the operation says that both structs have.
template <typename Struct, typename Params>
void take_fields(const core::Operands& table, const Struct& given, Params* params) {
  for (const core::Operand* operand = table.sizes; operand < table.end; ++operand) {
    if (operand->c_offset == 0) continue;
    const char* const from = reinterpret_cast<const char*>(&given) + operand->c_offset;
    char* const to = reinterpret_cast<char*>(params) + operand->offset;
    if (operand->kind == core::Kind::kTensor) {
      take_tensor(*operand, core::load<DlattnTensor>(from, 0), to);
    } else {
      std::memcpy(to, from, 8);  // a size, or a pointer
    }
  }
}

// Page tables are a pointer and a stride.
template <typename Struct, typename Params>
void take_page_table(const Struct& given, Params* p) {
  p->page_table.data = given.page_table;
  p->page_table.batch_stride = given.page_table_batch_stride;
}

// The parameters that append_and_attend() reads too; defined in c_api.cpp.
AttentionParams params_of(const DlattnAttention* given);

// The caller's options, and what those of C++ point to.
struct TakenOptions {
  DlattnOptions own = {};
  Options options;

  explicit TakenOptions(const DlattnOptions* given) {
    if (!given) return;
    own = taken("DlattnOptions", given);
    if (own.kernel) options.kernel = own.kernel;
    options.variant = own.variant;
    if (own.num_threads < 0)
      fail("num_threads is ", own.num_threads, "; accepted: at least 0, which is all");
    options.num_threads = own.num_threads;
    options.batch_invariant = flag("batch_invariant", own.batch_invariant);
    if (own.reserved != 0) fail("reserved is ", own.reserved, "; accepted: 0");
    options.num_splits = own.num_splits;
    options.split_size = own.split_size;
    if (own.poll) options.poll = {poll, &own};
    options.workspace = {own.allocate, own.allocate_context};
  }
  TakenOptions(const TakenOptions&) = delete;

  static void poll(void* context) {
    const auto& own = *static_cast<const DlattnOptions*>(context);
    if (own.poll(own.poll_context) != 0) throw Cancelled();
  }
};

// Calls f(options), with the caller's.
template <typename F>
std::int32_t guarded(const DlattnOptions* given, F&& f) noexcept {
  return guarded([&] {
    const TakenOptions taken(given);
    f(taken.options);
  });
}

}  // namespace dlattn::c_api
