// wmma8 of precisions int8_fp8 and int8_fp16, on keys that the CPU backend quantised. Expected is
// what cpu/forward/quantized.cpp defines, in float64: once as it stands, and once with
// probabilities rounded as the kernel rounds them.
#include "attention_test.h"
#include "core/backend.h"
#include "core/problem/quantized.h"
#include "cpu/quantize/rows.h"
#include "cuda/forward/wmma8/int8.cuh"
#include "value_cases.h"
#include "wmma_cases.h"

namespace {

using dlattn::AttentionParams;
using dlattn::Precision;
using dlattn::QuantizedView;
using simt::Case;
using simt::kCausal;
using simt::kFull;
using simt::kTopLeft;
using simt::Layout;

constexpr std::string_view kFamily = "wmma8";
constexpr int kBlock = dlattn::quantized_block(Precision::kInt8Fp8, 128);
static_assert(kBlock == dlattn::quantized_block(Precision::kInt8Fp16, 128));

// Values that are not as others.
enum class Special {
  kNone,
  kNanKey,
  kNanKeys,
  kNanQuery,
  kZeroQuery,
  kLargeValues,
  kLargestValues,
  kLargestSums,
  kWideScores
};

struct Int8Case {
  Case problem;
  Special special = Special::kNone;
  bool hostile = false;  // lengths that the CPU backend refuses

  std::string name() const {
    static const char* const kNames[] = {"",
                                         " nan key",
                                         " nan keys",
                                         " nan query",
                                         " zero query",
                                         " large values",
                                         " largest values",
                                         " largest sums",
                                         " wide scores"};
    return problem.name() + kNames[static_cast<int>(special)];
  }
};

// The memory that quantize_kv() writes to: no byte more, poisoned.
struct Buffer {
  std::unique_ptr<unsigned char, void (*)(void*)> memory{nullptr, std::free};
  std::int64_t bytes = 0;

  explicit Buffer(const AttentionParams& p)
      : bytes(dlattn::quantized_layout(dlattn::keys_of(p)).bytes) {
    const auto size = static_cast<std::size_t>(std::max<std::int64_t>(bytes, 1));
    memory.reset(static_cast<unsigned char*>(
        std::aligned_alloc(dlattn::kWorkspaceAlignment, (size + dlattn::kWorkspaceAlignment - 1) /
                                                            dlattn::kWorkspaceAlignment *
                                                            dlattn::kWorkspaceAlignment)));
    std::memset(memory.get(), 0xFF, static_cast<std::size_t>(bytes));
  }
  void quantize(const AttentionParams& p) const {
    dlattn::QuantizeParams keys = dlattn::keys_of(p);
    keys.quantized_kv = memory.get();
    dlattn::cpu::quantize_kv(keys, 1);
  }
  // Some numbers, where there is nothing that could be quantised.
  void fill(const AttentionParams& p) const {
    const dlattn::QuantizedLayout layout = dlattn::quantized_layout(dlattn::keys_of(p));
    std::mt19937 random(1);
    for (std::int64_t i = layout.k; i < layout.k_scale; ++i)
      memory.get()[i] = static_cast<unsigned char>(random() & 0xBF);  // e4m3, or fp16, below 2
    for (std::int64_t i = layout.k_scale; i < layout.bytes; i += 4) {
      const float scale = 0.002f * static_cast<float>(1 + random() % 4);
      std::memcpy(memory.get() + i, &scale, sizeof scale);
    }
  }
};

void run_kernel(int head_dim_tile, const AttentionParams& params, const QuantizedView& view,
                const dlattn::LaunchShape& shape) {
  simt::with_instance<kFamily, std::int8_t>(head_dim_tile, [&](auto tile) {
    const auto run = [&](auto general) {
      if (params.precision == Precision::kInt8Fp16) {
        if constexpr (!general || dlattn::wmma8::has_general(tile, 2))
          dlattn::wmma8::int8_kernel<tile, general, Precision::kInt8Fp16>(params, shape, view);
        return;
      }
      dlattn::wmma8::int8_kernel<tile, general, Precision::kInt8Fp8>(params, shape, view);
    };
    if (dlattn::wmma8::is_general(params, shape.copy_bytes)) return run(std::true_type());
    run(std::false_type());
  });
}

// Expected of a row.
struct Row {
  std::vector<double> exact, rounded;  // out; the latter with P as the kernel rounds it
  double lse = -INFINITY;
  int keys = 0;      // that it sees
  bool nan = false;  // of which one is NaN, or it is
};

template <typename Number>  // Float8 or Half
double rounded_to(double x) {
  Number number;
  dlattn::cpu::from_float(static_cast<float>(x), &number);
  return dlattn::cpu::to_float(number);
}

// One head of one sequence, dequantised.
template <typename T>
class Reference {
 public:
  Reference(const Case& c, const simt::Tensors<T>& t, const AttentionParams& p, int batch, int head)
      : c_(c), p_(p), batch_(batch), head_(head), problem_(simt::make_problem(c, t, batch, head)) {
    const dlattn::QuantizedLayout layout = dlattn::quantized_layout(dlattn::keys_of(p));
    const QuantizedView view = dlattn::view_of(layout, p.quantized_kv, c.varlen());
    columns_ = layout.columns;
    const int head_kv = head / (c.num_heads / c.num_heads_kv), start = c.start_k(batch);
    const std::int64_t at = c.batch_index(batch) * view.batch_stride + head_kv * view.head_stride +
                            start * std::int64_t{columns_};
    k_ = reinterpret_cast<const std::int8_t*>(view.k) + at;
    v_ = view.v + at * dlattn::value_bytes(p.precision);
    const std::int64_t scale_at = c.batch_index(batch) * view.scale_batch_stride +
                                  head_kv * view.scale_head_stride +
                                  (c.varlen() ? dlattn::first_block(start, batch, kBlock) : 0);
    k_scale_ = view.k_scale + scale_at, v_scale_ = view.v_scale + scale_at;
    shift_ = view.k_shift + batch * view.shift_batch_stride + head_kv * view.shift_head_stride;
  }

