#pragma once

#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention_test.h"
#include "core/problem/quantized.h"

// Problems of 16-bit inputs that are computed in 8 bits: what the host quantises them to, and the
// reference on that.
namespace simt {

// q of a problem in 8 bits, to `buffer`, as core/problem/quantized.h says.
void quantize_queries(const Case& c, const dlattn::AttentionParams& p, void* buffer);

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

  QuantizedProblem(const Case& c, const Tensors<T, T>& tensors, dlattn::Precision precision);

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
  reference::Problem head(int batch, int head) const;

 private:
  void set_queries(int entry, int batch, int start, int head, reference::Problem* p) const;
};

// In quantized_case.cpp, as compare.h says.
extern template struct QuantizedProblem<__half>;
extern template struct QuantizedProblem<__nv_bfloat16>;

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
