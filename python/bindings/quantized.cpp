#include "quantized.h"

#include <cstring>
#include <vector>

#include "attention.h"
#include "errors.h"
#include "gil.h"

namespace dlattn::python {
namespace {

nb::handle quantized_kv_type;

std::int64_t size_of_field(nb::handle object, const char* name) {
  return parse_count(attribute(object, interned(name)), name);
}

}  // namespace

void register_quantized_kv() {
  quantized_kv_type =
      attribute(nb::module_::import_("dlattn._types"), interned("QuantizedKV")).release();
}

bool is_quantized_kv(nb::handle k) {
  return k.type().ptr() == quantized_kv_type.ptr();
}

void read_quantized_kv(nb::handle k, nb::handle v, bool varlen, const Target& target,
                       Problem* problem) {
  AttentionParams& p = problem->params;
  if (!v.is_none()) {
    wrong_type("v is of type ", type_text(v),
               "; accepted: None, as k is a QuantizedKV, which holds the values too");
  }
  const nb::object name = attribute(k, interned("precision"));
  const Precision precision = parse_precision_of_8_bits(name, "precision of k");
  if (p.precision != Precision::kInputs && p.precision != precision) {
    unsupported("precision is \"", to_string(p.precision), "\"; accepted: None or \"",
                to_string(precision), "\", which k is quantised in");
  }
  p.precision = precision;
  const nb::object total_k = attribute(k, interned("total_k"));
  if (total_k.is_none() == varlen) {
    unsupported("k is quantised with ", varlen ? "fixed" : "variable", " length; accepted: ",
                varlen ? "variable, as cu_seqlens_k is given" : "fixed, for attention");
  }
  const std::int64_t batch_size = size_of_field(k, "batch_size");
  if (batch_size != p.batch_size) {
    unsupported("k: batch_size is ", batch_size, "; accepted: ", p.batch_size, ", ",
                varlen ? "the number of sequences of cu_seqlens_q" : "that of q");
  }
  const std::int64_t seqlen_k = size_of_field(k, "seqlen_k");
  if (varlen) {
    p.total_k = parse_count(total_k, "total_k");
    if (p.seqlen_k > seqlen_k) {
      unsupported("max_seqlen_k is ", p.seqlen_k, "; accepted: up to ", seqlen_k,
                  ", which k is quantised with");
    }
  } else {
    p.seqlen_k = seqlen_k;
  }
  p.num_heads_kv = size_of_field(k, "num_heads_kv");
  p.head_dim_v = size_of_field(k, "head_dim_v");
  const std::int64_t head_dim = size_of_field(k, "head_dim");
  if (head_dim != p.head_dim)
    unsupported("k: head_dim is ", head_dim, "; accepted: ", p.head_dim, ", that of q");

  QuantizeParams sizes;
  sizes.precision = precision;
  sizes.batch_size = batch_size;
  sizes.seqlen_k = p.seqlen_k;
  sizes.num_heads_kv = p.num_heads_kv;
  sizes.head_dim = head_dim;
  sizes.head_dim_v = p.head_dim_v;
  sizes.total_k = p.total_k;
  static constexpr std::int32_t kAny[1] = {0};  // whether there are lengths is all that is asked
  if (varlen) sizes.cu_seqlens_k = kAny;
  const std::int64_t needed = quantized_kv_bytes(sizes);
  const nb::object buffer = attribute(k, interned("buffer"));
  const Tensor& tensor = import_tensor(buffer, "buffer of k", target, problem);
  problem->buffer = buffer;
  check_last_stride(tensor);
  const std::int64_t bytes = tensor.num_elements() * (tensor.dtype.bits / 8);
  if (tensor.ndim != 1 || bytes < needed) {
    unsupported("buffer of k has ", tensor.ndim, " dimension(s) and ", bytes,
                " bytes; accepted: one of at least ", needed, " bytes, as quantize_kv makes it");
  }
  p.quantized_kv = tensor.data;
}

// Where each sequence begins, cu_seqlens_k, and then how many keys it has.
std::vector<std::int32_t> lengths_of_keys(const std::int32_t* cu_seqlens_k,
                                          const std::int32_t* seqused_k, std::int64_t batch_size) {
  std::vector<std::int32_t> lengths(cu_seqlens_k, cu_seqlens_k + batch_size + 1);
  for (std::int64_t b = 0; b < batch_size; ++b)
    lengths.push_back(seqused_k ? seqused_k[b] : cu_seqlens_k[b + 1] - cu_seqlens_k[b]);
  return lengths;
}

void check_key_lengths(nb::handle k, const AttentionParams& p) {
  const nb::object kept = attribute(k, interned("key_lengths"));
  if (kept.is_none() || p.device.type != DeviceType::kCpu) return;
  if (!PyBytes_Check(kept.ptr()))
    wrong_type("key_lengths of k is of type ", type_text(kept), "; accepted: bytes or None");
  const nb::bytes given = nb::borrow<nb::bytes>(kept);
  const auto batch = static_cast<std::size_t>(p.batch_size);
  const std::size_t bytes = (2 * batch + 1) * sizeof(std::int32_t);
  if (given.size() != bytes) {
    unsupported("key_lengths of k has ", given.size(), " bytes; accepted: ", bytes,
                ", as quantize_kv makes it");
  }
  std::vector<std::int32_t> then(2 * batch + 1);
  std::memcpy(then.data(), given.data(), bytes);
  for (std::size_t i = 0; i <= batch; ++i) {
    if (p.cu_seqlens_k[i] == then[i]) continue;
    unsupported("cu_seqlens_k[", i, "] is ", p.cu_seqlens_k[i], "; accepted: ", then[i],
                ", which k is quantised with");
  }
  const std::vector<std::int32_t> now = lengths_of_keys(p.cu_seqlens_k, p.seqused_k, p.batch_size);
  for (std::size_t b = 0; b < batch; ++b) {
    const std::int32_t keys = now[batch + 1 + b], most = then[batch + 1 + b];
    if (keys <= most) continue;
    unsupported(p.seqused_k ? concat("seqused_k[", b, "] is ", keys)
                            : concat("seqused_k is None and sequence ", b, " has ", keys, " keys"),
                "; accepted: up to ", most, ", the keys that k is quantised with");
  }
}

namespace {

void read_keys(const Tensor& k, const Tensor& v, Layout layout, bool varlen, QuantizeParams* p) {
  const int skip = varlen ? 1 : 0, last = 3 - skip;
  const Dims dims = dims_of(layout);
  const Dims at = {0, dims.row - skip, dims.head - skip};
  for (const Tensor* tensor : {&k, &v}) {
    check_rank(*tensor, 4 - skip, dims_text(layout, varlen));
    check_last_stride(*tensor);
  }
  for (int i = 0; i < last; ++i) {
    if (v.shape[i] != k.shape[i]) {
      unsupported("v: shape is ", shape_text(v.shape, v.ndim), "; accepted: that of k but for ",
                  "head_dim, ", shape_text(k.shape, k.ndim));
    }
  }
  const auto read = [&](const Tensor& tensor, TensorView* view) {
    view->dtype = to_dtype(tensor, "float16, bfloat16");
    set_view(tensor, dims, varlen, view);
  };
  read(k, &p->k);
  read(v, &p->v);
  if (!varlen) {
    p->batch_size = k.shape[at.batch];
    p->seqlen_k = k.shape[at.row];
  } else {
    p->total_k = k.shape[at.row];
  }
  p->num_heads_kv = k.shape[at.head];
  p->head_dim = k.shape[last];
  p->head_dim_v = v.shape[last];
}

}  // namespace

nb::object quantize_kv(nb::handle k, nb::handle v, nb::handle precision, nb::handle layout,
                       nb::handle stream, nb::handle cu_seqlens_k, nb::handle max_seqlen_k,
                       nb::handle seqused_k) {
  QuantizeParams params;
  params.precision = parse_precision_of_8_bits(precision, "precision");
  const Layout parsed = parse_layout(layout);
  const bool varlen = !cu_seqlens_k.is_none();
  if (varlen == max_seqlen_k.is_none()) {
    unsupported(varlen ? "max_seqlen_k" : "cu_seqlens_k",
                " is None; accepted: both cu_seqlens_k and max_seqlen_k, or neither");
  }
  if (!varlen && !seqused_k.is_none())
    unsupported("seqused_k is given without cu_seqlens_k; accepted: None, or both");
  if (varlen) params.seqlen_k = parse_count(max_seqlen_k, "max_seqlen_k");
  Target target = make_target(k, "k");
  nb::object key_lengths = nb::none();
  const nb::object buffer = run_on(target, stream, [&](const Target& settled, Held* held) {
    Problem problem;
    problem.params.device = params.device = settled.device;
    const Tensor& keys = import_tensor(k, "k", settled, &problem);
    const Tensor& values = import_tensor(v, "v", settled, &problem);
    read_keys(keys, values, parsed, varlen, &params);
    if (varlen) {
      const Tensor& offsets = import_tensor(cu_seqlens_k, "cu_seqlens_k", settled, &problem);
      params.cu_seqlens_k = int32s_of(offsets, -1, "(batch + 1,)");
      params.batch_size = offsets.shape[0] - 1;
      if (!seqused_k.is_none()) {
        params.seqused_k = int32s_of(import_tensor(seqused_k, "seqused_k", settled, &problem),
                                     params.batch_size, "(batch,)");
      }
    }
    const std::int64_t floats[1] = {quantized_kv_bytes(params) / 4};
    Allocation buffer = allocate(settled, "quantized_kv", floats, 1, DType::kFloat32);
    params.quantized_kv = buffer.tensor.data;
    check_unchanged(problem.tensors, problem.tensors + problem.num_tensors);
    without_gil([&](Poll) {
      wait_for_owners(problem.tensors, problem.tensors + problem.num_tensors, settled);
      dlattn::quantize_kv(params, settled.stream);
    });
    if (varlen && settled.device.type == DeviceType::kCpu) {
      const std::vector<std::int32_t> lengths =
          lengths_of_keys(params.cu_seqlens_k, params.seqused_k, params.batch_size);
      key_lengths = nb::bytes(lengths.data(), lengths.size() * sizeof lengths[0]);
    }
    if (held) {
      for (int i = 0; i < problem.num_tensors; ++i) held->push_back(problem.tensors[i].owner);
      held->push_back(buffer.tensor.owner);
    }
    Outcome outcome;
    outcome.out = take(settled, &buffer);
    return outcome;
  });
  return nb::make_tuple(buffer, params.batch_size, params.seqlen_k,
                        varlen ? nb::object(nb::int_(params.total_k)) : nb::none(),
                        params.num_heads_kv, params.head_dim, params.head_dim_v, key_lengths);
}

}  // namespace dlattn::python
