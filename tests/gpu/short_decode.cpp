// decode and sm90_latent over caches whose memory is no more than what may be read: against the CPU
// backend, which is told lists that it accepts, with the same numbers.
#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "device_copy.h"
#include "problem.h"
#include "short_parts.h"

using namespace dlattn;
using test::Buffer;
using test::DeviceCopy;

namespace {

constexpr std::int32_t kLeast = INT32_MIN, kMost = INT32_MAX;
constexpr std::int32_t kGarbage[] = {-1, kMost, kLeast, 123456789, -987654321};

struct DecodeCase {
  std::vector<std::int32_t> used;  // as the kernel is told
  int capacity;
  int page_size = 0;  // 0: no pages
  int seqlen_q = 1, dim = 64, dim_v = 64;
  std::vector<std::int32_t> entries = {};  // cache_batch_idx, of as many entries as sequences
  std::vector<std::int32_t> leftpad = {};
  bool mask = false, varlen = false;
  bool wrong_pages = false;  // pages in use that there are not, which count as the nearest one
  bool latent = false;       // one KV head, and V is K's first columns
};

std::int32_t within(std::int32_t x, std::int32_t most) {
  return std::clamp(x, std::int32_t{0}, most);
}

// A cache on the host: lists as the kernel is told, and as the CPU backend accepts them.
class DecodeProblem {
 public:
  static constexpr int kHeads = 4;

  DecodeProblem(const DecodeCase& c, DType dtype)
      : c_(c), batch_(static_cast<int>(c.used.size())), heads_kv_(c.latent ? 1 : 2) {
    told_ = c.used, entries_ = c.entries, leftpad_ = c.leftpad;
    for (std::int32_t n : c.used) right_used_.push_back(within(n, c.capacity));
    for (std::int32_t n : c.entries) right_entries_.push_back(within(n, batch_ - 1));
    for (std::size_t b = 0; b < c.leftpad.size(); ++b)
      right_leftpad_.push_back(within(c.leftpad[b], right_used_[b]));
    lay_out_pages();
    const int count = c.page_size ? num_pages_ : batch_;
    const int rows = c.page_size ? c.page_size : c.capacity;
    std::mt19937 random(7);
    q_ = Buffer(dtype, std::int64_t{batch_} * c.seqlen_q * kHeads * c.dim);
    q_.fill_normal(random, 0.25, 1.0);
    k_ = Buffer(dtype, std::int64_t{count} * rows * heads_kv_ * c.dim);
    if (!c.latent) v_ = Buffer(dtype, std::int64_t{count} * rows * heads_kv_ * c.dim_v);
    fill(random);
    out_ = Buffer(dtype, std::int64_t{batch_} * c.seqlen_q * kHeads * c.dim_v);
    lse_ = Buffer(DType::kFloat32, std::int64_t{batch_} * c.seqlen_q * kHeads);
    for (int b = 0; b <= batch_; ++b) cu_seqlens_q_.push_back(b * c.seqlen_q);
    const int masked = c.mask ? batch_ * c.seqlen_q * c.capacity : 0;
    for (int i = 0; i < masked; ++i) mask_.push_back(random() % 3 != 0);
    describe(dtype);
  }

  // Computes the expected results on the CPU backend.
  void expect() {
    AttentionParams p = params_;
    p.device = {DeviceType::kCpu, 0};
    p.seqused_k = right_used_.data();
    if (p.cache_batch_idx) p.cache_batch_idx = right_entries_.data();
    if (p.leftpad_k) p.leftpad_k = right_leftpad_.data();
    if (p.page_table.data) p.page_table.data = right_table_.data();
    forward(p);
    for (std::int64_t i = 0; i < out_.size(); ++i) want_.push_back(out_.get(i));
    for (std::int64_t i = 0; i < lse_.size(); ++i) want_lse_.push_back(lse_.get(i));
  }

  void run(const char* kernel, const char* variant, bool batch_invariant);

 private:
  int columns() const { return (c_.capacity + c_.page_size - 1) / c_.page_size; }

  // Sequence by sequence from the pool's last page down to its first. There are no others.
  void lay_out_pages() {
    if (!c_.page_size) return;
    for (const std::int32_t n : right_used_) num_pages_ += (n + c_.page_size - 1) / c_.page_size;
    num_pages_ = std::max(num_pages_, 1);
    std::int32_t next = num_pages_;
    for (int b = 0; b < batch_; ++b) {
      const int in_use = (right_used_[b] + c_.page_size - 1) / c_.page_size;
      for (int i = 0; i < columns(); ++i)
        table_.push_back(i < in_use ? --next : kGarbage[(b + i) % 5]);
    }
    if (c_.wrong_pages) table_[0] = kMost, table_[1] = kLeast;
    right_table_ = table_;
    for (std::int32_t& page : right_table_) page = within(page, num_pages_ - 1);
  }

