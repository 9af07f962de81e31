#include "torch_arguments.h"

#include <cstring>

#include "errors.h"

namespace dlattn::python {
namespace {

using torch_abi::Value;

void delete_value(Value* value) {
  if (torch_functions.delete_value) {
    torch_functions.delete_value(value);
  } else {
    delete value;
  }
}

std::size_t size_of(torch_abi::List list) {
  std::size_t size = 0;
  return torch_functions.get_size(list, &size) ? 0 : size;
}

torch_abi::Tensor item_of(torch_abi::List list, std::size_t index) {
  Value item = 0;
  return torch_functions.get_item(list, index, &item) ? nullptr
                                                      : reinterpret_cast<torch_abi::Tensor>(item);
}

torch_abi::List list_of(Value value) {
  return reinterpret_cast<torch_abi::List>(value);
}

void delete_owned(Kind kind, Value value) {
  switch (kind) {
    case Kind::kNumber:
    case Kind::kOptionalInt:
    case Kind::kOptionalFloat:
      return;
    case Kind::kTensor:
    case Kind::kOptionalTensor:
      torch_functions.delete_tensor(reinterpret_cast<torch_abi::Tensor>(value));
      return;
    case Kind::kBools:
      torch_functions.delete_list(list_of(value));
      return;
    case Kind::kTensors:
      for (std::size_t i = size_of(list_of(value)); i-- > 0;)
        torch_functions.delete_tensor(item_of(list_of(value), i));
      torch_functions.delete_list(list_of(value));
      return;
    case Kind::kOptionalText:
      torch_functions.delete_string(reinterpret_cast<torch_abi::String>(value));
      return;
  }
}

}  // namespace

bool same_arguments(const Signature& signature, nb::handle schema) {
  if (nb::len(schema) != static_cast<std::size_t>(signature.count)) return false;
  for (int i = 0; i < signature.count; ++i) {
    const Signature::Argument& argument = signature.arguments[i];
    if (text(nb::object(schema[i])) != concat(argument.type, " ", argument.name)) return false;
  }
  return true;
}

Arguments::Arguments(const Signature& signature, const Value* stack) : signature_(signature) {
  for (int i = 0; i < signature.count; ++i) {
    values_[i] = on_stack_[i] = stack[i];
    given_[i] = true;
    if (!is_optional(signature.arguments[i].kind)) continue;
    auto* const optional = reinterpret_cast<Value*>(stack[i]);
    given_[i] = optional;
    if (!optional) continue;
    values_[i] = *optional;
  }
}

Arguments::~Arguments() {
  if (given_back_) return;
  for (int i = 0; i < signature_.count; ++i) {
    const Kind kind = signature_.arguments[i].kind;
    if (given_[i]) delete_owned(kind, values_[i]);
    if (given_[i] && is_optional(kind)) delete_value(reinterpret_cast<Value*>(on_stack_[i]));
  }
}

std::vector<torch_abi::Tensor> Arguments::tensors(int i) const {
  std::vector<torch_abi::Tensor> tensors(size_of(list_of(values_[i])));
  for (std::size_t n = 0; n < tensors.size(); ++n) tensors[n] = item_of(list_of(values_[i]), n);
  return tensors;
}

void Arguments::flags(int i, bool* flags, std::size_t count) const {
  const torch_abi::List list = list_of(values_[i]);
  if (size_of(list) != count) unsupported("a list of flags has another length");
  for (std::size_t n = 0; n < count; ++n) {
    Value item = 0;
    check_torch_error(torch_functions.get_item(list, n, &item), "reading a list");
    flags[n] = (item & 0xFF) != 0;
  }
}

double Arguments::number(int i) const {
  double number;
  std::memcpy(&number, &values_[i], sizeof number);
  return number;
}

std::string Arguments::text(int i) const {
  const auto string = reinterpret_cast<torch_abi::String>(values_[i]);
  std::size_t length = 0;
  const char* characters = nullptr;
  check_torch_error(torch_functions.get_length(string, &length) ||
                        torch_functions.get_characters(string, &characters),
                    "reading a text");
  return {characters, length};
}

}  // namespace dlattn::python
