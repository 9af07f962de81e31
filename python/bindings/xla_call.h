#pragma once

#include <nanobind/nanobind.h>

#include <string>
#include <utility>
#include <vector>

#include "problem.h"
#include "xla_frame.h"

// Describes calls of XLA's handlers, from Python: the tensors are pairs (dtype, shape).
namespace dlattn::python {

// Makes tensors out of shapes. Their memory is not accessed, but for lists of lengths.
class XlaShapes {
 public:
  Tensor tensor(const char* name, nb::handle spec);
  Tensor result(const char* name, const Shape& shape, DType dtype);

 private:
  void place(Tensor* tensor);

  std::uintptr_t next_ = std::uintptr_t{1} << 20;
  std::vector<std::vector<double>> lengths_;  // of doubles: large enough for any dtype
};

// The attributes that an XlaCall reads; `operands` are the names of the inputs.
nb::dict attributes_of(const Problem& problem, const std::vector<Tensor>& operands);

nb::object str(const std::string& text);
nb::tuple tuple_of(const Shape& shape);  // of ints

// The handlers of `kRun` by the name of their platform, in capsules.
template <XlaRun kRun>
nb::dict handlers_of() {
  const auto capsule = [](xla::Handler* handler) {
    return nb::steal<nb::object>(PyCapsule_New(reinterpret_cast<void*>(handler), nullptr, nullptr));
  };
  nb::dict handlers;
  handlers["cpu"] = capsule(handler<kRun, DeviceType::kCpu>);
  handlers["CUDA"] = capsule(handler<kRun, DeviceType::kCuda>);
  return handlers;
}

}  // namespace dlattn::python
