#include "value_cases.h"

#include <limits>
#include <sstream>
#include <string>
#include <vector>

namespace simt {

std::string Extreme::name() const {
  static const char* const kWhere[] = {"",      "right ",    "left ",      "after-row ",
                                       "tile ", "odd-rows ", "everywhere "};
  std::ostringstream out;
  if (where != Where::kNowhere) out << " " << kWhere[static_cast<int>(where)];
  if (count) out << count << " ";
  if (bias != 0.0) out << "bias=" << bias;
  if (equal != 0.0) out << " equal=" << equal;
  if (slope) out << " slope=" << *slope;
  if (sink) out << " sink=" << *sink;
  if (scale) out << " scale=" << *scale;
  return out.str();
}

std::vector<Case> value_cases_of(const Case& base, bool all) {
  using Where = Extreme::Where;
  std::vector<Case> cases;
  const auto add = [&](auto set) {
    Case c = base;
    c.extreme.emplace();
    set(c, *c.extreme);
    cases.push_back(c);
  };
  const auto add_bias = [&](Bias dtype, double value, Where where, int count = 0) {
    add([=](Case& c, Extreme& e) {
      c.bias = dtype, e.bias = value, e.where = where, e.count = count;
    });
  };
  constexpr double kInf = std::numeric_limits<double>::infinity();
  constexpr double kLowest = -3.4028235e38;  // cut off at the dtype's own
  add_bias(Bias::kFloat32, -1e9, Where::kRight, 136);
  add_bias(Bias::kFloat32, -1e9, Where::kLeft, 130);
  add_bias(Bias::kFloat32, -1e9, Where::kEverywhere);
  add_bias(Bias::kFloat32, kLowest, Where::kEverywhere);
  add_bias(Bias::kOwnDType, kLowest, Where::kAfterRow);
  add([](Case&, Extreme& e) { e.equal = 30000.0; });
  add([](Case& c, Extreme&) { c.softcap = 1e7; });
  for (const Causal causal : {kFull, kTopLeft}) {
    add([=](Case& c, Extreme& e) {
      c.causal = causal, c.alibi = e.one_key = true, e.slope = -1000.0;
    });
  }
  add([](Case& c, Extreme& e) { c.alibi = true, e.slope = 1e30; });
  add([](Case& c, Extreme& e) { c.sinks = true, e.sink = 3e38; });
  if (!all) return cases;
  add_bias(Bias::kFloat32, -1e9, Where::kRight, 64);
  add_bias(Bias::kFloat32, -1e9, Where::kAfterRow);
  add_bias(Bias::kFloat32, -1e9, Where::kTile);
  add_bias(Bias::kFloat32, -1e9, Where::kOddRows);
  add_bias(Bias::kFloat32, -1e10, Where::kRight, 72);
  add_bias(Bias::kFloat32, -1e4, Where::kRight, 72);
  add_bias(Bias::kFloat32, -1e20, Where::kLeft, 64);
  add_bias(Bias::kFloat32, -1e20, Where::kEverywhere);
  add_bias(Bias::kFloat32, kLowest, Where::kRight, 136);
  add_bias(Bias::kFloat32, kLowest, Where::kOddRows);
  add_bias(Bias::kOwnDType, kLowest, Where::kRight, 136);
  add_bias(Bias::kOwnDType, kLowest, Where::kEverywhere);
  add_bias(Bias::kFloat32, 1e9, Where::kLeft, 1);
  add_bias(Bias::kFloat32, 1e9, Where::kRight, 1);
  for (const double softcap : {1e3, 1e5}) add([=](Case& c, Extreme&) { c.softcap = softcap; });
  for (const double slope : {1000.0, -1e4, 1e18, -1e30, kInf, -kInf})
    add([=](Case& c, Extreme& e) { c.alibi = true, e.slope = slope; });
  for (const double sink : {-3e38, 2.4e38, 1e9, 3.4028235e38, kInf})
    add([=](Case& c, Extreme& e) { c.sinks = true, e.sink = sink; });
  for (const double scale : {0x1p-126, 1e-30, 1e5})
    add([=](Case&, Extreme& e) { e.scale = scale; });
  // Hidden keys beside a scale that leaves nothing of scores, and beside one with a bias.
  add([](Case& c, Extreme& e) { c.mask = true, e.scale = 0x1p-126; });
  add([](Case& c, Extreme& e) {
    c.mask = c.alibi = c.sinks = true, c.softcap = 30.0, c.bias = Bias::kFloat32;
    e.bias = -1e9, e.where = Where::kRight, e.count = 136;
  });
  add([](Case& c, Extreme& e) {
    c.causal = kCausal, c.mask = true, c.bias = Bias::kFloat32;
    e.bias = kLowest, e.where = Where::kOddRows;
  });
  add([](Case& c, Extreme& e) {
    c = varlen(c, {33, 5, 40}, {200, 64, 130});
    c.bias = Bias::kFloat32, e.bias = -1e9, e.where = Where::kRight, e.count = 64;
  });
  return cases;
}

std::vector<Case> extreme_bias_cases(const Case& base) {
  using Where = Extreme::Where;
  static constexpr double kInf = std::numeric_limits<double>::infinity(), kLowest = -3.4028235e38;
  std::vector<Case> cases;
  const auto add = [&](double bias, Where where, int count, auto set) {
    Case c = base;
    c.bias = Bias::kFloat32;
    c.extreme.emplace();
    c.extreme->bias = bias, c.extreme->where = where, c.extreme->count = count;
    set(c, *c.extreme);
    cases.push_back(c);
  };
  const auto nothing = [](Case&, Extreme&) {};
  // Kernels walk from the last key on: rows that see nothing of the first tiles, or of any.
  add(-kInf, Where::kRight, 136, nothing);
  add(-kInf, Where::kOddRows, 0, [](Case& c, Extreme& e) { c.sinks = true, e.sink = -kInf; });
  add(-kInf, Where::kEverywhere, 0, [](Case& c, Extreme& e) { c.sinks = true, e.sink = kInf; });
  add(kLowest, Where::kRight, 136, [](Case& c, Extreme&) { c.mask = true; });
  add(kLowest, Where::kEverywhere, 0, [](Case& c, Extreme&) { c.causal = kCausal; });
  add(kLowest, Where::kTile, 0, [](Case& c, Extreme& e) { c.sinks = true, e.sink = -3e38; });
  add(1e9, Where::kLeft, 1, nothing);
  add(3e38, Where::kOddRows, 0, [](Case& c, Extreme& e) { c.sinks = true, e.sink = 1e38; });
  return cases;
}

std::vector<Case> far_key_cases() {
  std::vector<Case> cases;
  for (const int head_dim : {64, 96, 128}) {
    for (const double slope : {-1000.0, -300.3}) {
      for (const Case& c : {Case{3, 1100, head_dim, kFull, 2, 1}, Case{17, 20, head_dim, kTopLeft},
                            Case{20, 90, head_dim, kCausal, 2, 2}}) {
        cases.push_back(with(c, [=](Case& c) {
          c.alibi = true;
          c.extreme.emplace();
          c.extreme->one_key = true, c.extreme->slope = slope;
        }));
      }
    }
  }
  return cases;
}

std::vector<Case> value_cases(bool every_value) {
  std::vector<Case> cases;
  for (const int head_dim : {64, 96, 128, 192, 256, 512}) {
    const bool all = head_dim == 64 || (every_value && head_dim == 128);
    append(&cases, value_cases_of({20, 200, head_dim, kFull, 2, 1}, all));
  }
  append(&cases, value_cases_of({40, 136, 192, kCausal, 1, 1, Layout::kBshd, 128}, false));
  append(&cases, value_cases_of({1, 200, 64, kFull, 4, 1}, false));  // packed heads
  append(&cases, far_key_cases());
  return cases;
}

}  // namespace simt
