#pragma once

#include <algorithm>
#include <random>
#include <sstream>
#include <string>

#include "core/plan/plan.h"
#include "plan_problems.h"

// Random features of attention problems, and random problems that have them, on made-up GPUs.
namespace test {

inline const std::int32_t list[1] = {};
inline const float numbers[1] = {};

class Random {
 public:
  explicit Random(unsigned seed) : engine_(seed) {}
  // 0 .. count - 1.
  std::int64_t below(std::int64_t count) {
    return static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(count));
  }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T, std::size_t kCount>
  T one_of(const T (&choices)[kCount]) {
    return choices[below(kCount)];
  }

 private:
  std::mt19937_64 engine_;
};

// All that a choice may depend on.
struct Features {
  DeviceInfo device;
  Options options;
  AttentionParams params;  // without sizes and strides
  std::int64_t group = 1;
  bool cache = false;
};

inline DeviceInfo random_device(Random& random) {
  const DeviceInfo devices[] = {
      test::gpu("A100", 8, 0, 108, 166912),     test::gpu("RTX 3060", 8, 6, 28, 101376),
      test::gpu("RTX 3090", 8, 6, 82, 101376),  test::gpu("L4", 8, 9, 58, 101376),
      test::gpu("RTX 4090", 8, 9, 128, 101376), test::gpu("H200", 9, 0, 132, 232448),
      test::gpu("H100", 9, 0, 114, 232448),     test::gpu("H200", 9, 0, 132, 232448),
      test::gpu("B200", 10, 0, 148, 232448),    test::gpu("RTX 5090", 12, 0, 170, 101376)};
  DeviceInfo device = random.one_of(devices);
  if (device.compute_major == 9 && random.chance(20)) device.arch_specific_code = false;
  return device;
}

inline void set_masks_and_scores(Random& random, AttentionParams* p) {
  constexpr Causal kCausal[] = {Causal::kNone, Causal::kBottomRight, Causal::kTopLeft};
  constexpr std::int64_t kSides[] = {-1, -1, 0, 5, 70, 128, 1000, 100000};
  p->causal = random.one_of(kCausal);
  p->window_left = random.one_of(kSides), p->window_right = random.one_of(kSides);
  p->softmax_scale = random.chance(90) ? 0.125 : 1e-7;
  if (random.chance(25)) p->softcap = random.chance(80) ? 9.0 : 1e-6;
  if (random.chance(25)) p->alibi_slopes.data = numbers;
  if (random.chance(20)) p->sinks.data = numbers;
  if (random.chance(15)) p->bias.data = numbers;
  p->bias.dtype = random.chance(50) ? p->q.dtype : DType::kFloat32;
  if (random.chance(15)) p->mask.data = reinterpret_cast<const std::uint8_t*>(numbers);
  const std::int64_t stride = random.chance(80) ? 1 : 2;
  p->bias.col_stride = p->mask.col_stride = stride;
}

inline void set_cache(Random& random, AttentionParams* p) {
  if (random.chance(60)) p->seqused_k = list;
  if (random.chance(20)) p->leftpad_k = list;
  if (random.chance(50)) {
    constexpr std::int64_t kPages[] = {1, 16, 48, 64, 256, 4096};
    p->page_table.data = list;
    p->page_size = random.one_of(kPages);
  } else if (!p->seqused_k || random.chance(30)) {
    p->cache_batch_idx = list;
  }
  if (random.chance(30))
    p->k.dtype = p->v.dtype = random.chance(50) ? DType::kInt8 : DType::kFloat8E4M3;
}

inline Features random_features(Random& random) {
  Features f;
  f.device = random_device(random);
  AttentionParams& p = f.params;
  p.device = {DeviceType::kCuda, 0};
  constexpr DType kTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32,
                              DType::kFloat8E4M3};
  const DType dtype = random.chance(75) ? kTypes[random.below(2)] : random.one_of(kTypes);
  p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype;
  if (dtype == DType::kFloat8E4M3) p.out.dtype = DType::kBFloat16;
  constexpr std::int64_t kDims[] = {16, 32, 64, 64, 80, 96, 128, 128, 192, 256, 512};
  p.head_dim = random.chance(85) ? random.one_of(kDims) : 1 + random.below(300);
  p.head_dim_v = random.chance(85) ? p.head_dim : random.one_of(kDims);
  constexpr std::int64_t kGroups[] = {1, 1, 2, 4, 7, 8, 16, 71, 128, 600};
  f.group = random.one_of(kGroups);
  set_masks_and_scores(random, &p);
  f.cache = size_of(dtype) == 2 && random.chance(30);
  if (f.cache) set_cache(random, &p);
  constexpr Precision kPrecisions[] = {Precision::kFp8, Precision::kInt8Fp8, Precision::kInt8Fp16};
  if (size_of(dtype) == 2 && !f.cache && random.chance(15)) {
    p.precision = random.one_of(kPrecisions);
    p.softcap = 0.0, p.bias.data = nullptr, p.alibi_slopes.data = nullptr;
    p.head_dim = std::min<std::int64_t>(p.head_dim, 128);
    p.head_dim_v = std::min<std::int64_t>(p.head_dim_v, 128);
  }
  f.options.batch_invariant = true;
  f.options.allow_workspace = random.chance(85);
  if (random.chance(15)) f.options.split_size = 128 * (1 + random.below(20));
  if (f.options.split_size == 0 && random.chance(10)) f.options.num_splits = 1;
  constexpr std::string_view kKernels[] = {"wmma", "decode", "sm90", "scalar", "wmma_qk"};
  if (random.chance(25)) f.options.kernel = random.one_of(kKernels);
  if (f.options.kernel == "wmma" && random.chance(40)) f.options.variant = "unpacked";
  return f;
}