  int rows() const { return problem_.seqlen_q; }
  double v(int j, int d) const {
    const int at = j * columns_ + dlattn::value_place(p_.precision, d);
    const float stored = of_half() ? dlattn::cpu::to_float(dlattn::cpu::Half{
                                         reinterpret_cast<const std::uint16_t*>(v_)[at]})
                                   : dlattn::cpu::to_float(dlattn::cpu::Float8{v_[at]});
    return static_cast<double>(stored) * v_scale_[j / kBlock];
  }

  Row row(int i) const {
    const dlattn::cpu::Row16 from(p_.q, c_.batch_index(batch_), c_.start_q(batch_) + i, head_);
    std::vector<float> x(static_cast<std::size_t>(columns_));
    double with_shift = 0.0;
    for (int d = 0; d < c_.head_dim; ++d) {
      x[d] = from[d];
      with_shift += static_cast<double>(x[d]) * shift_[d];
    }
    dlattn::cpu::rotate(x.data(), columns_);
    const dlattn::Rounding rounding =
        dlattn::rounding_to_int8(dlattn::cpu::largest_magnitude(x.data(), columns_));
    Row row;
    row.exact.assign(c_.dim_v(), 0.0), row.rounded = row.exact;
    std::vector<double> scores;
    std::vector<int> seen;
    for (int j = 0; j < problem_.seqlen_k; ++j) {
      if (!dlattn::contains<std::int64_t>(problem_.positions.row(i), j)) continue;
      if (!problem_.mask.empty() && !problem_.mask[i * problem_.seqlen_k + j]) continue;
      long product = 0;
      for (int d = 0; d < columns_; ++d)
        product += dlattn::cpu::to_int8(x[d], rounding) * long{k_[j * columns_ + d]};
      const double scale = static_cast<double>(rounding.scale) * columns_ * k_scale_[j / kBlock];
      const double bias = problem_.bias.empty() ? 0.0 : problem_.bias[i * problem_.seqlen_k + j];
      if (bias == -INFINITY) continue;
      scores.push_back(static_cast<double>(product) * scale * p_.softmax_scale + bias);
      seen.push_back(j);
      row.nan |= std::isnan(scale);
    }
    row.keys = static_cast<int>(seen.size());
    finish(scores, seen, with_shift * p_.softmax_scale, &row);
    return row;
  }

