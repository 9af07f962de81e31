// The Python module dlattn._core. Its functions take all their arguments by position, and none has
// a default.
#include <nanobind/nanobind.h>

#include "append.h"
#include "attention.h"
#include "errors.h"
#include "export.h"
#include "framework.h"
#include "host_buffer.h"
#include "names.h"
#include "quantized.h"
#include "support.h"
#include "torch_kernel.h"
#include "torch_ops.h"
#include "torch_overrideable.h"
#include "torch_sdpa.h"
#include "xla.h"

namespace dlattn::python {
namespace {

// The module keeps Python's classes, types and the frameworks' adapters for one interpreter.
void check_interpreter() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return;
  throw nb::import_error(
      "dlattn is imported in a sub-interpreter; accepted: Python's main interpreter");
}

void def_backward(nb::module_& m, const char* name, nb::object (*function)(const BackwardCall&)) {
  m.def(
      name,
      [function](nb::handle dout, nb::handle out, nb::handle lse, nb::handle dlse,
                 nb::dict gradients, nb::handle needs, nb::handle deterministic,
                 nb::handle workspace, nb::dict options) {
        return function(
            {dout, out, lse, dlse, gradients, needs, deterministic, workspace, options});
      },
      nb::arg("dout").none(), nb::arg("out").none(), nb::arg("lse").none(), nb::arg("dlse").none(),
      nb::arg("gradients"), nb::arg("needs").none(), nb::arg("deterministic").none(),
      nb::arg("workspace").none(), nb::arg("options"));
}

}  // namespace
}  // namespace dlattn::python

NB_MODULE(_core, m) {
  using namespace dlattn::python;
  check_interpreter();
  nb::set_leak_warnings(false);  // a call in flight when the interpreter ends keeps what it uses
  m.doc() = "The native part of dlattn.";
  m.attr("__version__") = DLATTN_VERSION;
  register_errors();
  register_names();
  register_frameworks();
  nb::module_::import_("numbers");  // so that no call is the first to import it
  register_host_buffer(m);
  register_support(m);
  register_quantized_kv();
  def_attention(m, attention);
  m.def(
      "append_and_attend",
      [](nb::handle k, nb::handle v, nb::handle seqused_k, nb::handle rotary_cos,
         nb::handle rotary_sin, nb::handle rotary_interleaved, nb::handle leftpad_k,
         const nb::dict& options) {
        return append_and_attend(
            {k, v, seqused_k, rotary_cos, rotary_sin, rotary_interleaved, leftpad_k}, options);
      },
      nb::arg("k").none(), nb::arg("v").none(), nb::arg("seqused_k").none(),
      nb::arg("rotary_cos").none(), nb::arg("rotary_sin").none(),
      nb::arg("rotary_interleaved").none(), nb::arg("leftpad_k").none(), nb::arg("options"));
  def_backward(m, "attention_backward", attention_backward);
  def_backward(m, "supported_backward", supported_backward);
  def_backward(m, "plan_backward", plan_backward);
  def_call(m, "supported", "supported_varlen", "supported_with_kvcache", supported);
  def_call(m, "plan", "plan_varlen", "plan_with_kvcache", plan);
  def_call(m, "xla_call", "xla_call_varlen", nullptr, xla_call);
  m.def("xla_handlers", xla_handlers);
  m.def("xla_call_backward", xla_call_backward);
  m.def("xla_backward_handlers", xla_backward_handlers);
  m.def("merge_states", merge_states, nb::arg("outs").none(), nb::arg("lses").none(),
        nb::arg("layout").none(), nb::arg("stream").none());
  m.def("quantize_kv", quantize_kv, nb::arg("k").none(), nb::arg("v").none(),
        nb::arg("precision").none(), nb::arg("layout").none(), nb::arg("stream").none(),
        nb::arg("cu_seqlens_k").none(), nb::arg("max_seqlen_k").none(),
        nb::arg("seqused_k").none());
  register_append_kv(m);
  m.def("relay", relay, nb::arg("capsule"),
        "A DLPack capsule of another one's memory, which any thread may let go of.");
  m.def("register_torch_ops", register_torch_ops, nb::arg("folder"), nb::arg("backend"),
        nb::arg("schemas"));
  m.def("unregister_torch_ops", unregister_torch_ops);
  m.def("torch_ops_failure", torch_ops_failure);
  m.def("register_torch_sdpa", register_torch_sdpa, nb::arg("folder"), nb::arg("key"),
        nb::arg("schemas"), nb::arg("count_refused"));
  m.def("register_torch_raise", register_torch_raise, nb::arg("folder"), nb::arg("exception"));
  m.def("unregister_torch_sdpa", unregister_torch_sdpa);
  m.def("register_torch_overrideable", register_torch_overrideable, nb::arg("folder"),
        nb::arg("key"), nb::arg("schemas"));
  m.def("serve_torch_sdpa", serve_torch_sdpa, nb::arg("serving"), nb::arg("gradients"));
  m.def("torch_sdpa_served", torch_sdpa_served, nb::arg("reset"));
  m.def("torch_gradients_are_as_fast", torch_gradients_are_as_fast, nb::arg("torchs"),
        nb::arg("kernel"), nb::arg("has_bias"), nb::arg("wants_dbias"), nb::arg("deterministic"),
        nb::arg("seqlen_q"), nb::arg("head_dim"));
  m.def("info", info);
  m.def("inspect", inspect, nb::arg("tensor").none(),
        "How a tensor comes in: pointer, strides, device.");
  m.def("use_exchange_api", use_exchange_api, nb::arg("on"),
        "Whether to use DLPack's C exchange API. For tests.");
}
