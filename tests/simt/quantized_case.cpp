#include "quantized_case.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "core/backend.h"
#include "cpu/quantize/rows.h"

namespace simt {
namespace {

float e4m3(std::uint8_t byte) {
  return dlattn::cpu::to_float(dlattn::cpu::Float8{byte});
}

}  // namespace

void quantize_queries(const Case& c, const dlattn::AttentionParams& p, void* buffer) {
  const dlattn::QueryLayout layout = dlattn::query_layout(p);
  std::memset(buffer, 0xA5, static_cast<std::size_t>(layout.bytes));  // as tests poison it
  auto* const bytes = static_cast<std::uint8_t*>(buffer);
  auto* const scales = reinterpret_cast<float*>(bytes + layout.scale);
  const int columns = layout.columns;
  std::vector<float> block(static_cast<std::size_t>(layout.block_m * columns));
  for (int b = 0; b < c.batch_size; ++b) {
    const int entry = c.batch_index(b), start = c.start_q(b), count = c.rows_q(b);
    const std::int64_t first =
        c.varlen() ? dlattn::first_block(start, b, layout.block_m) : std::int64_t{0};
    for (int head = 0; head < c.num_heads; ++head) {
      const std::int64_t at = entry * layout.heads + head;
      for (int i = 0; i < count; i += layout.block_m) {
        const int rows = std::min(layout.block_m, count - i);
        for (int j = 0; j < rows; ++j) {
          const dlattn::cpu::Row16 from(p.q, entry, start + i + j, head);
          float* const x = block.data() + j * columns;
          for (int d = 0; d < columns; ++d) x[d] = d < p.head_dim ? from[d] : 0.0f;
          dlattn::cpu::rotate(x, columns);
        }
        const dlattn::Rounding rounding = dlattn::rounding_by_power(
            dlattn::cpu::largest_magnitude(block.data(), std::int64_t{rows} * columns));
        scales[at * layout.blocks + first + i / layout.block_m] = rounding.scale;
        std::uint8_t* const to = bytes + (at * layout.rows + start + i) * columns;
        for (int x = 0; x < rows * columns; ++x)
          to[x] = dlattn::cpu::to_e4m3(block[static_cast<std::size_t>(x)], rounding);
      }
    }
  }
}

template <typename T>
QuantizedProblem<T>::QuantizedProblem(const Case& c, const Tensors<T, T>& tensors,
                                      dlattn::Precision precision)
    : c(c), tensors(tensors) {
  constexpr dlattn::DType kDType = DTypeOf<T>::value;
  params = make_params(c, tensors, kDType, kDType);
  params.precision = precision;
  layout = dlattn::quantized_layout(dlattn::keys_of(params));
  kept = poisoned(layout.bytes);
  params.quantized_kv = kept.get();
  params.workspace_bytes = dlattn::task_bytes(params);
  workspace = poisoned(params.workspace_bytes);
  params.workspace = workspace.get();
  dlattn::QuantizeTask task = dlattn::task_of(params, params.workspace);
  task.quantized_kv = kept.get();
  if (task.quantized_q) quantize_queries(c, params, task.quantized_q);
  keys = dlattn::view_of(layout, task.quantized_kv, c.varlen());
  std::vector<std::int32_t> starts, used;  // as kernels take them from what lies in memory
  if (c.varlen()) {
    for (int b = 0; b < c.batch_size; ++b)
      starts.push_back(c.start_k(b)), used.push_back(c.rows_k(b));
    starts.push_back(std::clamp(c.cu_seqlens_k.back(), 0, c.total_k));
    task.cu_seqlens_k = starts.data(), task.seqused_k = used.data(), task.seqlen_k = c.total_k;
  }
  if (layout.rows > 0 && c.batch_size > 0) dlattn::cpu::quantize_kv(task, 1);
}

template <typename T>
reference::Problem QuantizedProblem<T>::head(int batch, int head) const {
  reference::Problem p = make_problem(c, tensors, batch, head);
  const int columns = layout.columns, head_kv = head / (c.num_heads / c.num_heads_kv);
  const int entry = c.batch_index(batch), start_q = c.start_q(batch), start_k = c.start_k(batch);
  const float* const shift =
      keys.k_shift + batch * keys.shift_batch_stride + head_kv * keys.shift_head_stride;
  std::vector<double> bias = p.bias;
  bias.resize(static_cast<std::size_t>(p.seqlen_q) * p.seqlen_k);
  for (int i = 0; i < p.seqlen_q; ++i) {
    double sum = 0.0;
    for (int d = 0; d < c.head_dim; ++d)
      sum += p.q[static_cast<std::size_t>(i * c.head_dim + d)] * shift[d];
    for (int j = 0; j < p.seqlen_k; ++j)
      bias[static_cast<std::size_t>(i) * p.seqlen_k + j] += sum * p.softmax_scale;
  }
  p.bias = bias;
  p.head_dim = columns;
  p.softmax_scale *= columns;
  set_queries(entry, batch, start_q, head, &p);
  const bool int8 = params.precision == dlattn::Precision::kInt8Fp8;
  const std::int64_t at =
      entry * keys.batch_stride + head_kv * keys.head_stride + std::int64_t{start_k} * columns;
  const std::int64_t scale_at =
      entry * keys.scale_batch_stride + head_kv * keys.scale_head_stride +
      (c.varlen() ? dlattn::first_block(start_k, batch, layout.block_n) : 0);
  p.k.clear(), p.v.clear();
  for (int j = 0; j < p.seqlen_k; ++j) {
    const std::int64_t block = scale_at + j / layout.block_n;
    p.k_scales.push_back(keys.k_scale[block]);
    for (int d = 0; d < columns; ++d) {
      const std::uint8_t byte = keys.k[at + j * columns + d];
      const float k = int8 ? static_cast<float>(static_cast<std::int8_t>(byte)) : e4m3(byte);
      p.k.push_back(k);
      if (d < c.dim_v())
        p.v.push_back(static_cast<double>(e4m3(keys.v[at + j * columns + d])) *
                      keys.v_scale[block]);
    }
  }
  return p;
}

template <typename T>
void QuantizedProblem<T>::set_queries(int entry, int batch, int start, int head,
                                      reference::Problem* p) const {
  const int columns = layout.columns;
  p->q.clear();
  if (params.precision == dlattn::Precision::kInt8Fp8) {
    for (int i = start; i < start + p->seqlen_q; ++i) {
      const dlattn::cpu::Row16 from(params.q, entry, i, head);
      std::vector<float> x(static_cast<std::size_t>(columns));
      for (int d = 0; d < c.head_dim; ++d) x[static_cast<std::size_t>(d)] = from[d];
      dlattn::cpu::rotate(x.data(), columns);
      const dlattn::Rounding rounding =
          dlattn::rounding_to_int8(dlattn::cpu::largest_magnitude(x.data(), columns));
      for (const float y : x) p->q.push_back(dlattn::cpu::to_int8(y, rounding));
      p->q_scales.push_back(rounding.scale);
    }
    return;
  }
  const dlattn::QueryLayout own = dlattn::query_layout(params);
  const dlattn::QuantizedQueries view = dlattn::view_of(own, params.workspace, c.varlen());
  const std::int64_t first = c.varlen() ? dlattn::first_block(start, batch, own.block_m) : 0;
  for (int i = 0; i < p->seqlen_q; ++i) {
    p->q_scales.push_back(view.scale[entry * view.scale_batch_stride +
                                     head * view.scale_head_stride + first + i / own.block_m]);
    for (int d = 0; d < columns; ++d) {
      p->q.push_back(e4m3(view.q[entry * view.batch_stride + head * view.head_stride +
                                 std::int64_t{start + i} * columns + d]));
    }
  }
}

template struct QuantizedProblem<__half>;
template struct QuantizedProblem<__nv_bfloat16>;

}  // namespace simt
