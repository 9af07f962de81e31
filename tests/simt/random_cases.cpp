#include "random_cases.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <random>
#include <vector>

namespace simt {
namespace {

class RandomCase {
 public:
  explicit RandomCase(unsigned seed) : random_(seed) {}

  Case draw() {
    // Few features and many: the former reach what serves few.
    density_ = pick({0.0, 0.15, 0.4});
    Case c;
    c.num_heads_kv = pick({1, 1, 1, 2});
    c.num_heads = c.num_heads_kv * pick({1, 1, 2, 3});
    c.batch_size = pick({1, 1, 1, 2});
    // The head dims of instances and those between, mostly the small ones.
    c.head_dim = some(0.6) ? pick({8, 16, 32, 40, 64, 72, 96, 104, 128, 160, 192, 256}) : 0;
    if (c.head_dim == 0) c.head_dim = between(1, some(0.7) ? 64 : 256);
    if (some(0.4)) c.head_dim_v = some(0.6) ? pick({8, 16, 64, 80, 128}) : between(1, 128);
    c.seqlen_q = length(), c.seqlen_k = length();
    c.causal = pick({kFull, kCausal, kTopLeft});
    c.layout = pick({Layout::kBshd, Layout::kBshd, Layout::kBshd, Layout::kBhsd, Layout::kPacked,
                     Layout::kAlign8, Layout::kAlign4, Layout::kAlign2, Layout::kBroadcast});
    c.lse = some(0.8);
    if (feature()) c.window_left = pick({-1, 0, 5, 40, 64});
    if (feature()) c.window_right = pick({-1, 0, 5, 40, 64});
    c.sinks = feature();
    c.softcap = feature() ? pick({0.5, 3.0, 30.0}) : 0.0;
    c.alibi = feature();
    c.bias = feature() ? pick({Bias::kOwnDType, Bias::kFloat32}) : Bias::kNone;
    c.mask = feature();
    c.score_layout = pick({ScoreLayout::kRows, ScoreLayout::kRows, ScoreLayout::kAligned,
                           ScoreLayout::kOneRow, ScoreLayout::kOneKey, ScoreLayout::kColumns});
    if (feature()) draw_varlen(&c);
    return c;
  }

 private:
  bool some(double share) { return std::bernoulli_distribution(share)(random_); }
  bool feature() { return some(density_); }
  int between(int first, int last) {
    return std::uniform_int_distribution<int>(first, last)(random_);
  }
  template <typename T>
  T pick(std::initializer_list<T> choices) {
    return *(choices.begin() + between(0, static_cast<int>(choices.size()) - 1));
  }

  int length() {
    if (some(0.02)) return 0;
    return some(0.6) ? pick({1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 97, 128, 129})
                     : between(1, 150);
  }

  void draw_varlen(Case* c) {
    if (c->layout == Layout::kBroadcast) c->layout = Layout::kBshd;
    std::vector<int> seqlens_q, seqlens_k, used;
    for (int i = between(2, 3); i > 0; --i) {
      seqlens_q.push_back(std::min(length(), 70)), seqlens_k.push_back(std::min(length(), 70));
      used.push_back(between(0, seqlens_k.back()));
    }
    *c = varlen(*c, seqlens_q, seqlens_k);
    if (some(0.4)) c->seqused_k = used;
    if (some(0.4)) {  // a slice of larger tensors
      const int before_q = between(0, 300), before_k = between(0, 300);
      for (int& start : c->cu_seqlens_q) start += before_q;
      for (int& start : c->cu_seqlens_k) start += before_k;
      c->total_q += before_q + between(0, 70), c->total_k += before_k + between(0, 70);
    }
  }

  std::mt19937 random_;
  double density_ = 0.0;
};

}  // namespace

Case random_case(unsigned seed) {
  return RandomCase(seed).draw();
}

Arguments::Arguments(int argc, char** argv) {
  random_ = argc > 1 && std::strcmp(argv[1], "--random") == 0;
  values_ = argc > 1 && std::strcmp(argv[1], "--values") == 0;
  if (values_) {
    filter_ = argc > 2 ? argv[2] : "";
    if (argc > 3) seconds_ = std::strtod(argv[3], nullptr);
    return;
  }
  if (!random_) {
    filter_ = argc > 1 ? argv[1] : "";
    return;
  }
  if (argc > 2) count_ = static_cast<unsigned>(std::strtoul(argv[2], nullptr, 10));
  if (argc > 3) first_seed_ = static_cast<unsigned>(std::strtoul(argv[3], nullptr, 10));
  if (argc > 4) seconds_ = std::strtod(argv[4], nullptr);
}

std::vector<Case> Arguments::cases(std::vector<Case> own, bool every_value) const {
  if (values_) return value_cases(every_value);
  if (!random_) return own;
  std::vector<Case> drawn;
  for (unsigned i = 0; i < count_; ++i) {
    drawn.push_back(random_case(first_seed_ + i));
    drawn.back().seed = first_seed_ + i;
  }
  return drawn;
}

}  // namespace simt