 private:
  bool of_half() const { return p_.precision == Precision::kInt8Fp16; }

  void finish(const std::vector<double>& scores, const std::vector<int>& seen, double shift,
              Row* row) const {
    if (row->nan) return;
    const double sink = problem_.sink ? *problem_.sink : -INFINITY;
    if (seen.empty()) {
      row->lse = sink;
      return;
    }
    const double largest = *std::max_element(scores.begin(), scores.end());
    double sum = 0.0;
    for (const double score : scores) sum += std::exp(score - largest);
    const double keys = largest + std::log(sum) + shift, top = std::max(keys, sink);
    row->lse = top + std::log(std::exp(keys - top) + std::exp(sink - top));
    const double weight = std::exp(keys - row->lse) / sum;
    const int tile_keys = dlattn::wmma8::tile_shape(columns_).block_n;
    for (std::size_t n = 0; n < seen.size();) {
      const int tile = seen[n] / tile_keys;
      std::size_t end = n;
      double tile_max = -INFINITY;
      for (; end < seen.size() && seen[end] / tile_keys == tile; ++end)
        tile_max = std::max(tile_max, scores[end]);
      for (; n < end; ++n) {
        const double exact = std::exp(scores[n] - largest);
        const double scaled = 64.0 * std::exp(scores[n] - tile_max);
        const double rounded = (of_half() ? rounded_to<dlattn::cpu::Half>(scaled)
                                          : rounded_to<dlattn::cpu::Float8>(scaled)) /
                               64.0 * std::exp(tile_max - largest);
        for (int d = 0; d < c_.dim_v(); ++d) {
          row->exact[d] += exact * weight * v(seen[n], d);
          row->rounded[d] += rounded * weight * v(seen[n], d);
        }
      }
    }
  }

  const Case& c_;
  const AttentionParams& p_;
  int batch_, head_, columns_;
  simt::reference::Problem problem_;
  const std::int8_t* k_;
  const std::uint8_t* v_;
  const float *k_scale_, *v_scale_, *shift_;
};

// Relative errors by the root of the sum of squares.
struct Relative {
  double error = 0.0, size = 0.0;

  void add(double got, double expected) {
    const double d = simt::distance(got, expected);
    error += d * d, size += expected * expected;
  }
  double value() const { return error == 0.0 ? 0.0 : std::sqrt(error / size); }
};

template <typename T>
void set_special(Special special, const Case& c, const simt::Tensors<T>& t) {
  constexpr int kKey = 70, kQuery = 3;
  const auto fill = [](const simt::Tensor<T>& x, int row, float value) {
    for (int h = 0; h < x.size(2); ++h) x.at(0, row, h, 1) = static_cast<T>(value);
  };
  const auto scale = [](const simt::Tensor<T>& x, float factor) {
    x.for_each([=](T& e) { e = static_cast<T>(static_cast<float>(e) * factor); });
  };
  switch (special) {
    case Special::kNone:
      return;
    case Special::kNanKey:
      return fill(t.k, kKey, NAN);
    case Special::kNanKeys:
      for (int j = 0; j < c.seqlen_k; ++j) fill(t.k, j, NAN);
      return;
    case Special::kNanQuery:
      return fill(t.q, kQuery, NAN);
    case Special::kZeroQuery:
      for (int d = 0; d < c.head_dim; ++d) t.q.at(0, kQuery, 0, d) = static_cast<T>(0.0f);
      return;
    case Special::kLargeValues:
      return scale(t.v, sizeof(T) == 2 && std::is_same_v<T, half> ? 8e3f : 2e35f);
    case Special::kLargestValues:  // of bfloat16 whose scale is its own
      return t.v.for_each([](T& e) { e = static_cast<T>(3.2e38f); });
    case Special::kLargestSums:  // all probabilities are 64, all values 15 of their scales
      t.q.for_each([](T& e) { e = static_cast<T>(0.0f); });
      return t.v.for_each([](T& e) { e = static_cast<T>(-7.5f); });
    case Special::kWideScores:
      return scale(t.q, 100.0f);
  }
}

class Int8Tests {
 public:
  explicit Int8Tests(const simt::Arguments& arguments) : filter_(arguments.filter()) {}

