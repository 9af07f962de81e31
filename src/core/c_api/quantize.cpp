#include "core/operations/quantize.h"

#include "core/c_api/translate.h"

namespace dlattn::c_api {
namespace {

QuantizeParams params_of(const DlattnQuantize* given) {
  const DlattnQuantize q = taken("DlattnQuantize", given);
  if (q.reserved != 0) fail("reserved is ", q.reserved, "; accepted: 0");
  QuantizeParams p;
  p.precision = precision_of(q.precision);
  take_fields(core::operands_of(p), q, &p);
  p.device = device_of(q.device_type, q.device_index);
  return p;
}

}  // namespace
}  // namespace dlattn::c_api

using namespace dlattn;
using namespace dlattn::c_api;

int32_t dlattn_quantized_kv_bytes(const DlattnQuantize* params, int64_t* bytes) {
  return guarded([&] {
    if (!bytes) fail("bytes is null");
    *bytes = quantized_kv_bytes(params_of(params));
  });
}

int32_t dlattn_quantize_kv(const DlattnQuantize* params, void* stream) {
  return guarded([&] { quantize_kv(params_of(params), stream); });
}
