#pragma once

#include <nanobind/nanobind.h>

#include "problem.h"

namespace dlattn::python {

nb::object attention(const AttentionCall& call);  // out, or (out, lse)
nb::object merge_states(nb::handle outs, nb::handle lses, nb::handle layout, nb::handle stream);

nb::object supported(const AttentionCall& call);  // (ok, reasons)
nb::object plan(
    const AttentionCall& call);         // a dict: Plan's fields, its text, why not other kernels
nb::object info();                      // a dict: the build and the devices
nb::object inspect(nb::handle tensor);  // a dict: how a tensor comes in

// What a computation hands back: its outputs, and the input memory that must live until the device
// is done with it.
struct Outcome {
  nb::list outputs;
  nb::list held;
};

// Runs `compute` once, on the stream that the caller named or the framework's own, and returns its
// outputs as the framework's tensors: one, or a tuple if `many`.
template <typename Compute>
nb::object run_on(Target& target, nb::handle stream, bool many, Compute&& compute) {
  if (!target.type->deferred) {
    set_stream(stream, &target);
    const Outcome outcome = compute(target);
    return many ? nb::object(nb::tuple(outcome.outputs)) : nb::object(outcome.outputs[0]);
  }
  const nb::object launch = nb::cpp_function(
      [&](nb::handle own_stream) {
        if (target.device.type == DeviceType::kCuda) set_stream(own_stream, &target);
        const Outcome outcome = compute(target);
        return nb::make_tuple(outcome.outputs, outcome.held);
      },
      nb::arg("stream").none());
  if (!stream.is_none()) {
    throw UnsupportedError("stream: accepted: None for JAX arrays; JAX orders its work itself");
  }
  const nb::object outputs = target.type->adapter.attr("run")(target.like, launch);
  return many ? nb::object(nb::tuple(outputs)) : nb::object(outputs[0]);
}

}  // namespace dlattn::python
