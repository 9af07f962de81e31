// quantize_kv() of the CPU backend against float64, where its parts lie, and plans for GPUs.
#include "dlattn/quantize.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "check.h"
#include "core/plan/plan.h"
#include "core/problem/limits.h"
#include "core/problem/quantized.h"
#include "core/problem/rounding.h"
#include "cpu/aligned_memory.h"
#include "cpu/convert.h"
#include "devices.h"

namespace {

using namespace dlattn;

struct Problem {
  int batch_size = 1, seqlen_k = 1, heads = 1, head_dim = 64, head_dim_v = 64;
  Precision precision = Precision::kInt8Fp8;
  DType dtype = DType::kFloat16;
  std::vector<std::int32_t> cu_seqlens_k = {}, seqused_k = {};
};

// 16-bit numbers, [rows of all sequences][heads][columns].
struct Tensor16 {
  std::vector<std::uint16_t> bits;
  DType dtype;

  double operator[](std::size_t i) const {
    return dtype == DType::kFloat16 ? cpu::to_float(cpu::Half{bits[i]})
                                    : cpu::to_float(cpu::BFloat16{bits[i]});
  }
  void set(std::size_t i, float x) {
    cpu::Half half;
    cpu::from_float(x, &half);
    bits[i] = half.bits;
    if (dtype == DType::kBFloat16) bits[i] = static_cast<std::uint16_t>(bits_of(x) >> 16);
  }
};

Tensor16 draw(DType dtype, std::size_t count, double mean, std::mt19937* random) {
  Tensor16 x{std::vector<std::uint16_t>(count), dtype};
  std::normal_distribution<double> normal(mean, 1.5);
  for (std::size_t i = 0; i < count; ++i) x.set(i, static_cast<float>(normal(*random)));
  return x;
}

struct Free {
  void operator()(void* p) const { cpu::free_aligned(p); }
};

struct Quantized {
  Tensor16 k, v;
  QuantizeParams params;
  QuantizedLayout layout;
  std::unique_ptr<void, Free> buffer;
  QuantizedView view;
};

// The buffer holds NaN beforehand.
Quantized make(const Problem& problem) {
  Quantized q;
  const bool varlen = !problem.cu_seqlens_k.empty();
  const std::int64_t rows =
      varlen ? problem.cu_seqlens_k.back() : problem.batch_size * problem.seqlen_k;
  std::mt19937 random(static_cast<unsigned>(rows + problem.head_dim));
  const auto count = [&](int columns) {
    return static_cast<std::size_t>(rows * problem.heads * columns);
  };
  q.k = draw(problem.dtype, count(problem.head_dim), 3.0, &random);
  q.v = draw(problem.dtype, count(problem.head_dim_v), 0.5, &random);
  QuantizeParams& p = q.params;
  p.precision = problem.precision;
  const auto view = [&](const Tensor16& x, int columns) {
    const std::int64_t row = std::int64_t{problem.heads} * columns;
    return TensorView{x.bits.data(), problem.seqlen_k * row, row, columns, 1, problem.dtype};
  };
  p.k = view(q.k, problem.head_dim), p.v = view(q.v, problem.head_dim_v);
  p.batch_size = problem.batch_size, p.seqlen_k = problem.seqlen_k;
  p.num_heads_kv = problem.heads;
  p.head_dim = problem.head_dim, p.head_dim_v = problem.head_dim_v;
  if (varlen) p.cu_seqlens_k = problem.cu_seqlens_k.data(), p.total_k = rows;
  if (!problem.seqused_k.empty()) p.seqused_k = problem.seqused_k.data();
  q.layout = quantized_layout(p);
  CHECK_EQ(quantized_kv_bytes(p), q.layout.bytes);
  const auto bytes = static_cast<std::size_t>(q.layout.bytes);
  q.buffer.reset(cpu::aligned_memory(bytes, kWorkspaceAlignment));
  std::memset(q.buffer.get(), 0xFF, bytes);
  p.quantized_kv = q.buffer.get();
  q.view = view_of(q.layout, q.buffer.get(), varlen);
  return q;
}

float from_e4m3(std::uint8_t byte) {
  return cpu::to_float(cpu::Float8{byte});
}

// Half of what numbers of e4m3 as large as x are apart, and of fp16.
double half_step_of_e4m3(double x) {
  return std::exp2(std::max(std::floor(std::log2(std::abs(x))), -6.0) - 4.0);
}
double half_step_of_fp16(double x) {
  return std::exp2(std::max(std::floor(std::log2(std::abs(x))), -14.0) - 11.0);
}

// The stored number of v for a column, in the row that begins at number `row`.
float stored_value(const Quantized& q, std::int64_t row, int column) {
  const std::int64_t at = row + value_place(q.params.precision, column);
  if (q.params.precision != Precision::kInt8Fp16) return from_e4m3(q.view.v[at]);
  return cpu::to_float(cpu::Half{reinterpret_cast<const std::uint16_t*>(q.view.v)[at]});
}

bool is_power_of_two(float x) {
  return (bits_of(x) & 0x7fffff) == 0 && x > 0.0f;
}

// The rotation, in float64 and by its definition: element (i, j) of a Hadamard matrix is negative
// where i and j have an odd number of ones in common.
std::vector<double> rotated(const std::vector<double>& x) {
  const int columns = static_cast<int>(x.size());
  std::vector<double> y(x.size());
  for (int i = 0; i < columns; ++i) {
    for (int j = 0; j < columns; ++j) {
      const bool odd = __builtin_popcount(static_cast<unsigned>(i & j)) % 2 != 0;
      y[i] += (odd != rotation_negates(j) ? -x[j] : x[j]) / columns;
    }
  }
  return y;
}

// The largest errors of one head of one sequence, in half steps: of rotated k, of k and of v.
struct Errors {
  double rotated_k = 0.0, k = 0.0, v = 0.0;
  bool powers_of_two = true, zeros_beyond = true;
};

struct HeadAt {
  std::int64_t sequence, head, entry, start, count;
};

void check_shift(const Quantized& q, const HeadAt& at) {
  const QuantizeParams& p = q.params;
  const float* const shift =
      q.view.k_shift + at.sequence * q.view.shift_batch_stride + at.head * q.view.shift_head_stride;
  const std::int64_t sampled = std::min<std::int64_t>(at.count, 64);
  for (std::int64_t c = 0; c < q.layout.columns; ++c) {
    double mean = 0.0;
    for (std::int64_t i = 0; i < sampled && c < p.head_dim; ++i) {
      const std::int64_t row = at.entry * p.seqlen_k + at.start + i * at.count / sampled;
      mean += q.k[(row * p.num_heads_kv + at.head) * p.head_dim + c] / sampled;
    }
    CHECK_FOR(std::abs(shift[c] - mean) <= 1e-5, "the mean of column " + std::to_string(c));
  }
}

Errors errors_of(const Quantized& q, const HeadAt& at) {
  const QuantizeParams& p = q.params;
  const QuantizedLayout& layout = q.layout;
  Errors errors;
  const float* const shift =
      q.view.k_shift + at.sequence * q.view.shift_batch_stride + at.head * q.view.shift_head_stride;
  const std::int64_t scales =
      at.entry * q.view.scale_batch_stride + at.head * q.view.scale_head_stride +
      (p.cu_seqlens_k ? first_block(at.start, at.sequence, layout.block_n) : 0);
  const bool int8 = multiplies_integers(p.precision);
  for (std::int64_t i = 0; i < at.count; ++i) {
    const std::int64_t from = (at.entry * p.seqlen_k + at.start + i) * p.num_heads_kv + at.head;
    const std::int64_t to = at.entry * q.view.batch_stride + at.head * q.view.head_stride +
                            (at.start + i) * layout.columns;
    const float k_scale = q.view.k_scale[scales + i / layout.block_n];
    const float v_scale = q.view.v_scale[scales + i / layout.block_n];
    errors.powers_of_two &= is_power_of_two(v_scale) && (int8 || is_power_of_two(k_scale));
    std::vector<double> k(layout.columns), stored(layout.columns);
    double row_steps = 0.0;  // squares of the half steps
    for (std::int64_t c = 0; c < p.head_dim; ++c) k[c] = q.k[from * p.head_dim + c] - shift[c];
    const std::vector<double> exact = rotated(k);
    for (int c = 0; c < layout.columns; ++c) {
      const std::uint8_t byte = q.view.k[to + c];
      const double number = int8 ? static_cast<std::int8_t>(byte) : from_e4m3(byte);
      stored[c] = number * k_scale;
      const double half_step = (int8 ? 0.5 : half_step_of_e4m3(exact[c] / k_scale)) * k_scale;
      row_steps += half_step * half_step;
      errors.rotated_k = std::max(errors.rotated_k, std::abs(stored[c] - exact[c]) / half_step);
    }
    // Rotated back: transposed, times the number of columns. It keeps lengths up to its square
    // root, so that an error of k is at most that of all columns together.
    for (int c = 0; c < layout.columns; ++c) {
      double back = 0.0;
      for (int j = 0; j < layout.columns; ++j)
        back += __builtin_popcount(static_cast<unsigned>(c & j)) % 2 ? -stored[j] : stored[j];
      if (rotation_negates(c)) back = -back;
      const double most = std::sqrt(row_steps * layout.columns);
      errors.k = std::max(errors.k, std::abs(back - k[c]) / most);
    }
    for (int c = 0; c < layout.columns; ++c) {
      const double number = stored_value(q, to, c);
      if (c >= p.head_dim_v) {
        errors.zeros_beyond &= number == 0.0;
        continue;
      }
      const double v = q.v[from * p.head_dim_v + c];
      const double half_step =
          (p.precision == Precision::kInt8Fp16 ? half_step_of_fp16(v / v_scale)
                                               : half_step_of_e4m3(v / v_scale)) *
          v_scale;
      errors.v = std::max(errors.v, std::abs(number * v_scale - v) / half_step);
    }
  }
  return errors;
}

void check(const Problem& problem) {
  const Quantized q = make(problem);
  quantize_kv(q.params);
  const bool varlen = q.params.cu_seqlens_k;
  const std::string what = std::string(to_string(problem.precision)) + ", " +
                           to_string(problem.dtype) + ", " + std::to_string(problem.seqlen_k) +
                           " keys of " + std::to_string(problem.head_dim) + ", " +
                           std::to_string(problem.head_dim_v);
  for (std::int64_t b = 0; b < problem.batch_size; ++b) {
    for (std::int64_t h = 0; h < problem.heads; ++h) {
      HeadAt at{b, h, b, 0, problem.seqlen_k};
      if (varlen) {
        at.entry = 0, at.start = problem.cu_seqlens_k[b];
        at.count = problem.seqused_k.empty() ? problem.cu_seqlens_k[b + 1] - at.start
                                             : problem.seqused_k[b];
      }
      check_shift(q, at);
      const Errors errors = errors_of(q, at);
      // Half a step, and what fp32 is off before it is rounded.
      CHECK_FOR(errors.rotated_k <= 1.001, what + ": " + std::to_string(errors.rotated_k));
      CHECK_FOR(errors.k <= 1.001, what + ": " + std::to_string(errors.k));
      CHECK_FOR(errors.v <= 1.0, what + ": " + std::to_string(errors.v));
      CHECK_FOR(errors.powers_of_two, what);
      CHECK_FOR(errors.zeros_beyond, what);
    }
  }
}

void errors() {
  for (const Precision precision : {Precision::kInt8Fp8, Precision::kFp8, Precision::kInt8Fp16}) {
    for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
      check({2, 130, 3, 64, 64, precision, dtype});
      check({1, 600, 2, 128, 128, precision, dtype});
      check({1, 5, 1, 72, 33, precision, dtype});
      check({1, 65, 2, 1, 17, precision, dtype});
      check({3, 150, 2, 40, 80, precision, dtype, {0, 150, 150, 277}});
      check({2, 300, 1, 64, 64, precision, dtype, {7, 300, 310}, {129, 0}});
    }
  }
}

