#pragma once

#include <nanobind/nanobind.h>

#include <vector>

#include "gil.h"
#include "problem.h"

namespace dlattn::python {

nb::object attention(const AttentionCall& call);  // out, or (out, lse)

// New keys and values of a call of attention_with_kvcache, and what rotates them.
struct NewKeys {
  nb::handle k, v;
  nb::handle seqused_k;  // the lengths before the call; those of attention count the new keys
  nb::handle rotary_cos, rotary_sin, rotary_interleaved;
  nb::handle leftpad_k;  // from which rotary positions count
};
// The same of `options`, arguments of attention_with_kvcache by their names, behind the new keys.
// All of both is checked before anything is written.
nb::object append_and_attend(const NewKeys& given, const nb::dict& options);
nb::object merge_states(nb::handle outs, nb::handle lses, nb::handle layout, nb::handle stream);

// (ok, reasons), and dicts: a plan's fields, its text and why not other kernels; the build and the
// devices; how a tensor comes in.
nb::object supported(const AttentionCall& call);
nb::object plan(const AttentionCall& call);
nb::object info();
nb::object inspect(nb::handle tensor);

// The results of a computation.
struct Outcome {
  nb::object out;
  nb::object lse;  // null if not asked for
};

// Memory of the inputs and outputs, for a framework that must be told when the device is done with
// it.
using Held = std::vector<nb::object>;

// Runs `compute(target, held)` once, on the stream that the caller named or the framework's own,
// and returns its outputs as the framework's tensors: out, or (out, lse).
template <typename Compute>
nb::object run_on(Target& target, nb::handle stream, Compute&& compute) {
  if (!target.type->deferred) {
    set_stream(stream, &target);
    Outcome outcome = compute(target, static_cast<Held*>(nullptr));
    return outcome.lse.is_valid() ? nb::make_tuple(outcome.out, outcome.lse) : outcome.out;
  }
  if (!stream.is_none()) {
    throw UnsupportedError(
        "stream is given; accepted: None for JAX arrays, as JAX orders its work itself");
  }
  const nb::object launch = nb::cpp_function(
      [&](nb::handle own_stream) {
        if (target.device.type == DeviceType::kCuda) set_stream(own_stream, &target);
        Held held;
        const Outcome outcome = compute(target, &held);
        nb::list outputs;
        outputs.append(outcome.out);
        if (outcome.lse.is_valid()) outputs.append(outcome.lse);
        nb::list memory;
        for (const nb::object& owner : held) {
          if (owner.is_valid()) memory.append(owner);
        }
        return nb::make_tuple(outputs, memory);
      },
      nb::arg("stream").none());
  const nb::object outputs = call_method(target.type->adapter, "run", target.like, launch);
  return nb::len(outputs) > 1 ? nb::object(nb::tuple(outputs)) : nb::object(outputs[0]);
}

}  // namespace dlattn::python
