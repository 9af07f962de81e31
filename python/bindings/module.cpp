// The Python module dlattn._core. Functions take their arguments in the order in which dlattn._api
// passes them; nothing here has a default.
#include <nanobind/nanobind.h>

#include "attention.h"
#include "errors.h"
#include "export.h"
#include "framework.h"
#include "host_buffer.h"
#include "names.h"
#include "support.h"

namespace dlattn::python {
namespace {

using H = nb::handle;

// Binds `function` once for attention's arguments and once, under name_varlen, for
// attention_varlen's.
template <nb::object (*function)(const AttentionCall&)>
void def_call(nb::module_& m, const char* name, const char* name_varlen) {
  m.def(
      name,
      [](H q, H k, H v, H causal, H softmax_scale, H window, H softcap, H bias, H mask,
         H alibi_slopes, H sinks, H layout, H out, H return_lse, H stream, H kernel,
         H batch_invariant) {
        return function({q,
                         k,
                         v,
                         causal,
                         softmax_scale,
                         window,
                         softcap,
                         bias,
                         mask,
                         alibi_slopes,
                         sinks,
                         layout,
                         out,
                         return_lse,
                         stream,
                         kernel,
                         batch_invariant,
                         {},
                         {},
                         {},
                         {},
                         {}});
      },
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("causal").none(),
      nb::arg("softmax_scale").none(), nb::arg("window").none(), nb::arg("softcap").none(),
      nb::arg("bias").none(), nb::arg("mask").none(), nb::arg("alibi_slopes").none(),
      nb::arg("sinks").none(), nb::arg("layout").none(), nb::arg("out").none(),
      nb::arg("return_lse").none(), nb::arg("stream").none(), nb::arg("kernel").none(),
      nb::arg("batch_invariant").none());
  m.def(
      name_varlen,
      [](H q, H k, H v, H cu_seqlens_q, H cu_seqlens_k, H max_seqlen_q, H max_seqlen_k, H seqused_k,
         H causal, H softmax_scale, H window, H softcap, H bias, H mask, H alibi_slopes, H sinks,
         H layout, H out, H return_lse, H stream, H kernel, H batch_invariant) {
        return function({q,
                         k,
                         v,
                         causal,
                         softmax_scale,
                         window,
                         softcap,
                         bias,
                         mask,
                         alibi_slopes,
                         sinks,
                         layout,
                         out,
                         return_lse,
                         stream,
                         kernel,
                         batch_invariant,
                         cu_seqlens_q,
                         cu_seqlens_k,
                         max_seqlen_q,
                         max_seqlen_k,
                         seqused_k});
      },
      nb::arg("q").none(), nb::arg("k").none(), nb::arg("v").none(), nb::arg("cu_seqlens_q").none(),
      nb::arg("cu_seqlens_k").none(), nb::arg("max_seqlen_q").none(),
      nb::arg("max_seqlen_k").none(), nb::arg("seqused_k").none(), nb::arg("causal").none(),
      nb::arg("softmax_scale").none(), nb::arg("window").none(), nb::arg("softcap").none(),
      nb::arg("bias").none(), nb::arg("mask").none(), nb::arg("alibi_slopes").none(),
      nb::arg("sinks").none(), nb::arg("layout").none(), nb::arg("out").none(),
      nb::arg("return_lse").none(), nb::arg("stream").none(), nb::arg("kernel").none(),
      nb::arg("batch_invariant").none());
}

// What this module keeps of Python (classes, types, the frameworks' adapters) is one interpreter's.
void check_interpreter() {
  if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return;
  throw nb::import_error(
      "dlattn is imported in a sub-interpreter; accepted: Python's main interpreter");
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
  def_call<attention>(m, "attention", "attention_varlen");
  def_call<supported>(m, "supported", "supported_varlen");
  def_call<plan>(m, "plan", "plan_varlen");
  m.def("merge_states", merge_states, nb::arg("outs").none(), nb::arg("lses").none(),
        nb::arg("layout").none(), nb::arg("stream").none());
  m.def("relay", relay, nb::arg("capsule"),
        "A DLPack capsule of another one's memory, which any thread may let go of.");
  m.def("info", info);
  m.def("inspect", inspect, nb::arg("tensor").none(),
        "How a tensor comes in: pointer, strides, device.");
  m.def("use_exchange_api", use_exchange_api, nb::arg("on"),
        "Whether to use DLPack's C exchange API. For tests.");
}