  template <typename T>
  void run(const Int8Case& given, Precision precision) {
    const Case& c = given.problem;
    constexpr dlattn::DType kDType = simt::DTypeOf<T>::value;
    const std::string name =
        std::string("wmma8 ") +
        (precision == Precision::kInt8Fp8 ? "int8" : dlattn::to_string(precision)) + " " +
        dlattn::to_string(kDType) + " " + given.name();
    if (name.find(filter_) == std::string::npos) return;
    simt::Tensors<T> t = simt::make_tensors<T, T>(c);
    set_special(given.special, c, t);
    AttentionParams params = simt::make_params(c, t, kDType, kDType);
    params.precision = precision;
    const Buffer buffer(params);
    params.quantized_kv = buffer.memory.get();
    given.hostile ? buffer.fill(params) : buffer.quantize(params);
    dlattn::core::validate(params);
    dlattn::Options options;
    options.kernel = kFamily;
    const bool general = params.bias.data || params.mask.data;
    if (general && precision == Precision::kInt8Fp16 && std::max(c.head_dim, c.dim_v()) > 128)
      return;
    const dlattn::Plan plan = dlattn::core::make_plan(params, simt::ada(), options);
    if (!simt::is_built(dlattn::DType::kInt8, plan.head_dim_tile)) return;
    const bool overlap = c.sequences_overlap();
    if (overlap && simt::kThreadSanitizer) return;
    const simt::HangGuard guard(name);
    std::string trouble;
    std::vector<unsigned char> first;
    for (const simt::Schedule schedule : simt::schedules()) {
      launch(t, params, plan, buffer, schedule);
      const std::vector<unsigned char> out = t.out.bytes();
      if (first.empty()) first = out;
      if (out != first && !overlap) trouble = "out depends on the order of threads";
      if (!t.out.gaps_intact() || !t.lse.gaps_intact()) trouble = "a write outside out or lse";
      if (!simt::other_rows_intact(c, t)) trouble = "a write to rows of no sequence";
    }
    const Errors errors = compare(c, t, params, &trouble);
    const std::vector<unsigned char> lse = t.lse.bytes();
#if defined(SIMT_CPU_BACKEND)
    if (!given.hostile) compare_with_cpu(name, c, &t, params, errors.exact_bound);
#endif
    report(name, errors, rounding_bound<T>(), trouble);
    if (simt::kSequencesAlone && !given.hostile && (c.batch_size > 1 || c.varlen()))
      run_alone(name, c, &t, params, options, first, lse);
  }

  int finish() const {
    std::printf("%d passed, %d failed\n", passed_, failed_);
    return failed_ != 0 || passed_ == 0;
  }

 private:
  template <typename T>
  static constexpr double rounding_bound() {
    return std::is_same_v<T, half> ? 1e-3 : 2e-3;
  }

  struct Errors {
    double exact, rounded, lse;
    double exact_bound;
  };

  template <typename T>
  void launch(simt::Tensors<T>& t, const AttentionParams& params, const dlattn::Plan& plan,
              const Buffer& buffer, simt::Schedule schedule) const {
    t.out.poison(), t.lse.poison();
    if (plan.grid == 0) return;
    simt::Launch threads{dim3(static_cast<unsigned>(plan.grid)), dim3(plan.num_warps * 32),
                         static_cast<std::size_t>(plan.smem_bytes), schedule};
    // The launch ahead is the one that quantises.
    const auto ahead = [&] {
      simt::rewrite(t);
      for (std::int64_t i = 0; i < buffer.bytes; ++i) {
        volatile unsigned char& byte = buffer.memory.get()[i];
        byte = byte;
      }
    };
    threads.grid_ahead = [](void* context) {
      if (simt::kThreadSanitizer) (*static_cast<decltype(ahead)*>(context))();
    };
    threads.grid_ahead_context = const_cast<void*>(static_cast<const void*>(&ahead));
    const QuantizedView view = dlattn::view_of(dlattn::quantized_layout(dlattn::keys_of(params)),
                                               params.quantized_kv, params.cu_seqlens_k);
    const dlattn::LaunchShape shape = dlattn::make_launch_shape(params, plan);
    simt::launch(threads, [&] { run_kernel(plan.head_dim_tile, params, view, shape); });
  }

