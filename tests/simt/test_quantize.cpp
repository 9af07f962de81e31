// k and v in 8 bits: the kernels' bytes are the CPU backend's, all of the buffer.
#include <functional>

#include "attention_test.h"
#include "core/backend.h"
#include "cuda/quantize/key_blocks/kernel.cuh"
#include "length_cases.h"
#include "quantized_case.h"

namespace {

using dlattn::Precision;
using simt::Case;
using simt::Layout;
namespace key_blocks = dlattn::quantize::key_blocks;

// Numbers that are not as others, put into k and v.
enum class Values { kUsual, kSpecial, kSmall, kFaint, kLarge, kZero };

struct QuantizeCase {
  Case sizes;  // of its keys
  Values values = Values::kUsual;
  bool hostile = false;  // lengths that the CPU backend refuses
};

// A buffer between guards, all of it the same byte at first.
class Buffer {
 public:
  static constexpr std::size_t kGuard = dlattn::kWorkspaceAlignment;
  static constexpr unsigned char kPoison = 0xA5;

  explicit Buffer(std::int64_t bytes) : bytes_(static_cast<std::size_t>(bytes)) {
    const std::size_t whole = bytes_ + 2 * kGuard;
    memory_.reset(static_cast<unsigned char*>(std::aligned_alloc(kGuard, whole)));
    poison();
  }
  void poison() { std::memset(memory_.get(), kPoison, bytes_ + 2 * kGuard); }
  unsigned char* data() const { return memory_.get() + kGuard; }
  bool guards_intact() const {
    const auto intact = [](const unsigned char* from) {
      return std::all_of(from, from + kGuard, [](unsigned char byte) { return byte == kPoison; });
    };
    return intact(memory_.get()) && intact(data() + bytes_);
  }
  std::size_t first_difference(const Buffer& other) const {
    return std::mismatch(data(), data() + bytes_, other.data()).first - data();
  }
  std::size_t size() const { return bytes_; }

