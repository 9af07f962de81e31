#pragma once

#include <cmath>
#include <optional>
#include <sstream>
#include <string>

namespace simt {

// Values at the ends of their range, set in a case's tensors after these are drawn. Each row's
// result is certain: float32 decides every score's place, or all scores that matter are equal.
struct Extreme {
  enum class Where {
    kNowhere,
    kRight,     // the last `count` keys, as right padding; kernels walk from the last key on
    kLeft,      // the first `count` keys
    kAfterRow,  // keys after their row's position, as a causal mask
    kTile,      // keys 64 to 127
    kOddRows,   // all keys of every other row
    kEverywhere,
  };

  Where where = Where::kNowhere;
  int count = 0;
  double bias = 0.0;   // added to the bias there; -inf, or else up to its dtype's ends
  double equal = 0.0;  // q and k, all of them; 0: as drawn
  std::optional<double> slope, sink, scale;
  bool one_key = false;  // one key of each row outweighs the others: out is its value, exactly

  bool holds(int i, int j, int seqlen_q, int seqlen_k) const {
    switch (where) {
      case Where::kNowhere:
        return false;
      case Where::kRight:
        return j >= seqlen_k - count;
      case Where::kLeft:
        return j < count;
      case Where::kAfterRow:
        return j > i + seqlen_k - seqlen_q;
      case Where::kTile:
        return j >= 64 && j < 128;
      case Where::kOddRows:
        return i % 2 == 1;
      case Where::kEverywhere:
        return true;
    }
    return false;
  }

  std::string name() const;
};

// The largest finite value of a dtype.
template <typename T>
float largest_of() {
  return sizeof(T) == 4
             ? 3.4028235e38f
             : (static_cast<float>(static_cast<T>(1e38f)) < INFINITY ? 3.3895314e38f : 65504.0f);
}

template <typename Case, typename T>
void add_extreme_bias(const Case& c, const T& bias) {
  if (!bias.data()) return;
  using Element = std::decay_t<decltype(bias.at(0, 0, 0, 0))>;
  const double most = largest_of<Element>();
  const Extreme& e = *c.extreme;
  for (int b = 0; b < (bias.stride(0) ? c.batch_size : 1); ++b) {
    for (int h = 0; h < (bias.stride(1) ? c.num_heads : 1); ++h) {
      for (int i = 0; i < c.seqlen_q; ++i) {
        for (int j = 0; j < c.seqlen_k; ++j) {
          if (!e.holds(i, j, c.rows_q(b), c.rows_k(b))) continue;
          Element& x = bias.at(b, h, i, j);
          const double sum =
              e.bias == -INFINITY
                  ? e.bias
                  : std::fmax(std::fmin(static_cast<float>(x) + e.bias, most), -most);
          x = static_cast<Element>(static_cast<float>(sum));
        }
      }
    }
  }
}

// Sets the extreme values of a case in its tensors.
template <typename Case, typename Tensors>
void set_extremes(const Case& c, const Tensors& t) {
  const Extreme& e = *c.extreme;
  using T = std::decay_t<decltype(t.q.at(0, 0, 0, 0))>;
  const auto to = [](double x) {
    return [x](auto& element) {
      element = static_cast<std::decay_t<decltype(element)>>(static_cast<float>(x));
    };
  };
  if (e.equal != 0.0) {
    static_assert(sizeof(T) <= 4);
    t.q.for_each(to(e.equal)), t.k.for_each(to(e.equal));
  }
  if (e.slope) t.alibi.for_each(to(*e.slope));
  if (e.sink) t.sinks.for_each(to(*e.sink));
  add_extreme_bias(c, t.bias), add_extreme_bias(c, t.bias_float32);
}

}  // namespace simt
