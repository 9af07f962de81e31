#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention_test.h"
#include "core/backend.h"
#include "core/problem/quantized.h"
#include "cpu/quantize/rows.h"

// Problems of 16-bit inputs that are computed in 8 bits: what the host quantises them to, and the
// reference on that.
namespace simt {

// q of a problem in 8 bits, to `buffer`, as core/problem/quantized.h says.
inline void quantize_queries(const Case& c, const dlattn::AttentionParams& p, void* buffer) {
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

// A problem with what it is quantised to: q in its workspace, keys and values in memory of their
// own, so that whoever reads beyond either is seen.
template <typename T>
struct QuantizedProblem {
  const Case& c;
  const Tensors<T, T>& tensors;
  dlattn::AttentionParams params;
  using Memory = std::unique_ptr<void, void (*)(void*)>;
  Memory kept{nullptr, give_up}, workspace{nullptr, give_up};
  dlattn::QuantizedLayout layout;
  dlattn::QuantizedView keys;

  QuantizedProblem(const Case& c, const Tensors<T, T>& tensors, dlattn::Precision precision)
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

  // Tensor maps may begin there.
  static Memory poisoned(std::int64_t size) {
    const auto bytes = static_cast<std::size_t>(size);
    Memory memory(std::aligned_alloc(dlattn::kWorkspaceAlignment, bytes), give_up);
    std::memset(memory.get(), 0x7f, bytes);
    const auto* const first = static_cast<const unsigned char*>(memory.get());
    tensor_blocks[first] = first + bytes;
    return memory;
  }
  static void give_up(void* memory) {
    tensor_blocks.erase(static_cast<const unsigned char*>(memory));
    std::free(memory);
  }

  // The reference on what the 8-bit numbers stand for. k is without what it was stored without,
  // which all logits of a row get as a bias.
  reference::Problem head(int batch, int head) const {
    reference::Problem p = make_problem(c, tensors, batch, head);
    const int columns = layout.columns, head_kv = head / (c.num_heads / c.num_heads_kv);
    const int entry = c.batch_index(batch), start_q = c.start_q(batch), start_k = c.start_k(batch);
    const float* const shift =
        keys.k_shift + batch * keys.shift_batch_stride + head_kv * keys.shift_head_stride;
    for (int i = 0; i < p.seqlen_q; ++i) {
      double sum = 0.0;
      for (int d = 0; d < c.head_dim; ++d)
        sum += p.q[static_cast<std::size_t>(i * c.head_dim + d)] * shift[d];
      for (int j = 0; j < p.seqlen_k; ++j) p.bias.push_back(sum * p.softmax_scale);
    }
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

 private:
  static float e4m3(std::uint8_t byte) { return dlattn::cpu::to_float(dlattn::cpu::Float8{byte}); }

  void set_queries(int entry, int batch, int start, int head, reference::Problem* p) const {
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
};

// Runs a family's kernel on a problem in another precision than that of its inputs.
// `run_kernel(params, plan)` runs in every thread of the launch. The plain computation rounds
// probabilities to e4m3, of which the largest of a row is 256.
template <typename T, typename RunKernel>
void run_quantized(Tests* tests, std::string_view kernel, const Case& c,
                   dlattn::Precision precision, const dlattn::DeviceInfo& device,
                   const std::string& filter, std::int64_t most_blocks, RunKernel run_kernel) {
  constexpr dlattn::DType kDType = DTypeOf<T>::value;
  const std::string name = std::string(kernel) + " " + dlattn::to_string(precision) + " " +
                           dlattn::to_string(kDType) + " " + c.name();
  if (name.find(filter) == std::string::npos) return;
  Tensors<T, T> t = make_tensors<T, T>(c);
  // Blocks of keys and of values differ in size.
  const int total_k = c.varlen() ? c.total_k : c.seqlen_k;
  for (int row = 0; row < total_k; ++row) {
    for (int b = 0; b < (c.varlen() ? 1 : c.batch_size); ++b) {
      for (int h = 0; h < c.num_heads_kv; ++h) {
        const auto scale = [&](Tensor<T>& x, int columns, int power) {
          for (int d = 0; d < columns; ++d) {
            T& number = x.at(b, row, h, d);
            number = static_cast<T>(std::ldexp(static_cast<float>(number), power));
          }
        };
        scale(t.k, c.head_dim, -(row / 100 % 3));
        scale(t.v, c.dim_v(), row / 70 % 4 - 2);
      }
    }
  }
  const QuantizedProblem<T> problem(c, t, precision);
  dlattn::Options options;
  options.kernel = kernel;
  dlattn::core::validate(problem.params);
  const dlattn::Plan plan = dlattn::core::make_plan(problem.params, device, options);
  if (plan.workspace_bytes != problem.params.workspace_bytes)
    die("%s: the plan's workspace", name.c_str());
  if (!is_built(plan.dtype, plan.head_dim_tile)) return;
  const bool overlap = c.sequences_overlap();
  if (overlap && kThreadSanitizer) return;
  const HangGuard guard(name);
  std::vector<unsigned char> first_out;
  std::string trouble;
  for (const Schedule schedule : schedules()) {
    t.out.poison(), t.lse.poison();
    Launch threads{dim3(static_cast<unsigned>(std::min(plan.grid, most_blocks))),
                   dim3(plan.num_warps * 32), static_cast<std::size_t>(plan.smem_bytes), schedule};
    start_early(&threads, t);
    if (plan.grid > 0) launch(threads, [&] { run_kernel(problem.params, plan); });
    const std::vector<unsigned char> out = t.out.bytes();
    if (first_out.empty()) first_out = out;
    if (out != first_out && !overlap) trouble = "out depends on the order of threads";
    if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
    if (!other_rows_intact(c, t)) trouble = "a write to rows of no sequence";
  }
  reference::Rounding rounding = plain_rounding<__nv_fp8_e4m3, T>(256.0f);
  rounding.in_e4m3 = precision == dlattn::Precision::kFp8;
  const Errors errors =
      compare(c, t, rounding, [&](int batch, int head) { return problem.head(batch, head); });
  tests->report(name, errors, kDType, trouble, true);
}

}  // namespace simt