// Numbers that are not finite, and blocks of zeros.
void special() {
  for (const Precision precision : {Precision::kInt8Fp8, Precision::kFp8, Precision::kInt8Fp16}) {
    const bool int8 = multiplies_integers(precision);
    Problem problem;
    problem.seqlen_k = 300, problem.precision = precision;
    Quantized q = make(problem);
    const int in_second = quantized_block(precision, 64) + 3;
    q.k.set(in_second * 64 + 5, INFINITY);
    q.v.set(in_second * 64 + 5, -INFINITY), q.v.set(in_second * 64 + 6, NAN);
    for (int i = 2 * quantized_block(precision, 64) * 64; i < 300 * 64; ++i) q.v.set(i, 0.0f);
    quantize_kv(q.params);
    const auto k_at = [&](int row, int column) { return q.view.k[row * 64 + column]; };
    if (int8) {
      CHECK(std::isfinite(q.view.k_scale[0]) && std::isnan(q.view.k_scale[1]));
      CHECK(std::isfinite(q.view.k_scale[2]));
    } else {
      // Infinity is in every column of its row, and in no other row.
      for (int c = 0; c < 64; ++c) CHECK(std::isnan(from_e4m3(k_at(in_second, c))));
      for (int c = 0; c < 64; ++c) CHECK(!std::isnan(from_e4m3(k_at(in_second + 1, c))));
      CHECK(is_power_of_two(q.view.k_scale[1]));
    }
    for (int c = 0; c < 64; ++c) {
      const bool nan = std::isnan(stored_value(q, in_second * 64, c));
      CHECK_EQ(nan, c == 5 || c == 6);
    }
    for (int c = 0; c < 64; ++c) CHECK(std::isfinite(q.view.k_shift[c]));
    CHECK(is_power_of_two(q.view.v_scale[2]));
    CHECK_EQ(stored_value(q, 2 * quantized_block(precision, 64) * 64, 0), 0.0f);
  }
}

