#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "dlattn/attention.h"

namespace test {

// Numbers of any dtype in memory, with room about them that must stay as it is.
class Buffer {
 public:
  Buffer() = default;
  // `elements` of dtype, `offset` elements past an aligned address, all bytes 0xff, which is NaN in
  // every dtype.
  Buffer(dlattn::DType dtype, std::int64_t elements, std::int64_t offset = 0);
  void* data() { return bytes_.data() + kGuard + first_; }
  const void* data() const { return bytes_.data() + kGuard + first_; }
  double get(std::int64_t index) const;
  void set(std::int64_t index, double value);  // rounds to dtype
  void fill_normal(std::mt19937& random, double mean, double deviation);
  std::int64_t size() const { return elements_; }
  // Marks an element as one that may be written. stray_writes() counts the bytes of others that are
  // no longer 0xff.
  void expect_write(std::int64_t index);
  std::int64_t stray_writes() const;

 private:
  static constexpr std::int64_t kGuard = 256;  // bytes
  dlattn::DType dtype_ = dlattn::DType::kFloat32;
  std::int64_t elements_ = 0;
  std::int64_t first_ = 0;  // bytes
  std::vector<unsigned char> bytes_;
  std::vector<bool> writable_;
};

enum class Layout {
  kBshd,
  kBhsd,
  kPadded,     // bshd with odd gaps between rows, heads and batches, at an odd address
  kBroadcast,  // k, v and q with zero strides: one KV head and one batch entry serve all
};

// The problem to compute. Every feature is off by default.
struct Spec {
  dlattn::DType dtype = dlattn::DType::kFloat32;
  std::int64_t batch_size = 2, seqlen_q = 40, seqlen_k = 70;
  std::int64_t num_heads = 4, num_heads_kv = 2, head_dim = 32, head_dim_v = 32;
  Layout layout = Layout::kBshd;
  dlattn::Causal causal = dlattn::Causal::kNone;
  std::int64_t window_left = -1, window_right = -1;
  double softcap = 0.0;
  bool bias = false, bias_fp32 = false, bias_broadcast = false;
  bool mask = false, mask_broadcast = false;
  bool alibi = false, sinks = false;
  bool lse = true;
  double softmax_scale = 0.0;                              // 0: 1 / sqrt(head_dim)
  std::vector<std::int32_t> lengths_q, lengths_k, used_k;  // variable length, where given
  // Only for kFloat8E4M3. q's may be by KV head.
  dlattn::DType out_dtype = dlattn::DType::kBFloat16;
  bool descales = false, q_descale_by_kv_head = false;

  bool is_8_bit() const { return dtype == dlattn::DType::kFloat8E4M3; }

  std::string describe() const;
};

// A problem with its memory: random normal inputs with an offset, outputs poisoned with NaN.
struct Problem {
  explicit Problem(const Spec& spec);
  Problem(const Problem&) = delete;

  void poison();  // the outputs again
  std::int64_t out_index(std::int64_t b, std::int64_t i, std::int64_t h, std::int64_t d) const;
  std::int64_t lse_index(std::int64_t b, std::int64_t h, std::int64_t i) const;
  std::int64_t rows(std::int64_t b) const;  // queries of a batch entry
  std::int64_t keys(std::int64_t b) const;

  Spec spec;
  dlattn::AttentionParams params;
  Buffer q, k, v, out, lse, bias, alibi, sinks, q_descale, k_descale, v_descale;
  std::vector<std::uint8_t> mask;
  std::vector<std::int32_t> cu_seqlens_q, cu_seqlens_k;
};

// The scores of one query and head, one a key, in the arithmetic of R: -inf where it is not seen.
template <typename R>
struct Scores {
  std::vector<R> score, softcap_derivative;
  std::vector<std::int64_t> distance;  // of which ALiBi is a multiple
};
template <typename R>
Scores<R> scores_of(const Problem& problem, std::int64_t b, std::int64_t i, std::int64_t h);

// The formula of params.h, written plainly and computed in double, or in long double for float64
// problems.
struct Reference {
  explicit Reference(const Problem& problem);
  std::vector<double> out, lse;  // exact enough to judge by; [b][i][h][d] and [b][h][i] in order
  double plain_error = 0,
         plain_lse_error = 0;  // largest of the same formula in the dtype that kernels compute in
};

struct Errors {
  double out = 0, lse = 0;  // largest; infinite where a NaN or an infinity stands that should not
};
Errors errors_of(const Problem& problem, const Reference& reference);

// Runs on the CPU kernels of one instruction set, and checks outputs and guards. Returns what is
// wrong, or "".
std::string run_and_judge(Problem& problem, const Reference& reference, const char* isa,
                          int num_threads);

// The instruction sets that this processor has.
std::vector<const char*> isas();

dlattn::DeviceInfo cpu_device(const char* isa);

}  // namespace test
