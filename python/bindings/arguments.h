#pragma once

#include <nanobind/nanobind.h>

#include <array>
#include <cstddef>
#include <iterator>
#include <type_traits>
#include <utility>

#include "problem.h"

// How a list of arguments becomes functions of the Python module. The list itself, kArguments, is
// in problem.cpp beside what reads the tensors.
namespace dlattn::python {

// An argument of attention or attention_varlen.
struct Argument {
  const char* name;
  bool varlen_only;  // of attention_varlen, and not of attention
  // A setting: fills its fields before the device and the tensors are known. `value` may be None.
  void (*read)(nb::handle value, const char* name, Problem* problem);
  // An optional tensor: fills its fields after q, k, v and cu_seqlens. Not called for None.
  void (*read_tensor)(const Tensor& tensor, Problem* problem);
  nb::handle AttentionCall::* member;  // where it also goes if it is read by name
};

constexpr Argument by_name(const char* name, decltype(Argument::member) member) {
  return {name, false, nullptr, nullptr, member};
}

constexpr Argument setting(const char* name, decltype(Argument::read) read,
                           decltype(Argument::member) member = nullptr) {
  return {name, false, read, nullptr, member};
}

constexpr Argument optional_tensor(const char* name, decltype(Argument::read_tensor) read_tensor) {
  return {name, false, nullptr, read_tensor, nullptr};
}

constexpr Argument varlen_only(Argument argument) {
  argument.varlen_only = true;
  return argument;
}

template <const auto& kList>
constexpr std::size_t num_optional_tensors() {
  std::size_t count = 0;
  for (const Argument& argument : kList) count += argument.read_tensor != nullptr;
  return count;
}

template <const auto& kList, bool kVarlen>
constexpr std::size_t num_taken() {
  std::size_t count = 0;
  for (const Argument& argument : kList) count += kVarlen || !argument.varlen_only;
  return count;
}

// The arguments that attention_varlen or attention takes, as indices into the list.
template <const auto& kList, bool kVarlen>
constexpr auto taken() {
  std::array<std::size_t, num_taken<kList, kVarlen>()> indices{};
  std::size_t count = 0;
  for (std::size_t i = 0; i < std::size(kList); ++i) {
    if (kVarlen || !kList[i].varlen_only) indices[count++] = i;
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

template <std::size_t>
using HandleAt = nb::handle;

template <const auto& kList, bool kVarlen, std::size_t... kPositions>
void def_taken(nb::module_& module, const char* name, CallFunction function,
               std::index_sequence<kPositions...>) {
  static constexpr auto kTaken = taken<kList, kVarlen>();
  module.def(
      name,
      [function](HandleAt<kPositions>... values) {
        AttentionCall call;
        ((call.values[kTaken[kPositions]] = values), ...);
        for_each_argument<kList>([&](auto i) {
          if constexpr (kList[i].member != nullptr) call.*kList[i].member = call.values[i];
        });
        return function(call);
      },
      nb::arg(kList[kTaken[kPositions]].name).none()...);
}

// Binds `function` under `name` for the arguments of attention or, if kVarlen, attention_varlen.
template <const auto& kList, bool kVarlen>
void def_with(nb::module_& module, const char* name, CallFunction function) {
  constexpr auto kCount = num_taken<kList, kVarlen>();
  def_taken<kList, kVarlen>(module, name, function, std::make_index_sequence<kCount>());
}

}  // namespace dlattn::python