// Contiguous rows, as far apart as the alignment that is drawn for each tensor lets them be. The
// stride of a dimension of one element may be anything.
template <typename T>
void lay_out(Random& random, bool heads_first, const std::int64_t (&sizes)[3], std::int64_t columns,
             T* x) {
  const std::int64_t step = 16 / size_of(x->dtype);
  const std::int64_t row = (columns + step - 1) / step * step;
  const std::int64_t batch = sizes[0], rows = sizes[1], heads = sizes[2];
  x->head_stride = heads_first ? rows * row : row;
  x->row_stride = heads_first ? row : heads * row;
  x->batch_stride = rows * heads * row;
  const std::int64_t unused = random.chance(50) ? 1 : 7;
  if (batch <= 1) x->batch_stride = unused;
  if (rows <= 1) x->row_stride = unused;
  if (heads <= 1) x->head_stride = unused;
}

// One of the problems that have these features.
inline AttentionParams random_problem(Random& random, const Features& f, bool varlen) {
  constexpr std::int64_t kLengths[] = {0,   1,   1,   2,    9,    16,   17,    64,    100,
                                       129, 300, 511, 1024, 1500, 4096, 16384, 65536, 131072};
  constexpr std::int64_t kBatches[] = {1, 1, 1, 2, 7, 64, 1000};
  constexpr std::int64_t kHeads[] = {1, 2, 8, 16};
  AttentionParams p = f.params;
  p.batch_size = random.one_of(kBatches);
  p.num_heads_kv = random.one_of(kHeads), p.num_heads = p.num_heads_kv * f.group;
  p.seqlen_q = random.one_of(kLengths), p.seqlen_k = random.one_of(kLengths);
  if (p.batch_size * p.num_heads > 4096) {
    p.seqlen_q = 1 + random.below(64);
    p.seqlen_k = std::min<std::int64_t>(p.seqlen_k, 2000);
  }
  if (p.batch_size * p.num_heads_kv * p.seqlen_k > 100'000'000) p.seqlen_k = 1 + random.below(9000);
  if (random.chance(50)) p.seqlen_q = std::min<std::int64_t>(p.seqlen_q, 1 + random.below(64));
  // decode counts tiles of keys in 31 bits.
  if (f.cache || f.options.kernel != core::kAuto || f.options.split_size > 0)
    p.seqlen_q = std::min<std::int64_t>(p.seqlen_q, 300);
  std::int64_t queries[3] = {p.batch_size, p.seqlen_q, p.num_heads};
  std::int64_t keys[3] = {p.batch_size, p.seqlen_k, p.num_heads_kv};
  if (varlen) {
    // Between one long sequence with many empty ones, and sequences that are all alike.
    p.cu_seqlens_q = list;
    p.total_q = p.seqlen_q + random.below(1 + (p.batch_size - 1) * p.seqlen_q);
    queries[0] = 1, queries[1] = p.total_q;
    if (!f.cache) {
      p.cu_seqlens_k = list;
      p.total_k = p.seqlen_k + random.below(1 + (p.batch_size - 1) * p.seqlen_k);
      keys[0] = 1, keys[1] = p.total_k;
    }
  }
  if (p.page_table.data) {
    p.num_pages = 1 + random.below(10000);
    keys[0] = p.num_pages, keys[1] = p.page_size;
  } else if (p.cache_batch_idx) {
    keys[0] = p.cache_batch_size = 1 + random.below(100);
  }
  const bool heads_first = random.chance(30);
  lay_out(random, heads_first, queries, p.head_dim, &p.q);
  lay_out(random, heads_first, keys, p.head_dim, &p.k);
  lay_out(random, heads_first, keys, p.head_dim_v, &p.v);
  lay_out(random, heads_first, queries, p.head_dim_v, &p.out);
  p.bias.row_stride = p.mask.row_stride = p.seqlen_k * p.bias.col_stride;
  p.bias.head_stride = p.mask.head_stride = p.seqlen_q * p.bias.row_stride;
  return p;
}

// Addresses that are aligned as each tensor's rows are to be.
inline void set_alignment(Random& random, AttentionParams* p) {
  const auto address = [&](int index, DType dtype) {
    const std::int64_t past = random.chance(92) ? 0 : size_of(dtype) << random.below(4);
    return memory + index * kApart + past % 16;
  };
  p->q.data = address(0, p->q.dtype), p->k.data = address(1, p->k.dtype);
  p->v.data = address(2, p->v.dtype), p->out.data = address(3, p->out.dtype);
}

inline std::string describe_problem(const AttentionParams& p) {
  std::ostringstream out;
  out << "batch " << p.batch_size << " seqlens " << p.seqlen_q << " " << p.seqlen_k << " heads "
      << p.num_heads << "/" << p.num_heads_kv << (p.cu_seqlens_q ? " varlen" : "");
  return out.str();
}

}  // namespace test
