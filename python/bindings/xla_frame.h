#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "problem.h"
#include "xla_abi.h"

// Calls of attention as XLA's handlers get them. XLA calls those on its own threads, without the
// GIL: nothing here touches Python.
namespace dlattn::python {

// The attributes of a call, which attributes_of() made.
class XlaAttributes {
 public:
  explicit XlaAttributes(const xla::Attributes& given) : given_(given) {}

  std::int64_t integer(const char* name) const;
  // Takes the numbers from 0 to `last`.
  std::int64_t integer(const char* name, std::int64_t last) const;
  template <typename Enum>
  Enum enumerator(const char* name, Enum last) const {
    return static_cast<Enum>(integer(name, static_cast<std::int64_t>(last)));
  }
  bool flag(const char* name) const { return integer(name, 1) != 0; }
  double number(const char* name) const;
  std::string text(const char* name) const;

 private:
  const void* find(std::string_view name, std::int32_t type) const;
  template <typename T>
  T scalar(const char* name, std::int32_t dtype) const;

  const xla::Attributes& given_;
};

// The names in a text, which spaces separate.
std::vector<std::string> names_in(const std::string& text);

// One call: its settings and inputs are taken in, and its results as they are asked for.
class XlaCall {
 public:
  XlaCall(const xla::CallFrame& frame, DeviceType type);
  XlaCall(const XlaCall&) = delete;  // `problem` points to what it holds
  XlaCall& operator=(const XlaCall&) = delete;

  Tensor next_result(const char* name);
  // The result behind the others is the workspace, if the plan has any.
  void take_workspace();
  void* stream() const;  // null on the CPU

  const XlaAttributes attributes;
  Problem problem;
  std::vector<Tensor> tensors;  // the inputs

 private:
  const xla::Buffer& result(std::int64_t n) const;

  const xla::CallFrame& frame_;
  std::vector<std::string> names_;
  std::string kernel_, variant_;
  std::int64_t num_results_ = 0;
};

// Answers a call of XLA's with that of `run`, or with its description.
using XlaRun = void (*)(const xla::CallFrame&, DeviceType);
xla::Error* handle(xla::CallFrame* frame, DeviceType type, XlaRun run) noexcept;

template <XlaRun kRun, DeviceType kType>
xla::Error* handler(xla::CallFrame* frame) noexcept {
  return handle(frame, kType, kRun);
}

}  // namespace dlattn::python
