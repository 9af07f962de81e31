#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_functions.h"

// The arguments that torch passes to an operator's kernel.
namespace dlattn::python {

namespace nb = nanobind;

// The kind of an argument on the stack, which the kernel owns.
enum class Kind : std::uint8_t {
  kNumber,  // a bool or int, or a float
  kTensor,
  kTensors,
  kBools,
  kOptionalTensor,
  kOptionalInt,
  kOptionalFloat,
  kOptionalText,
};

// The kind of an argument whose type torch prints so.
constexpr Kind kind_of(std::string_view type) {
  return type == "Tensor"             ? Kind::kTensor
         : type == "List[Tensor]"     ? Kind::kTensors
         : type == "List[bool]"       ? Kind::kBools
         : type == "Optional[Tensor]" ? Kind::kOptionalTensor
         : type == "Optional[int]"    ? Kind::kOptionalInt
         : type == "Optional[float]"  ? Kind::kOptionalFloat
         : type == "Optional[str]"    ? Kind::kOptionalText
                                      : Kind::kNumber;
}

constexpr bool is_optional(Kind kind) {
  return kind >= Kind::kOptionalTensor;
}

// An operator's arguments, in the order of its schema.
struct Signature {
  static constexpr int kMaxArguments = 32;

  struct Argument {
    std::string_view type;
    const char* name = "";
    Kind kind = Kind::kNumber;

    constexpr bool is_tensor() const {
      return kind == Kind::kTensor || kind == Kind::kOptionalTensor;
    }
  };
  Argument arguments[kMaxArguments] = {};
  int count = 0;

  constexpr void add(std::string_view type, const char* name) {
    arguments[count++] = {type, name, kind_of(type)};
  }
  // Where the argument stands; -1: the operator has none of that name.
  constexpr int index(std::string_view name) const {
    for (int i = 0; i < count; ++i) {
      if (name == arguments[i].name) return i;
    }
    return -1;
  }
};

// Whether they are those of a schema: a tuple of texts, as in "Optional[Tensor] bias".
bool same_arguments(const Signature& signature, nb::handle schema);

// Takes the arguments off a stack and owns them. Needs no GIL.
class Arguments {
 public:
  Arguments(const Signature& signature, const torch_abi::Value* stack);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  // Leaves the arguments to what takes them off the same stack next.
  void give_back() { given_back_ = true; }

  bool given(int i) const { return given_[i]; }  // false: None
  torch_abi::Tensor tensor(int i) const { return reinterpret_cast<torch_abi::Tensor>(values_[i]); }
  std::vector<torch_abi::Tensor> tensors(int i) const;
  std::int64_t integer(int i) const { return static_cast<std::int64_t>(values_[i]); }
  bool flag(int i) const { return (values_[i] & 0xFF) != 0; }
  double number(int i) const;
  std::string text(int i) const;
  void flags(int i, bool* flags, std::size_t count) const;  // of a list of bools

 private:
  const Signature& signature_;
  torch_abi::Value on_stack_[Signature::kMaxArguments];
  torch_abi::Value values_[Signature::kMaxArguments];  // what is optional is not its address
  bool given_[Signature::kMaxArguments];
  bool given_back_ = false;
};

}  // namespace dlattn::python