 private:
  struct Free {
    void operator()(unsigned char* p) const { std::free(p); }
  };
  std::size_t bytes_;
  std::unique_ptr<unsigned char, Free> memory_;
};

template <typename T>
struct Keys {
  simt::Tensor<T> k, v;
  std::vector<std::int32_t> cu_seqlens, seqused;
};

template <typename T>
void set_values(Values values, simt::Tensor<T>* x) {
  const auto scale = [&](float by) {
    x->for_each([by](T& at) { at = static_cast<T>(static_cast<float>(at) * by); });
  };
  const bool wide = std::is_same_v<T, __nv_bfloat16>;
  if (values == Values::kSmall) scale(wide ? 0x1p-130f : 0x1p-20f);
  // Means about the least that counts.
  if (values == Values::kFaint) scale(wide ? 0x1p-101f : 0x1p-24f);
  if (values == Values::kLarge) scale(wide ? 0x1p125f : 0x1p13f);
  if (values == Values::kZero) scale(0.0f);
  if (values != Values::kSpecial) return;
  const std::int64_t rows = x->size(1), columns = x->size(3);
  x->at(0, 0, 0, 0) = static_cast<T>(NAN);
  x->at(0, rows / 3, 0, columns / 2) = static_cast<T>(INFINITY);
  x->at(0, rows - 1, 0, columns - 1) = static_cast<T>(-INFINITY);
  // A column of a block of zeros, but for one number.
  for (std::int64_t i = 0; i < rows; ++i) x->at(0, i, x->size(2) - 1, 0) = static_cast<T>(0.0f);
  x->at(0, rows / 2, x->size(2) - 1, 0) = static_cast<T>(30000.0f);
}

template <typename T>
Keys<T> make_keys(const QuantizeCase& c) {
  Keys<T> keys;
  const Case& sizes = c.sizes;
  const int batch = sizes.varlen() ? 1 : sizes.batch_size;
  const int rows = sizes.varlen() ? sizes.total_k : sizes.seqlen_k;
  simt::allocate(&keys.k, sizes.layout, batch, rows, sizes.num_heads_kv, sizes.head_dim);
  simt::allocate(&keys.v, sizes.layout, batch, rows, sizes.num_heads_kv, sizes.dim_v());
  std::mt19937 random(sizes.seqlen_k + 1000 * sizes.head_dim);
  keys.k.fill(&random, 1.5, 3.0);
  keys.v.fill(&random, 1.0, 0.5);
  if (keys.k.data()) set_values(c.values, &keys.k), set_values(c.values, &keys.v);
  keys.cu_seqlens.assign(sizes.cu_seqlens_k.begin(), sizes.cu_seqlens_k.end());
  keys.seqused.assign(sizes.seqused_k.begin(), sizes.seqused_k.end());
  // Rows of no sequence, and keys that are not in use, may hold anything.
  for (int row = 0; sizes.varlen() && row < rows; ++row) {
    bool owned = false;
    for (int b = 0; b < sizes.batch_size; ++b)
      owned |= row >= sizes.start_k(b) && row < sizes.start_k(b) + sizes.rows_k(b);
    if (owned) continue;
    simt::fill_row(keys.k, row, static_cast<T>(NAN));
    simt::fill_row(keys.v, row, static_cast<T>(1e4f));
  }
  return keys;
}

template <typename T>
dlattn::QuantizeParams make_params(const Case& c, const Keys<T>& keys, Precision precision) {
  dlattn::QuantizeParams p;
  p.precision = precision;
  const auto view = [](const simt::Tensor<T>& x) {
    return dlattn::TensorView{x.data(),    x.stride(0), x.stride(1),
                              x.stride(2), 1,           simt::DTypeOf<T>::value};
  };
  p.k = view(keys.k), p.v = view(keys.v);
  p.device.type = dlattn::DeviceType::kCuda;
  p.batch_size = c.batch_size, p.seqlen_k = c.seqlen_k, p.num_heads_kv = c.num_heads_kv;
  p.head_dim = c.head_dim, p.head_dim_v = c.dim_v();
  p.total_k = c.total_k;
  if (c.varlen()) p.cu_seqlens_k = keys.cu_seqlens.data();
  if (!c.seqused_k.empty()) p.seqused_k = keys.seqused.data();
  return p;
}

// Writes what the CPU backend writes, with the lengths that kernels take from what lies in memory.
// False if these are none that it accepts: starts that decrease.
bool quantize_on_cpu(const Case& c, dlattn::QuantizeParams p, void* to) {
  std::vector<std::int32_t> starts, used;
  if (c.varlen()) {
    const int end = std::clamp(c.cu_seqlens_k.back(), 0, c.total_k);
    for (int b = 0; b < c.batch_size; ++b)
      starts.push_back(c.start_k(b)), used.push_back(c.rows_k(b));
    starts.push_back(end);
    if (!std::is_sorted(starts.begin(), starts.end())) return false;
    p.cu_seqlens_k = starts.data(), p.seqused_k = used.data(), p.seqlen_k = c.total_k;
  }
  p.device.type = dlattn::DeviceType::kCpu;
  p.quantized_kv = to;
  dlattn::core::validate(p);
  dlattn::cpu::quantize_kv(p, 1);
  return true;
}

template <typename T>
struct All {
  const Keys<T>& keys;
  const Buffer& buffer;
};
template <typename T>
void rewrite(const All<T>& all) {
  simt::rewrite(all.keys.k), simt::rewrite(all.keys.v);
  simt::rewrite(all.keys.cu_seqlens), simt::rewrite(all.keys.seqused);
  volatile unsigned char* const bytes = all.buffer.data();
  for (std::size_t i = 0; i < all.buffer.size(); ++i) bytes[i] = bytes[i];
}

// The launcher's launch, of thread blocks that do `steps` tensors of blocks of keys each.
template <typename T, Precision kPrecision, int kColumns>
void run_kernel(const All<T>& all, const dlattn::QuantizeParams& p, const dlattn::Plan& plan,
                int steps, simt::Schedule schedule) {
  const key_blocks::Shape shape = key_blocks::make_shape(p, steps);
  const std::int64_t grid = key_blocks::grid_of(shape.num_items, p.num_heads_kv, steps).blocks;
  simt::Launch launch{dim3(static_cast<unsigned>(grid)), dim3(plan.num_warps * 32),
                      static_cast<std::size_t>(plan.smem_bytes), schedule};
  simt::start_early(&launch, all);
  simt::launch(launch, [&] { key_blocks::kernel<T, kPrecision, kColumns, false>(p, shape); });
}

template <typename T>
void run(const All<T>& all, const dlattn::QuantizeParams& p, const dlattn::Plan& plan, int steps,
         simt::Schedule schedule) {
  if (plan.grid == 0) return;
  const auto run_in = [&](auto precision) {
    if (plan.head_dim_tile == 64)
      return run_kernel<T, precision, 64>(all, p, plan, steps, schedule);
    if (plan.head_dim_tile == 128)
      return run_kernel<T, precision, 128>(all, p, plan, steps, schedule);
    run_kernel<T, precision, 256>(all, p, plan, steps, schedule);
  };
  if (p.precision == Precision::kFp8)
    return run_in(std::integral_constant<Precision, Precision::kFp8>());
  if (p.precision == Precision::kInt8Fp16)
    return run_in(std::integral_constant<Precision, Precision::kInt8Fp16>());
  run_in(std::integral_constant<Precision, Precision::kInt8Fp8>());
}

// In which part of the buffer a byte lies.
std::string part_at(const dlattn::QuantizedLayout& layout, std::size_t byte) {
  const auto at = static_cast<std::int64_t>(byte);
  return at < layout.v         ? "k at " + std::to_string(at - layout.k)
         : at < layout.k_scale ? "v at " + std::to_string(at - layout.v)
         : at < layout.v_scale ? "k_scale at " + std::to_string((at - layout.k_scale) / 4)
         : at < layout.k_shift ? "v_scale at " + std::to_string((at - layout.v_scale) / 4)
                               : "k_shift at " + std::to_string((at - layout.k_shift) / 4);
}

// Races do not depend on values, and three steps have all that more of them have:
// ThreadSanitizer's build has no others, unless it has every tile.
#if defined(SIMT_TSAN) && !defined(SIMT_ALL_TILES)
constexpr bool kRacesAlone = true;
#else
constexpr bool kRacesAlone = false;
#endif
// The dtype of the inputs matters where they are read: of a case's three precisions each has one of
// the two, unless all instances are tested.
#if defined(SIMT_ALL_INSTANCES) || defined(SIMT_ALL_TILES)
constexpr bool kBothTypes = true;
#else
constexpr bool kBothTypes = false;
#endif

template <typename T>
void run(simt::Tests* tests, const std::string& filter, const QuantizeCase& c,
         Precision precision) {
  static const char* const kValues[] = {"", " special", " small", " faint", " large", " zero"};
  const std::string name = std::string("quantize ") + dlattn::to_string(simt::DTypeOf<T>::value) +
                           " to " + dlattn::to_string(precision) + " " + c.sizes.name() +
                           kValues[static_cast<int>(c.values)];
  if (name.find(filter) == std::string::npos) return;
  const simt::HangGuard guard(name);
  const Keys<T> keys = make_keys<T>(c);
  dlattn::QuantizeParams params = make_params(c.sizes, keys, precision);
  const dlattn::QuantizedLayout layout = dlattn::quantized_layout(params);
  Buffer buffer(layout.bytes), expected(layout.bytes);
  params.quantized_kv = buffer.data();
  dlattn::core::validate(params);
  dlattn::QuantizeTask task;
  static_cast<dlattn::QuantizeParams&>(task) = params;
  const dlattn::Plan plan = dlattn::core::make_plan(task, simt::ada());
  const bool comparable = quantize_on_cpu(c.sizes, params, expected.data());
  if (!comparable && !c.hostile) simt::die("%s: the CPU has no result", name.c_str());
  if (!comparable && simt::kThreadSanitizer) return;  // sequences overlap

  std::string trouble;
  // So small a problem is planned with the first alone; odd ones part v of a block of keys from k.
  for (const int steps : {1, 3, key_blocks::kMaxSteps}) {
    if (kRacesAlone && steps > 3) continue;
    for (const simt::Schedule schedule : simt::schedules()) {
      buffer.poison();
      run<T>({keys, buffer}, params, plan, steps, schedule);
      const std::string where = " at " + std::to_string(steps) + " steps";
      if (!buffer.guards_intact()) trouble = "a write outside the buffer" + where;
      const std::size_t different = buffer.first_difference(expected);
      if (comparable && different < buffer.size())
        trouble = "other bytes than the CPU's in " + part_at(layout, different) + where;
    }
  }
  tests->report(name, {}, simt::DTypeOf<T>::value, trouble);
}

QuantizeCase fixed(int batch, int seqlen, int heads, int head_dim, int head_dim_v = 0,
                   Layout layout = Layout::kBshd, Values values = Values::kUsual) {
  QuantizeCase c;
  c.sizes.batch_size = batch, c.sizes.seqlen_k = seqlen;
  c.sizes.num_heads = c.sizes.num_heads_kv = heads;
  c.sizes.head_dim = head_dim, c.sizes.head_dim_v = head_dim_v, c.sizes.layout = layout;
  return c.values = values, c;
}

std::vector<QuantizeCase> cases() {
  std::vector<QuantizeCase> all = {
      // Numbers of keys around those of a block and of a sample.
      fixed(1, 1, 1, 64),
      fixed(2, 63, 3, 64),
      fixed(1, 64, 2, 128),
      fixed(1, 129, 1, 128),
      fixed(1, 65, 1, 64),
      fixed(1, 1100, 1, 64),
      fixed(1, 700, 2, 128),
      fixed(2, 0, 1, 64),
      // Head dims: odd ones, other ones of v, either decides how many columns there are.
      fixed(1, 70, 1, 1),
      fixed(1, 70, 2, 40),
      fixed(1, 70, 2, 72),
      fixed(1, 70, 1, 80, 64),
      fixed(1, 70, 2, 17, 128),
      fixed(1, 70, 1, 127, 3),
      fixed(1, 70, 1, 64, 20),
      fixed(1, 300, 2, 256),
      fixed(1, 70, 1, 129),
      fixed(1, 70, 1, 64, 200),
      // Rows that lie elsewhere.
      fixed(2, 70, 2, 64, 0, Layout::kBhsd),
      fixed(2, 70, 2, 128, 72, Layout::kPacked),
      fixed(1, 70, 2, 64, 0, Layout::kAlign8),
      fixed(1, 140, 2, 128, 0, Layout::kAlign4),
      fixed(2, 70, 1, 72, 40, Layout::kAlign2),
      fixed(2, 70, 1, 200, 136, Layout::kAlign2),
      fixed(2, 70, 1, 40, 0, Layout::kBroadcast),
  };
  for (const Values values :
       {Values::kSpecial, Values::kSmall, Values::kFaint, Values::kLarge, Values::kZero}) {
    all.push_back(fixed(1, 300, 2, 64, 0, Layout::kBshd, values));
    all.push_back(fixed(1, 130, 2, 80, 0, Layout::kBshd, values));
    all.push_back(fixed(1, 130, 1, 192, 0, Layout::kBshd, values));
  }
  const Case base = {1, 1, 64, simt::kFull, 2, 2};
  const Case odd = {1, 1, 72, simt::kFull, 1, 1, Layout::kAlign2};
  std::vector<Case> lengths = {
      simt::varlen(base, {1, 1, 1, 1}, {0, 65, 0, 200}),
      simt::varlen(base, {1, 1, 1, 1, 1}, {300, 1, 64, 0, 0}),
      simt::with(simt::varlen(odd, {1, 1, 1}, {70, 300, 9}),
                 [](Case& c) { c.seqused_k = {64, 257, 0}; }),
      // More sequences than the search looks at together.
      simt::varlen(base, std::vector<int>(70, 1), std::vector<int>(70, 3)),
  };
  simt::append(&lengths, simt::slice_cases(base));
  for (const Case& c : lengths) all.push_back({c});
  for (const Case& c : simt::hostile_length_cases(base)) all.push_back({c, Values::kUsual, true});
  return all;
}

// q of a problem of attention, in blocks of 64 rows.
template <typename T, int kColumns>
void run_queries(simt::Tests* tests, const std::string& filter, const Case& c) {
  const std::string name =
      std::string("quantize q ") + dlattn::to_string(simt::DTypeOf<T>::value) + " " + c.name();
  if (name.find(filter) == std::string::npos) return;
  const simt::HangGuard guard(name);
  const simt::Tensors<T, T> tensors = simt::make_tensors<T, T>(c);
  constexpr dlattn::DType kDType = simt::DTypeOf<T>::value;
  dlattn::AttentionParams params = simt::make_params(c, tensors, kDType, kDType);
  params.precision = Precision::kFp8;
  const dlattn::QueryLayout layout = dlattn::query_layout(params);
  Buffer buffer(layout.bytes), expected(layout.bytes);
  simt::quantize_queries(c, params, expected.data());
  const dlattn::QuantizeTask task = dlattn::task_of(params, buffer.data());
  const dlattn::QuantizeParams as_keys = key_blocks::queries_as_keys(task);
  const key_blocks::Grid planned = key_blocks::grid_of_queries(task);
  constexpr int kRows = key_blocks::block_rows(Precision::kFp8, kColumns, true);
  std::string trouble;
  for (const int steps : {planned.steps, key_blocks::kMaxSteps}) {
    for (const simt::Schedule schedule : simt::schedules()) {
      buffer.poison();
      const key_blocks::Shape shape = key_blocks::make_query_shape(task, steps);
      const auto grid = static_cast<unsigned>(
          key_blocks::grid_of(shape.num_items, params.num_heads, steps).blocks);
      simt::Launch launch{dim3(grid), dim3(key_blocks::num_threads(kColumns, kRows)),
                          static_cast<std::size_t>(key_blocks::smem_bytes(kColumns, kRows)),
                          schedule};
      simt::start_early(&launch, tensors);
      simt::launch(launch,
                   [&] { key_blocks::kernel<T, Precision::kFp8, kColumns, true>(as_keys, shape); });
      if (!buffer.guards_intact()) trouble = "a write outside the buffer";
      if (buffer.first_difference(expected) < buffer.size())
        trouble =
            "other bytes than the host's at " + std::to_string(buffer.first_difference(expected));
    }
  }
  tests->report(name, {}, kDType, trouble);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string filter = argc > 1 ? argv[1] : "";
  simt::Tests tests("quantize", "");
  int number = 0;
  for (const QuantizeCase& c : cases()) {
    if (kRacesAlone && c.values != Values::kUsual) continue;
    for (const Precision precision : {Precision::kInt8Fp8, Precision::kFp8, Precision::kInt8Fp16}) {
      const bool in_half = ++number % 2 == 0;
      if (kBothTypes || in_half) run<half>(&tests, filter, c, precision);
      if (kBothTypes || !in_half) run<__nv_bfloat16>(&tests, filter, c, precision);
    }
  }
  const Case packed = {1, 1, 64, simt::kFull, 4, 2};
  for (const Case& c : {Case{130, 1, 64, simt::kFull, 2, 1, Layout::kBshd, 0, 2},
                        Case{65, 1, 40, simt::kFull, 3, 3, Layout::kAlign2},
                        simt::varlen(packed, {130, 0, 64, 1}, {1, 1, 1, 1})}) {
    run_queries<half, 64>(&tests, filter, c);
    run_queries<__nv_bfloat16, 64>(&tests, filter, c);
  }
  const Case wide = {70, 1, 128, simt::kFull, 2, 1, Layout::kPacked, 0, 2};
  run_queries<half, 128>(&tests, filter, wide);
  const Case widest = {130, 1, 200, simt::kFull, 2, 1};
  run_queries<__nv_bfloat16, 256>(&tests, filter, widest);
  return tests.finish();
}