void layouts() {
  QuantizeParams p;
  p.precision = Precision::kInt8Fp8;
  p.batch_size = 2, p.seqlen_k = 65, p.num_heads_kv = 3, p.head_dim = 64, p.head_dim_v = 40;
  QuantizedLayout layout = quantized_layout(p);
  CHECK_EQ(layout.columns, 64);
  CHECK_EQ(layout.blocks, 2);
  CHECK_EQ(layout.v, 2 * 3 * 65 * 64 + 128);  // rounded up to 256
  CHECK_EQ(layout.k_scale, 2 * layout.v);
  CHECK_EQ(layout.v_scale, layout.k_scale + 256);
  CHECK_EQ(layout.k_shift, layout.v_scale + 256);
  CHECK_EQ(layout.bytes, layout.k_shift + 2 * 3 * 64 * 4);
  CHECK_EQ(quantized_kv_bytes(p), layout.bytes);
  p.precision = Precision::kInt8Fp16;  // v of two bytes
  CHECK_EQ(quantized_layout(p).v, layout.v);
  CHECK_EQ(quantized_layout(p).k_scale, layout.v + 2 * 2 * 3 * 65 * 64);
  for (int c = 0; c < 128; ++c) {
    // A place for each column, within its 16; pairs stay together.
    int columns_there = 0;
    for (int d = 0; d < 128; ++d) columns_there += value_place(p.precision, d) == c;
    CHECK_EQ(columns_there, 1);
    CHECK_EQ(value_place(p.precision, c) / 16, c / 16);
    CHECK_EQ(value_place(p.precision, c) % 2, c % 2);
    CHECK_EQ(value_place(Precision::kInt8Fp8, c), c);
  }
  p.precision = Precision::kInt8Fp8;
  p.head_dim_v = 65;
  CHECK_EQ(quantized_layout(p).columns, 128);
  p.precision = Precision::kFp8;
  CHECK_EQ(quantized_layout(p).blocks, 1);
  const std::int32_t starts[] = {0, 1, 2};
  p.cu_seqlens_k = starts, p.total_k = 300;
  layout = quantized_layout(p);
  CHECK_EQ(layout.rows, 300);
  CHECK_EQ(layout.blocks, 300 / 128 + 2);
  CHECK_EQ(layout.v, 3 * 300 * 128);
  // Whatever the lengths are, blocks of sequences do not meet, and the last one has room.
  for (std::int64_t first = 0; first <= 300; ++first) {
    const std::int64_t blocks = (first + 127) / 128;
    CHECK(first_block(0, 0, 128) + blocks <= first_block(first, 1, 128));
    CHECK(first_block(first, 1, 128) + (300 - first + 127) / 128 <= layout.blocks);
  }
}