  // Rows in use; others are NaN.
  void fill(std::mt19937& random) {
    std::normal_distribution<double> normal(0.25, 1.0);
    const auto fill_row = [&](Buffer* x, std::int64_t row, int dim) {
      for (int i = 0; i < heads_kv_ * dim; ++i) x->set(row * heads_kv_ * dim + i, normal(random));
    };
    for (int b = 0; b < batch_; ++b) {
      for (int j = leftpad_.empty() ? 0 : right_leftpad_[b]; j < right_used_[b]; ++j) {
        std::int64_t row = std::int64_t{b} * c_.capacity + j;
        if (!entries_.empty()) row = std::int64_t{right_entries_[b]} * c_.capacity + j;
        if (c_.page_size) {
          row = std::int64_t{right_table_[b * columns() + j / c_.page_size]} * c_.page_size +
                j % c_.page_size;
        }
        fill_row(&k_, row, c_.dim);
        if (!c_.latent) fill_row(&v_, row, c_.dim_v);
      }
    }
  }

  void describe(DType dtype) {
    AttentionParams& p = params_;
    p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = dtype;
    p.batch_size = batch_, p.seqlen_q = c_.seqlen_q, p.seqlen_k = c_.capacity;
    p.num_heads = kHeads, p.num_heads_kv = heads_kv_, p.head_dim = c_.dim, p.head_dim_v = c_.dim_v;
    p.softmax_scale = 1.0 / std::sqrt(c_.dim);
    p.causal = Causal::kBottomRight;
    p.q.data = q_.data(), p.k.data = k_.data(), p.v.data = v_.data(), p.out.data = out_.data();
    p.q.head_stride = c_.dim, p.q.row_stride = kHeads * c_.dim;
    p.out.head_stride = c_.dim_v, p.out.row_stride = kHeads * c_.dim_v;
    p.q.batch_stride = c_.seqlen_q * p.q.row_stride;
    p.out.batch_stride = c_.seqlen_q * p.out.row_stride;
    p.lse = {static_cast<float*>(lse_.data()), std::int64_t{kHeads} * c_.seqlen_q, 1, c_.seqlen_q};
    const std::int64_t rows = c_.page_size ? c_.page_size : c_.capacity;
    p.k.head_stride = c_.dim, p.k.row_stride = heads_kv_ * c_.dim;
    p.v.head_stride = c_.dim_v, p.v.row_stride = heads_kv_ * c_.dim_v;
    p.k.batch_stride = rows * p.k.row_stride, p.v.batch_stride = rows * p.v.row_stride;
    if (c_.latent) p.v = p.k;
    p.seqused_k = told_.data();
    if (!leftpad_.empty()) p.leftpad_k = leftpad_.data();
    if (!entries_.empty()) p.cache_batch_idx = entries_.data(), p.cache_batch_size = batch_;
    if (c_.page_size) {
      p.page_table.data = table_.data(), p.page_table.batch_stride = columns();
      p.page_size = c_.page_size, p.num_pages = num_pages_;
    }
    if (c_.mask) {
      p.mask.data = mask_.data(), p.mask.row_stride = c_.capacity;
      p.mask.batch_stride = std::int64_t{c_.seqlen_q} * c_.capacity, p.mask.head_stride = 0;
    }
    if (c_.varlen) {
      p.cu_seqlens_q = cu_seqlens_q_.data(), p.total_q = std::int64_t{batch_} * c_.seqlen_q;
      p.lse.batch_stride = 0, p.lse.head_stride = p.total_q;
    }
  }

