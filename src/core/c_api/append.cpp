#include "core/operations/append.h"

#include "core/c_api/translate.h"

namespace dlattn::c_api {
namespace {

AppendParams params_of(const DlattnAppend* given) {
  const DlattnAppend a = taken("DlattnAppend", given);
  if (a.reserved != 0) fail("reserved is ", a.reserved, "; accepted: 0");
  AppendParams p;
  take_fields(core::operands_of(p), a, &p);
  take_page_table(a, &p);
  p.device = device_of(a.device_type, a.device_index);
  if (a.slot_bytes != 0) p.slot_bytes = a.slot_bytes;
  p.rotary_interleaved = flag("rotary_interleaved", a.rotary_interleaved);
  p.q_fixed_position = flag("q_fixed_position", a.q_fixed_position);
  return p;
}

}  // namespace
}  // namespace dlattn::c_api

using namespace dlattn;
using namespace dlattn::c_api;

int32_t dlattn_append_kv(const DlattnAppend* params, void* stream, const DlattnOptions* options) {
  return guarded(options,
                 [&](const Options& taken) { append_kv(params_of(params), stream, taken.poll); });
}

int32_t dlattn_append_and_attend(const DlattnAppend* append, const DlattnAttention* attention,
                                 void* stream, const DlattnOptions* options) {
  return guarded(options, [&](const Options& taken) {
    append_and_attend(params_of(append), params_of(attention), stream, taken);
  });
}
