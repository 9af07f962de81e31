#include "append.h"

#include <optional>

#include "append_problem.h"
#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

nb::object append_kv(const AppendCall& call) {
  const Layout layout = parse_layout(call.layout);
  Target target = make_target(call.k, "k");
  if (target.type->deferred) {
    unsupported(
        "k is a JAX array; accepted: a tensor of k_cache's library, as a JAX array cannot "
        "be a cache");
  }
  set_stream(call.stream, &target);
  AppendProblem problem(call, layout, target);
  std::optional<Allocation> q_out;
  if (problem.has_queries()) q_out.emplace(problem.allocate_queries());
  problem.check_unchanged();
  const auto tell_autograd = [&] {
    mark_modified(call.k_cache, "k_cache");
    mark_modified(call.v_cache, "v_cache");
  };
  try {
    without_gil([&](Poll poll) {
      problem.wait_for_owners();
      dlattn::append_kv(problem.params, target.stream, poll);
    });
  } catch (const nb::python_error&) {
    tell_autograd();  // a part may have been written
    throw;
  }
  tell_autograd();
  return q_out ? take(target, &*q_out) : nb::none();
}

}  // namespace

void register_append_kv(nb::module_& module) {
  module.def(
      "append_kv",
      [](nb::handle k, nb::handle v, nb::handle k_cache, nb::handle v_cache, nb::handle seqused_k,
         nb::handle page_table, nb::handle slots, nb::handle cu_seqlens_q,
         nb::handle cache_batch_idx, nb::handle leftpad_k, nb::handle q, nb::handle rotary_cos,
         nb::handle rotary_sin, nb::handle rotary_interleaved, nb::handle q_fixed_position,
         nb::handle k_descale, nb::handle v_descale, nb::handle layout, nb::handle stream) {
        return append_kv({k, v, k_cache, v_cache, seqused_k, page_table, slots, cu_seqlens_q,
                          cache_batch_idx, leftpad_k, q, rotary_cos, rotary_sin, rotary_interleaved,
                          q_fixed_position, k_descale, v_descale, layout, stream});
      },
      nb::arg("k").none(), nb::arg("v").none(), nb::arg("k_cache").none(),
      nb::arg("v_cache").none(), nb::arg("seqused_k").none(), nb::arg("page_table").none(),
      nb::arg("slots").none(), nb::arg("cu_seqlens_q").none(), nb::arg("cache_batch_idx").none(),
      nb::arg("leftpad_k").none(), nb::arg("q").none(), nb::arg("rotary_cos").none(),
      nb::arg("rotary_sin").none(), nb::arg("rotary_interleaved").none(),
      nb::arg("q_fixed_position").none(), nb::arg("k_descale").none(), nb::arg("v_descale").none(),
      nb::arg("layout").none(), nb::arg("stream").none());
}

}  // namespace dlattn::python