  DecodeCase c_;
  int batch_, heads_kv_, num_pages_ = 0;
  std::vector<std::int32_t> told_, entries_, leftpad_, table_, cu_seqlens_q_;
  std::vector<std::int32_t> right_used_, right_entries_, right_leftpad_, right_table_;
  std::vector<std::uint8_t> mask_;
  Buffer q_, k_, v_, out_, lse_;
  AttentionParams params_;
  std::vector<double> want_, want_lse_;
};

// The largest difference; infinite where one is NaN or infinite alone.
double difference(const Buffer& got, const std::vector<double>& want) {
  double largest = 0;
  for (std::int64_t i = 0; i < got.size(); ++i) {
    if (got.get(i) == want[i]) continue;
    const double error = std::abs(got.get(i) - want[i]);
    largest = std::isfinite(error) ? std::max(largest, error) : INFINITY;
  }
  return largest;
}

void DecodeProblem::run(const char* kernel, const char* variant, bool batch_invariant) {
  AttentionParams p = params_;
  p.device = {DeviceType::kCuda, 0};
  const auto bytes = [](const auto& list) {
    return static_cast<std::int64_t>(list.size() * sizeof(list[0]));
  };
  const std::int64_t element = size_of(p.q.dtype);
  const DeviceCopy q(q_.data(), q_.size() * element), k(k_.data(), k_.size() * element);
  const DeviceCopy v(v_.data(), v_.size() * element);
  const Buffer poison(p.out.dtype, out_.size()), poison_lse(DType::kFloat32, lse_.size());
  const DeviceCopy out(poison.data(), out_.size() * element);
  const DeviceCopy lse(poison_lse.data(), lse_.size() * 4);
  const DeviceCopy used(told_.data(), bytes(told_)), entries(entries_.data(), bytes(entries_));
  const DeviceCopy leftpad(leftpad_.data(), bytes(leftpad_)), table(table_.data(), bytes(table_));
  const DeviceCopy mask(mask_.data(), bytes(mask_));
  const DeviceCopy cu_seqlens_q(cu_seqlens_q_.data(), bytes(cu_seqlens_q_));
  const auto list = [](const DeviceCopy& x) { return static_cast<const std::int32_t*>(x.data()); };
  p.q.data = q.data(), p.k.data = k.data(), p.v.data = c_.latent ? k.data() : v.data(),
  p.out.data = out.data();
  p.lse.data = static_cast<float*>(lse.data());
  p.seqused_k = list(used), p.page_table.data = list(table), p.cache_batch_idx = list(entries);
  p.leftpad_k = list(leftpad);
  if (p.cu_seqlens_q) p.cu_seqlens_q = list(cu_seqlens_q);
  p.mask.data = static_cast<const std::uint8_t*>(mask.data());

  Options options;
  options.kernel = kernel;
  options.variant = variant;
  options.batch_invariant = batch_invariant;
  if (!supported(p, device_info(p.device), options).ok) return;  // no tile of this variant
  // Nothing of it is initialised, and it has the bytes that the plan says and no more.
  void* workspace = nullptr;
  p.workspace_bytes = plan(p, device_info(p.device), options).workspace_bytes;
  if (p.workspace_bytes > 0) test::require(cudaMalloc(&workspace, p.workspace_bytes));
  p.workspace = workspace;
  forward(p, nullptr, options);
  test::require(cudaDeviceSynchronize());
  cudaFree(workspace);
  out.copy_back(out_.data());
  lse.copy_back(lse_.data());
  const double unit = p.q.dtype == DType::kFloat16 ? 0x1p-10 : 0x1p-7;
  const std::string what = std::string(kernel) + " of " + std::to_string(batch_) +
                           " sequences, pages of " + std::to_string(c_.page_size) + ", head_dim " +
                           std::to_string(c_.dim) + (variant ? std::string(", ") + variant : "");
  CHECK_FOR(difference(out_, want_) <= 16 * unit, what);
  CHECK_FOR(difference(lse_, want_lse_) <= 0x1p-10, what);
}

std::vector<DecodeCase> cases() {
  std::vector<DecodeCase> all;
  for (const int page_size : {0, 1, 3, 16}) {
    // None, one, a page and one more or less, all that there is room for; more than that, less
    // than none.
    all.push_back({{0, 1, 15, 16, 17, 64}, 64, page_size});
    all.push_back({{64, 65, kMost, -1, kLeast, 33}, 64, page_size, 3});
    all.push_back({{48, 0, 48}, 48, page_size, 5, 128, 72, {}, {}, true});
    all.push_back({{40, 7, 64}, 64, page_size, 2, 64, 64, {}, {3, 7, kMost}});
    all.push_back({{40, 9, 64}, 64, page_size, 1, 256, 256, {}, {kLeast, -1, 63}, true});
    all.push_back({{300, 1}, 300, page_size, 4, 64, 64, {}, {}, true});
    all.push_back({{40, 0, 64}, 64, page_size, 2, 576, 512});
  }
  for (const int page_size : {0, 8, 64}) {
    DecodeCase latent{{0, 1, 63, 64, 65, 300, kMost, -1}, 300, page_size, 2, 576, 512};
    latent.latent = true;
    all.push_back(latent);
    if (page_size == 0) {
      latent.entries = {7, kMost, 0, 1, 2, 3, kLeast, 4};
    } else {
      latent.wrong_pages = true;
    }
    all.push_back(latent);
  }
  all.push_back({{20, 40, 64}, 64, 0, 1, 64, 64, {2, 0, 1}});
  all.push_back({{20, 40, 64}, 64, 0, 3, 128, 128, {kMost, kLeast, 1}, {}, true});
  DecodeCase varlen{{33, 1, 64}, 64, 16, 20};
  varlen.varlen = true;
  all.push_back(varlen);
  for (const int page_size : {1, 16}) {
    DecodeCase wrong{{64, 30}, 64, page_size};
    wrong.wrong_pages = true;
    all.push_back(wrong);
  }
  return all;
}

}  // namespace

void test::run_decode() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    for (const DecodeCase& c : cases()) {
      DecodeProblem problem(c, dtype);
      problem.expect();
      problem.run("decode", nullptr, false);
      problem.run("decode", "rows16", false);
      problem.run("decode", "rows32", false);
      problem.run("decode", nullptr, true);
      for (const bool invariant : {false, true}) problem.run("sm90_latent", nullptr, invariant);
    }
  }
}
