#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "core/operations/operand.h"
#include "problem.h"

// How a list of arguments becomes functions of the Python module. The list itself, kArguments, is
// in problem.cpp beside what reads the tensors.
namespace dlattn::python {

// The functions that take an argument, as bits.
using Functions = unsigned;
constexpr Functions bit(Function function) {
  return 1u << static_cast<int>(function);
}
constexpr Functions kVarlen = bit(Function::kVarlen), kKvcache = bit(Function::kKvcache);
constexpr Functions kNotKvcache = bit(Function::kAttention) | kVarlen;
constexpr Functions kAll = kNotKvcache | kKvcache;
static_assert(kNotKvcache == core::kInBoth && kKvcache == core::kInKvcache);

// An argument of attention, attention_varlen or attention_with_kvcache.
struct Argument {
  const char* name;
  Functions functions;
  // A setting: fills its fields before the device and the tensors are known. `value` may be None.
  void (*read)(nb::handle value, const char* name, Problem* problem);
  // An optional tensor: fills its fields after q, k, v and cu_seqlens. Not called for None.
  void (*read_tensor)(const Tensor& tensor, Problem* problem);
  nb::handle AttentionCall::* member;      // where it also goes if it is read by name
  const core::Operand* operand = nullptr;  // an optional tensor that its row of the table describes

  constexpr bool is_optional_tensor() const { return read_tensor || operand; }
};

constexpr Argument by_name(const char* name, decltype(Argument::member) member) {
  return {name, kAll, nullptr, nullptr, member};
}

constexpr Argument setting(const char* name, decltype(Argument::read) read,
                           decltype(Argument::member) member = nullptr) {
  return {name, kAll, read, nullptr, member};
}

constexpr Argument optional_tensor(const char* name, decltype(Argument::read_tensor) read_tensor,
                                   decltype(Argument::member) member = nullptr) {
  return {name, kAll, nullptr, read_tensor, member};
}

constexpr Argument of(Functions functions, Argument argument) {
  argument.functions = functions;
  return argument;
}

// The optional tensors of a table, which its rows describe, between two lists.
template <const auto& kTable>
constexpr std::size_t num_described() {
  std::size_t count = 0;
  for (const core::Operand& operand : kTable) count += operand.has(kAll);
  return count;
}
template <const auto& kTable, std::size_t kBefore, std::size_t kBehind>
constexpr auto with_optional_tensors(const Argument (&before)[kBefore],
                                     const Argument (&behind)[kBehind]) {
  std::array<Argument, kBefore + num_described<kTable>() + kBehind> list{};
  std::size_t count = 0;
  for (const Argument& argument : before) list[count++] = argument;
  for (const core::Operand& operand : kTable) {
    if (!operand.has(kAll)) continue;
    list[count++] = {operand.name, operand.traits & kAll, nullptr, nullptr, nullptr, &operand};
  }
  for (const Argument& argument : behind) list[count++] = argument;
  return list;
}

template <const auto& kList>
constexpr std::size_t num_optional_tensors(Function function) {
  std::size_t count = 0;
  for (const Argument& argument : kList)
    count += argument.is_optional_tensor() && (argument.functions & bit(function));
  return count;
}

template <const auto& kList, Function kFunction>
constexpr std::size_t num_taken() {
  std::size_t count = 0;
  for (const Argument& argument : kList) count += (argument.functions & bit(kFunction)) != 0;
  return count;
}

// The arguments that a function takes, as indices into the list.
template <const auto& kList, Function kFunction>
constexpr auto taken() {
  std::array<std::size_t, num_taken<kList, kFunction>()> indices{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < std::size(kList); ++i) {
    if (kList[i].functions & bit(kFunction)) indices[count++] = i;
  }
  return indices;
}

// Calls `visit(std::integral_constant<std::size_t, i>)` for each argument of the list, unrolled: an
// eager call takes some two microseconds, in which a loop over the list shows.
template <typename Visit, std::size_t... kIndices>
void for_each_index(const Visit& visit, std::index_sequence<kIndices...>) {
  (visit(std::integral_constant<std::size_t, kIndices>()), ...);
}
template <const auto& kList, typename Visit>
void for_each_argument(const Visit& visit) {
  for_each_index(visit, std::make_index_sequence<std::size(kList)>());
}

// Sets what is read by name, from the values.
template <const auto& kList, Function kFunction>
void set_members(AttentionCall* call) {
  for_each_argument<kList>([&](auto i) {
    constexpr Argument kArgument = kList[i];
    if constexpr (kArgument.member != nullptr && (kArgument.functions & bit(kFunction)) != 0)
      call->*kArgument.member = call->values[i];
  });
}

// Leaves every argument that kFunction takes at its default: a setting is not read then.
template <const auto& kList, Function kFunction>
void set_defaults(AttentionCall* call) {
  call->function = kFunction;
  for_each_argument<kList>([&](auto i) {
    constexpr Argument kArgument = kList[i];
    constexpr bool kIsSetting = kArgument.read != nullptr && kArgument.member == nullptr;
    if constexpr (!kIsSetting && (kArgument.functions & bit(kFunction)) != 0)
      call->values[i] = nb::handle(Py_None);
  });
}

template <std::size_t>
using HandleAt = nb::handle;

template <const auto& kList, Function kFunction, std::size_t... kPositions>
void def_taken(nb::module_& module, const char* name, CallFunction function,
               std::index_sequence<kPositions...>) {
  static constexpr auto kTaken = taken<kList, kFunction>();
  module.def(
      name,
      [function](HandleAt<kPositions>... values) {
        AttentionCall call;
        call.function = kFunction;
        ((call.values[kTaken[kPositions]] = values), ...);
        set_members<kList, kFunction>(&call);
        return function(call);
      },
      nb::arg(kList[kTaken[kPositions]].name).none()...);
}

// Binds `function` under `name` for the arguments of kFunction.
template <const auto& kList, Function kFunction>
void def_with(nb::module_& module, const char* name, CallFunction function) {
  constexpr auto kCount = num_taken<kList, kFunction>();
  def_taken<kList, kFunction>(module, name, function, std::make_index_sequence<kCount>());
}

// Fills in the arguments of a dict.
using SetOptions = void (*)(const nb::dict& options, AttentionCall* call);

template <const auto& kList, Function kFunction, SetOptions set_options, std::size_t... kPositions>
void def_required(nb::module_& module, const char* name, CallFunction function,
                  std::index_sequence<kPositions...>) {
  static constexpr auto kTaken = taken<kList, kFunction>();
  module.def(
      name,
      [function](HandleAt<kPositions>... values, const nb::dict& options) {
        AttentionCall call;
        set_defaults<kList, kFunction>(&call);
        ((call.values[kTaken[kPositions]] = values), ...);
        set_options(options, &call);
        set_members<kList, kFunction>(&call);
        return function(call);
      },
      nb::arg(kList[kTaken[kPositions]].name).none()..., nb::arg("options"));
}

// The same with a dict of all arguments behind the first `kCount`. Those that it does not name have
// their defaults.
template <const auto& kList, Function kFunction, std::size_t kCount, SetOptions set_options>
void def_with_options(nb::module_& module, const char* name, CallFunction function) {
  def_required<kList, kFunction, set_options>(module, name, function,
                                              std::make_index_sequence<kCount>());
}

}  // namespace dlattn::python
