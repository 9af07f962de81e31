#pragma once

#include <nanobind/nanobind.h>

#include "dlattn/quantize.h"
#include "problem.h"

// Keys and values in 8 bits: dlattn.QuantizedKV, and what makes them.
namespace dlattn::python {

void register_quantized_kv();

bool is_quantized_kv(nb::handle k);
// Reads one that was given as k, with `v`, which is to be None. q's fields of the problem are set.
void read_quantized_kv(nb::handle k, nb::handle v, bool varlen, const Target& target,
                       Problem* problem);

// The buffer of a QuantizedKV and its sizes: (buffer, batch_size, seqlen_k, num_heads_kv, head_dim,
// head_dim_v, total_k), the last of which is None with fixed length, as cu_seqlens_k is.
nb::object quantize_kv(nb::handle k, nb::handle v, nb::handle precision, nb::handle layout,
                       nb::handle stream, nb::handle cu_seqlens_k, nb::handle max_seqlen_k,
                       nb::handle seqused_k);

}  // namespace dlattn::python
