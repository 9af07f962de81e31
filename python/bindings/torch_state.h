#pragma once

#include <nanobind/nanobind.h>

namespace dlattn::python {

namespace nb = nanobind;

// The part of torch's own state that a call must look at, in objects that tell it in some tens of
// nanoseconds. They come from dlattn.frameworks.Torch, whose methods look closer.
class TorchState {
 public:
  TorchState() = default;  // of what is not torch
  explicit TorchState(nb::handle adapter);

  // Throws where torch would keep the result of a call as a constant, or computes on no memory:
  // while it traces, and under its FakeTensorMode.
  void check_modes(const char* name) const;
  // Whether tensors may have tangents now.
  bool in_forward_ad() const;
  // Throws if `tensor` has a tangent, which the result would lack.
  void check_tangent(nb::handle tensor, const char* name) const;
  // Whether the tensor's memory holds the negatives of its values.
  bool is_negated(nb::handle tensor) const;
  // Tells autograd that the tensor was written in place.
  void increment_version(nb::handle tensor) const;

 private:
  nb::object adapter_;
  nb::object count_modes_;  // functions; this one where torch has no flag that tells of modes
  nb::object is_tracing_;
  nb::object increment_version_;  // of a tuple of tensors
  nb::object is_neg_;             // of a tensor
  nb::object forward_ad_;         // dicts of modules
  nb::object dispatch_;
  nb::object current_level_;  // names of variables in them
  nb::object is_in_mode_;
};

}  // namespace dlattn::python
