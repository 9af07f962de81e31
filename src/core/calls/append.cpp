#include "dlattn/append.h"

#include "core/backend.h"
#include "core/calls/forward.h"
#include "core/operations/append.h"
#include "core/plan/choose.h"
#include "core/problem/append.h"
#include "core/validate/call_memory.h"
#include "core/validate/fail.h"
#include "core/validate/names_of_caches.h"

namespace dlattn {

template Plan core::make_plan(const AppendParams&, const DeviceInfo&);

Plan plan(const AppendParams& params, const DeviceInfo& device) {
  core::validate(params);
  return core::make_plan(params, device);
}

namespace {

// A call of append_kv() of which everything is checked but, on the CPU, its lists.
struct PreparedAppend {
  const AppendParams& params;
  Plan plan;
  bool is_empty;

  explicit PreparedAppend(const AppendParams& given)
      : params(given), is_empty(num_new_rows(given) == 0) {
    if (is_empty) return;
    plan = core::make_plan(params, device_info(params.device));
    core::print_if_asked(plan);
  }

  void run(void* stream, Poll poll) const {
    if (is_empty) return;
    if (plan.kernel == core::kCpu) return cpu::append_kv(params, plan.num_threads, poll);
    cuda::enqueue(params, plan, stream);
  }
};

void check_same_device(Device append, Device attention) {
  if (append.type == attention.type &&
      (append.type == DeviceType::kCpu || append.index == attention.index))  // there is one CPU
    return;
  const auto text = [](Device device) {
    return device.type == DeviceType::kCpu ? "cpu" : core::concat("cuda:", device.index);
  };
  core::fail("attention is on ", text(attention), "; accepted: ", text(append),
             ", where append is");
}

}  // namespace

void append_kv(const AppendParams& params, void* stream, Poll poll) {
  core::validate(params);
  PreparedAppend(params).run(stream, poll);
}

void append_and_attend(const AppendParams& append, const AttentionParams& attention, void* stream,
                       const Options& options) {
  core::validate(append);
  check_same_device(append.device, attention.device);
  // Before attention looks at the lengths that they make.
  if (append.device.type == DeviceType::kCpu) cpu::check_lists(append, attention.seqlen_k);
  const PreparedAppend first(append);
  core::PreparedForward second =
      core::in_names_of_caches([&] { return core::prepare_forward(attention, options); });
  core::check_own_memory(append, second.params);
  first.run(stream, options.poll);
  second.run(stream);
}

}  // namespace dlattn
