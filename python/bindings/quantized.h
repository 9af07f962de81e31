#pragma once

#include <nanobind/nanobind.h>

#include "dlattn/quantize.h"
#include "problem.h"

// Keys and values in 8 bits: dlattn.QuantizedKV, and what makes them.
namespace dlattn::python {

void register_quantized_kv();

bool is_quantized_kv(nb::handle k);
// Reads one that was given as k, with `v`, which is to be None. The problem has q's fields and the
// number of sequences already.
void read_quantized_kv(nb::handle k, nb::handle v, bool varlen, const Target& target,
                       Problem* problem);
// Throws UnsupportedError if cu_seqlens_k or seqused_k name keys that it was not made of. On a GPU
// nobody can look at them.
void check_key_lengths(nb::handle k, const AttentionParams& params);

// The fields of a QuantizedKV in their order, but for its precision. total_k is None with fixed
// length, as cu_seqlens_k is, and key_lengths are None but on the CPU with cu_seqlens_k.
nb::object quantize_kv(nb::handle k, nb::handle v, nb::handle precision, nb::handle layout,
                       nb::handle stream, nb::handle cu_seqlens_k, nb::handle max_seqlen_k,
                       nb::handle seqused_k);

}  // namespace dlattn::python