  template <typename T>
  Errors compare(const Case& c, const simt::Tensors<T>& t, const AttentionParams& params,
                 std::string* trouble) const {
    Relative exact, rounded;
    double lse = 0.0;
    int fewest = INT_MAX;
    for (int batch = 0; batch < c.batch_size; ++batch) {
      const int at = c.batch_index(batch), start = c.start_q(batch);
      for (int head = 0; head < c.num_heads; ++head) {
        const Reference<T> reference(c, t, params, batch, head);
        for (int i = 0; i < reference.rows(); ++i) {
          if (c.varlen() && c.owners(start + i) > 1) continue;
          const Row row = reference.row(i);
          const float row_lse = c.lse ? t.lse.at(at, head, start + i, 0) : 0.0f;
          if (row.keys > 0) fewest = std::min(fewest, row.keys);
          for (int d = 0; d < c.dim_v(); ++d) {
            const double out = static_cast<float>(t.out.at(at, start + i, head, d));
            if (row.nan) {
              if (!std::isnan(out)) *trouble = "a row that sees NaN is none";
              continue;
            }
            const auto as_stored = [](double x) {
              return static_cast<double>(static_cast<float>(static_cast<T>(static_cast<float>(x))));
            };
            if (row.keys == 0 && out != 0.0) *trouble = "a row that sees nothing is not 0";
            if (row.keys == 1 && !c.sinks && out != as_stored(row.exact[d]))
              *trouble = "a row that sees one key is not its value";
            exact.add(out, as_stored(row.exact[d]));
            rounded.add(out, as_stored(row.rounded[d]));
          }
          if (!c.lse) continue;
          if (row.nan) {
            if (!std::isnan(row_lse)) *trouble = "the lse of a row that sees NaN is none";
            continue;
          }
          const double size = std::isfinite(row.lse) ? std::max(1.0, std::abs(row.lse)) : 1.0;
          lse = std::max(lse, simt::distance(row_lse, row.lse) / size);
        }
      }
    }
    // Rounding errors of many probabilities average out; those of fp16 are as out's.
    const double bound = params.precision == Precision::kInt8Fp16 ? rounding_bound<T>()
                         : fewest >= kBlock                       ? 0.027
                                                                  : 0x1p-4;
    return {exact.value(), rounded.value(), lse, bound};
  }

#if defined(SIMT_CPU_BACKEND)
  // The CPU backend's results, which it leaves in the tensors, beside the kernel's.
  template <typename T>
  void compare_with_cpu(const std::string& name, const Case& c, simt::Tensors<T>* t,
                        const AttentionParams& params, double bound) {
    const auto values = [](const auto& tensor) {
      std::vector<float> all;
      tensor.for_each([&](const auto& x) { all.push_back(static_cast<float>(x)); });
      return all;
    };
    const std::vector<float> out = values(t->out), lse = values(t->lse);
    t->out.poison(), t->lse.poison();
    dlattn::Plan plan;
    dlattn::cpu::plan(params, dlattn::cpu::device_info(), {}, &plan);
    dlattn::cpu::forward(params, plan);
    const std::vector<float> cpu_out = values(t->out), cpu_lse = values(t->lse);
    Relative error;
    double lse_error = 0.0;
    const auto both_nan = [](float a, float b) { return std::isnan(a) && std::isnan(b); };
    for (std::size_t i = 0; i < out.size(); ++i) {
      if (!both_nan(out[i], cpu_out[i])) error.add(out[i], cpu_out[i]);
    }
    for (std::size_t i = 0; c.lse && i < lse.size(); ++i) {
      if (both_nan(lse[i], cpu_lse[i])) continue;
      const double size = std::isfinite(lse[i]) ? std::max(1.0f, std::abs(lse[i])) : 1.0;
      lse_error = std::max(lse_error, simt::distance(lse[i], cpu_lse[i]) / size);
    }
    char text[120];
    std::snprintf(text, sizeof text, "error %.2e (bound %.2e), lse %.2e", error.value(), bound,
                  lse_error);
    count(error.value() <= bound && lse_error <= 1e-5, name + " beside the CPU backend", text);
  }
#endif

