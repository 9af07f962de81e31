#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "torch_functions.h"

// The arguments that torch passes to an operator's kernel.
namespace dlattn::python {

// The kind of an argument on the stack, which the kernel owns.
enum class Kind : std::uint8_t {
  kNumber,  // a bool or int, or a float
  kTensor,
  kTensors,
  kOptionalTensor,
  kOptionalFloat,
  kOptionalText,
};

// Reads an argument written as torch prints its type, and its name: "Optional[Tensor] bias".
constexpr Kind kind_of(std::string_view argument) {
  const std::string_view type = argument.substr(0, argument.find(' '));
  return type == "Tensor"             ? Kind::kTensor
         : type == "List[Tensor]"     ? Kind::kTensors
         : type == "Optional[Tensor]" ? Kind::kOptionalTensor
         : type == "Optional[float]"  ? Kind::kOptionalFloat
         : type == "Optional[str]"    ? Kind::kOptionalText
                                      : Kind::kNumber;
}

// An operator's arguments, in the order of its schema.
struct Signature {
  static constexpr int kMaxArguments = 21;

  std::string_view arguments[kMaxArguments] = {};
  Kind kinds[kMaxArguments] = {};
  int count = 0;

  template <std::size_t kCount>
  constexpr void add(const std::string_view (&more)[kCount]) {
    for (const std::string_view argument : more) {
      arguments[count] = argument;
      kinds[count] = kind_of(argument);
      ++count;
    }
  }
};

// Takes the arguments off a stack and owns them. Needs no GIL.
class Arguments {
 public:
  Arguments(const Signature& signature, const torch_abi::Value* stack);
  ~Arguments();
  Arguments(const Arguments&) = delete;
  Arguments& operator=(const Arguments&) = delete;

  bool given(int i) const { return given_[i]; }  // false: None
  torch_abi::Tensor tensor(int i) const { return reinterpret_cast<torch_abi::Tensor>(values_[i]); }
  std::vector<torch_abi::Tensor> tensors(int i) const;
  std::int64_t integer(int i) const { return static_cast<std::int64_t>(values_[i]); }
  bool flag(int i) const { return (values_[i] & 0xFF) != 0; }
  double number(int i) const;
  std::string text(int i) const;

 private:
  const Signature& signature_;
  torch_abi::Value values_[Signature::kMaxArguments];
  bool given_[Signature::kMaxArguments];
};

}  // namespace dlattn::python