QuantizeTask task_of(const QuantizeParams& params) {
  QuantizeTask task;
  static_cast<QuantizeParams&>(task) = params;
  return task;
}

// The kernels for GPUs.
void plans() {
  const DeviceInfo device = test::gpu("NVIDIA L4", 8, 9, 58, 101376);
  Problem problem;
  problem.batch_size = 2, problem.seqlen_k = 129, problem.heads = 3;
  Quantized q = make(problem);
  QuantizeParams& p = q.params;
  p.device.type = DeviceType::kCuda;
  Plan plan = dlattn::plan(p, device);
  CHECK(plan.operation == Operation::kQuantize);
  CHECK(plan.kernel == "key_blocks");
  CHECK(plan.dtype == DType::kInt8);
  CHECK_EQ(plan.head_dim_tile, 64);
  CHECK_EQ(plan.block_n, 64);
  CHECK_EQ(plan.num_warps, 4);
  CHECK_EQ(plan.grid, 2 * 2 * 3 * 3);  // of k and v, each of 2 sequences, 3 heads, 3 blocks
  CHECK(plan.predicted_ns > 2500.0);
  p.precision = Precision::kFp8;
  plan = dlattn::plan(p, device);
  CHECK(plan.dtype == DType::kFloat8E4M3);
  CHECK_EQ(plan.block_n, 96);
  CHECK_EQ(plan.num_warps, 6);
  CHECK_EQ(plan.grid, 2 * 2 * 3 * 2);
  // Thread blocks do several items each in a large problem: 2 * 128 of each of 16 heads, 8 at a
  // time, and of larger ones up to 16.
  QuantizeParams large = p;
  large.precision = Precision::kInt8Fp8;
  large.batch_size = 1, large.seqlen_k = 8192, large.num_heads_kv = 16;
  large.head_dim = large.head_dim_v = 128;
  CHECK_EQ(core::make_plan(task_of(large), device).grid, 16 * 2 * 128 / 8);
  large.batch_size = 8;
  CHECK_EQ(core::make_plan(task_of(large), device).grid, 8 * 16 * 2 * 128 / 16);
  p.seqlen_k = 0;
  CHECK_EQ(dlattn::plan(p, device).grid, 0);
  p.seqlen_k = 129, p.batch_size = 0;
  CHECK_EQ(dlattn::plan(p, device).grid, 0);
  p.batch_size = 1, p.k.row_stride = p.v.row_stride = 0;
  p.seqlen_k = std::int64_t{1} << 31;
  CHECK_THROWS(core::make_plan(task_of(p), device), UnsupportedError,
               "no kernel can run this: key_blocks: seqlen_k is 2147483648; accepted: up to " +
                   std::to_string(core::kMaxSeqlen));
  const DeviceInfo old = test::gpu("NVIDIA A100", 8, 0, 108, 166912);
  p = make(problem).params;
  CHECK_THROWS(
      core::make_plan(task_of(p), old), UnsupportedError,
      "no kernel can run this: key_blocks: needs compute capability 8.9 or later; NVIDIA A100 "
      "has 8.0");
  DeviceInfo translated = device;
  translated.code = 80;
  CHECK_THROWS(
      core::make_plan(task_of(p), translated), UnsupportedError,
      "no kernel can run this: key_blocks: needs code for compute capability 8.9 or later; "
      "this build has for NVIDIA L4 that for 8.0: build with DLATTN_ARCHS=native or all");
  p.quantized_kv = nullptr;
  p.seqlen_k = 0;
  quantize_kv(p);  // on the CPU: there is nothing to write, and nowhere
}

}  // namespace

int main() {
  errors();
  special();
  layouts();
  plans();
  return test::summary();
}