  // Each sequence by itself has the same bits.
  template <typename T>
  void run_alone(const std::string& name, const Case& c, simt::Tensors<T>* t,
                 const AttentionParams& params, const dlattn::Options& options,
                 const std::vector<unsigned char>& expected,
                 const std::vector<unsigned char>& lse) {
    bool same = true;
    for (int b = 0; b < c.batch_size; ++b) {
      AttentionParams own = simt::alone<T, T>(c, params, b);
      const Buffer buffer(own);
      own.quantized_kv = buffer.memory.get();
      buffer.quantize(own);
      launch(*t, own, dlattn::core::make_plan(own, simt::ada(), options), buffer,
             simt::schedules()[0]);
      // The rows that it wrote have the same bits as before.
      const std::vector<unsigned char> out_now = t->out.bytes(), lse_now = t->lse.bytes();
      const auto agree = [](const std::vector<unsigned char>& now,
                            const std::vector<unsigned char>& before, std::size_t bytes) {
        for (std::size_t i = 0; i < now.size(); i += bytes) {
          const bool written = std::any_of(&now[i], &now[i] + bytes,
                                           [](unsigned char byte) { return byte != 0xFF; });
          if (written && std::memcmp(&now[i], &before[i], bytes) != 0) return false;
        }
        return true;
      };
      same &= agree(out_now, expected, sizeof(T)) && agree(lse_now, lse, sizeof(float));
    }
    count(same, name + " alone", same ? "" : "depends on the other sequences");
  }

  // `rounded`: the bound of the error against P rounded alike. The remaining errors are those of
  // tensor cores' sums, and of results that were rounded to the other side by a hair's breadth,
  // which are coarser in bfloat16.
  void report(const std::string& name, const Errors& e, double rounded,
              const std::string& trouble) {
    constexpr double kLse = 1e-5;
    const bool ok =
        e.exact <= e.exact_bound && e.rounded <= rounded && e.lse <= kLse && trouble.empty();
    char text[200];
    std::snprintf(text, sizeof text, "error %.2e (bound %.2e), as rounded %.2e, lse %.2e %s",
                  e.exact, e.exact_bound, e.rounded, e.lse, trouble.c_str());
    count(ok, name, text);
  }
  void count(bool ok, const std::string& name, const std::string& text) {
    ++(ok ? passed_ : failed_);
    std::printf("%s %s: %s\n", ok ? "ok  " : "FAIL", name.c_str(), text.c_str());
    std::fflush(stdout);
  }

