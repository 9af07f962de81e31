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

// Gradients of a call of attention, or with cu_seqlens_q of attention_varlen, whose arguments
// `options` has by their names. `gradients` are the caller's tensors to write to, and `needs` the
// names of those to compute, of dq, dk, dv, dbias, dalibi_slopes and dsinks.
struct BackwardCall {
  nb::handle dout, out, lse, dlse;
  nb::dict gradients;
  nb::handle needs, deterministic, workspace;
  nb::dict options;
};
nb::object attention_backward(const BackwardCall& call);  // a tuple of the six, None for the others
nb::object supported_backward(const BackwardCall& call);  // (ok, reasons)
nb::object plan_backward(const BackwardCall& call);       // a dict as plan()'s

// The results of a computation.
struct Outcome {
  nb::object out;
  nb::object lse;  // null if not asked for
};
inline nb::list list_of(const Outcome& outcome) {
  nb::list outputs;
  outputs.append(outcome.out);
  if (outcome.lse.is_valid()) outputs.append(outcome.lse);
  return outputs;
}
inline nb::object result_of(const Outcome& outcome) {
  return outcome.lse.is_valid() ? nb::object(nb::make_tuple(outcome.out, outcome.lse))
                                : outcome.out;
}

// Memory of the inputs and outputs, for a framework that must be told when the device is done with
// it.
using Held = std::vector<nb::object>;

// Runs `compute(target, held)` once, on the stream that the caller named or the framework's own,
// and returns its outputs as the framework's tensors: what result_of() makes of them or, of a
// framework that defers them, a tuple of those that list_of() names, or the only one.
template <typename Compute>
nb::object run_on(Target& target, nb::handle stream, Compute&& compute) {
  if (!target.type->deferred) {
    set_stream(stream, &target);
    return result_of(compute(target, static_cast<Held*>(nullptr)));
  }
  if (!stream.is_none()) {
    throw UnsupportedError(
        "stream is given; accepted: None for JAX arrays, as JAX orders its work itself");
  }
  const nb::object launch = nb::cpp_function(
      [&](nb::handle own_stream) {
        if (target.device.type == DeviceType::kCuda) set_stream(own_stream, &target);
        Held held;
        const nb::list outputs = list_of(compute(target, &held));
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
