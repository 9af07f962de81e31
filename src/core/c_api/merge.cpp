#include "core/operations/merge.h"

#include "core/c_api/translate.h"

namespace dlattn::c_api {
namespace {

MergeParams params_of(const DlattnMerge* given) {
  const DlattnMerge m = taken("DlattnMerge", given);
  if (m.reserved != 0) fail("reserved is ", m.reserved, "; accepted: 0");
  if (m.num_states < 1 || m.num_states > kMaxMergeStates)
    fail("num_states is ", m.num_states, "; accepted: 1 to ", kMaxMergeStates);
  if (!m.outs) fail("outs is null");
  if (!m.lses) fail("lses is null");
  MergeParams p;
  p.num_states = m.num_states;
  const core::Operands table = core::operands_of(p);
  for (int n = 0; n < m.num_states; ++n) {
    take_tensor(*core::find(table, "outs"), m.outs[n], reinterpret_cast<char*>(&p.outs[n]));
    take_tensor(*core::find(table, "lses"), m.lses[n], reinterpret_cast<char*>(&p.lses[n]));
  }
  take_fields(table, m, &p);
  p.device = device_of(m.device_type, m.device_index);
  return p;
}

}  // namespace
}  // namespace dlattn::c_api

using namespace dlattn;
using namespace dlattn::c_api;

int32_t dlattn_merge_states(const DlattnMerge* params, void* stream, const DlattnOptions* options) {
  return guarded(
      options, [&](const Options& taken) { merge_states(params_of(params), stream, taken.poll); });
}