  std::string filter_;
  int passed_ = 0, failed_ = 0;
};

// Without what is not defined for 8-bit products.
Case of_precision(Case c) {
  c.alibi = false;
  c.softcap = 0.0;
  return c;
}

std::vector<Int8Case> all_cases() {
  const Case heads = {40, 90, 64, kCausal, 4, 2};
  const Case square = {200, 207, 64, kCausal, 2, 1};
  std::vector<Int8Case> cases = {
      // Lengths and head dims at edges, and beyond them.
      {{1, 1, 1, kFull}},
      {{9, 9, 40, kCausal}},
      {{12, 12, 72, kFull}},
      {{63, 64, 128, kFull}},
      {{65, 65, 64, kCausal}},
      {{12, 503, 128, kCausal}},
      {{70, 503, 64, kFull, 2, 1}},
      {{33, 70, 3, kTopLeft, 2, 1, Layout::kAlign2, 72}},
      {{33, 70, 72, kCausal, 2, 1, Layout::kAlign8, 5}},
      {{20, 130, 128, kFull, 2, 1, Layout::kPacked, 0, 2}},
      // Each row of 40 heads has an lse and a sink of its own.
      {simt::with(heads, [](Case& c) { c.sinks = true; })},
      {simt::with(square, [](Case& c) { c.window_left = 5, c.sinks = true; })},
      {square, Special::kNanKey},
      {{100, 40, 128, kCausal, 2, 1}, Special::kNanKeys},
      {heads, Special::kNanQuery},
      {heads, Special::kZeroQuery},
      {{20, 300, 64, kFull}, Special::kLargeValues},
      {{1, 1, 64, kFull}, Special::kLargestValues},
      {{20, 300, 64, kFull}, Special::kLargestSums},
      {{20, 300, 128, kFull}, Special::kLargestSums},
      {{40, 300, 128, kCausal}, Special::kWideScores},
  };
  for (const double rise : {0.3, 4.0, -20.0})
    cases.push_back({simt::with({20, 300, 64, kFull}, [=](Case& c) { c.rise = rise; })});
  for (const simt::ScoreLayout layout : {simt::ScoreLayout::kRows, simt::ScoreLayout::kOneRow,
                                         simt::ScoreLayout::kOneKey, simt::ScoreLayout::kColumns}) {
    cases.push_back({simt::with({70, 150, 128, kCausal, 2, 1, Layout::kBshd, 0, 2},
                                [=](Case& c) { c.mask = true, c.score_layout = layout; })});
    for (const simt::Bias bias : {simt::Bias::kOwnDType, simt::Bias::kFloat32}) {
      cases.push_back({simt::with({70, 150, 64, kCausal, 2, 1, Layout::kBshd, 0, 2}, [=](Case& c) {
        c.bias = bias, c.mask = bias == simt::Bias::kFloat32, c.score_layout = layout;
      })});
    }
  }
  // The largest tile, two tiles of which share scales; their walk begins with either of the two.
  cases.push_back({{1, 1, 256, kFull}});
  cases.push_back({{17, 97, 200, kFull, 2, 1, Layout::kBshd, 256, 2}});
  cases.push_back({{70, 150, 256, kCausal, 2, 1}});
  cases.push_back({{33, 130, 136, kTopLeft, 2, 1, Layout::kAlign2, 40}});
  cases.push_back({simt::with({90, 400, 256, kFull}, [](Case& c) { c.rise = 0.3; })});
  cases.push_back({{20, 300, 256, kFull}, Special::kLargestSums});
  cases.push_back({simt::with({65, 260, 256, kCausal, 2, 1}, [](Case& c) {
    c.mask = true, c.bias = simt::Bias::kFloat32, c.sinks = true;
  })});
  cases.push_back({simt::with(simt::varlen({1, 1, 256, kCausal, 2, 1}, {40, 0, 64}, {70, 17, 129}),
                              [](Case& c) { c.bias = simt::Bias::kOwnDType; })});
  for (const Case& c : simt::extreme_bias_cases({20, 200, 64, kFull, 2, 1})) cases.push_back({c});
  // Scores that rise by more than a tile's probabilities can be apart.
  cases.push_back({simt::with({20, 300, 64, kFull},
                              [](Case& c) { c.bias = simt::Bias::kFloat32, c.bias_rise = 3.0; })});
  for (const Case& c : simt::wmma_cases(simt::kThreadSanitizer)) {
    // cu_seqlens that are not what they should be; slices are.
    const bool hostile = !c.lengths.empty() && c.lengths.find("slice") == std::string::npos;
    cases.push_back({of_precision(c), Special::kNone, hostile});
  }
  return cases;
}

}  // namespace

int main(int argc, char** argv) {
  const simt::Arguments arguments(argc, argv);
  Int8Tests tests(arguments);
  int number = 0;
  for (const Int8Case& c : all_cases()) {
    const bool bfloat16 = c.special == Special::kLargeValues ||
                          c.special == Special::kLargestValues || number++ % 2 == 0;
    for (const Precision precision : {Precision::kInt8Fp8, Precision::kInt8Fp16}) {
      // They differ in what is multiplied behind the softmax alone: barriers are the same.
      if (simt::kThreadSanitizer && precision == Precision::kInt8Fp16 && number % 3 != 0) continue;
      if (bfloat16)
        tests.run<__nv_bfloat16>(c, precision);
      else
        tests.run<half>(c, precision);
    }
  }
  return tests.finish();
}
