// The CPU kernels over the accepted range of every argument: large finite biases, slopes, sinks,
// softcaps, scales, values, and sums over very many keys.
#include <cfloat>
#include <cmath>
#include <limits>

#include "check.h"
#include "core/backend.h"
#include "core/plan/plan.h"
#include "cpu/convert.h"
#include "problem.h"

using namespace dlattn;
using test::Problem;
using test::Reference;
using test::Spec;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr DType kDTypes[] = {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64};
// Finite "minus infinity", as code in use writes it.
const double kMinusInfinities[] = {-1e4,    -65504.0, -1e9, -1e10, -1e20, -3.3895313892515355e38,
                                   -FLT_MAX};

template <typename Change>
void check_changed(Spec spec, const std::string& what, Change change) {
  Problem problem(spec);
  change(problem);
  const Reference reference(problem);
  for (const char* isa : test::isas()) {
    const std::string wrong = test::run_and_judge(problem, reference, isa, 2);
    CHECK_FOR(wrong.empty(), what + ": " + wrong);
  }
}

void set_bias(Problem& p, std::int64_t row, std::int64_t begin, std::int64_t end, double value) {
  for (std::int64_t j = begin; j < end; ++j) p.bias.set(row * p.params.bias.row_stride + j, value);
}

Spec biased(DType dtype) {
  Spec spec;
  spec.dtype = dtype;
  spec.batch_size = 1;
  spec.num_heads = 2;
  spec.seqlen_q = 20;
  spec.seqlen_k = 230;  // two tiles and a part
  spec.bias = spec.bias_fp32 = spec.bias_broadcast = true;
  return spec;
}

// The least number of the dtype itself.
double least_of(DType dtype) {
  return dtype == DType::kFloat16    ? -65504.0
         : dtype == DType::kBFloat16 ? -3.3895313892515355e38
         : dtype == DType::kFloat32  ? -FLT_MAX
                                     : -DBL_MAX;
}

// As padding on the left or the right and as a causal mask, first tile and last.
void large_bias_hides() {
  for (const DType dtype : kDTypes) {
    for (const double value : kMinusInfinities) {
      const std::string what = "bias " + std::to_string(value);
      check_changed(biased(dtype), what + " on the right", [&](Problem& p) {
        for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 40 + i, 230, value);
      });
      check_changed(biased(dtype), what + " on the left", [&](Problem& p) {
        for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 0, 150 + i, value);
      });
      check_changed(biased(dtype), what + " on one key", [&](Problem& p) {
        for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 7 * i, 7 * i + 1, value);
      });
    }
    Spec own = biased(dtype);
    own.bias_fp32 = false;
    check_changed(own, "the least of its dtype", [&](Problem& p) {
      for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 0, 150 + i, least_of(dtype));
    });
  }
}

// Rows whose keys share a bias that dwarfs the scores: the mean of V, and no empty row.
void large_bias_on_all_keys() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const double value : kMinusInfinities) {
      for (const double sign : {1.0, -1.0}) {
        if (std::fabs(value) < 1e9) continue;
        Spec spec = biased(dtype);
        spec.causal = Causal::kBottomRight;
        Problem problem(spec);
        for (std::int64_t i = 0; i < 20; ++i) set_bias(problem, i, 0, 230, sign * value);
        for (const char* isa : test::isas()) {
          problem.poison();
          cpu::forward(problem.params, core::make_plan(problem.params, test::cpu_device(isa), {}));
          bool right = true;
          for (std::int64_t i = 0; i < 20; ++i) {
            const std::int64_t count = 230 - 20 + i + 1;
            for (std::int64_t d = 0; d < spec.head_dim_v; ++d) {
              double mean = 0;
              for (std::int64_t j = 0; j < count; ++j)
                mean += problem.v.get(j * problem.params.v.row_stride + d) / count;
              const double got = problem.out.get(problem.out_index(0, i, 0, d));
              const double unit = dtype == DType::kFloat16 ? 0x1p-11 : 0x1p-8;
              right =
                  right && std::fabs(got - mean) <=
                               (dtype == DType::kFloat32 ? 1e-6 : unit * std::fabs(mean) + 1e-6);
            }
            const double lse = problem.lse.get(problem.lse_index(0, 0, i));
            right = right && std::fabs(lse - sign * value) <= std::fabs(value) * 0x1p-23;
          }
          CHECK_FOR(right, std::string(isa) + ", bias " + std::to_string(sign * value));
        }
      }
    }
  }
  // Beyond float, lse is the nearest number: the row is no empty one.
  Spec own = biased(DType::kFloat64);
  own.bias_fp32 = false;
  check_changed(own, "all keys at the least of float64", [&](Problem& p) {
    for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 0, 230, -DBL_MAX);
  });
  // Below 1e9, and float64, whose scores hold more: no worse than the plain formula.
  for (const DType dtype : kDTypes) {
    for (const double value : kMinusInfinities) {
      if (dtype != DType::kFloat64 && std::fabs(value) >= 1e9) continue;
      check_changed(biased(dtype), "all keys at " + std::to_string(value), [&](Problem& p) {
        for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 0, 230, value);
      });
    }
  }
}

// Sums of finite scores stay finite: least biases with slopes that point the same way.
void least_bias_and_slopes() {
  Spec spec = biased(DType::kFloat32);
  spec.alibi = true;
  Problem problem(spec);
  for (std::int64_t i = 0; i < 20; ++i) set_bias(problem, i, 0, 230, -FLT_MAX);
  for (std::int64_t h = 0; h < 2; ++h) problem.alibi.set(h, h ? kInf : 1e30);
  for (const char* isa : test::isas()) {
    problem.poison();
    cpu::forward(problem.params, core::make_plan(problem.params, test::cpu_device(isa), {}));
    for (std::int64_t i = 0; i < 20; ++i) {
      CHECK(problem.lse.get(problem.lse_index(0, 1, i)) == -FLT_MAX);
      CHECK(std::isfinite(problem.out.get(problem.out_index(0, i, 1, 3))));
    }
  }
}

// -inf hides a key as a mask does, whatever its score; +inf and NaN make their row NaN.
void special_bias() {
  for (const DType dtype : kDTypes) {
    check_changed(biased(dtype), "-inf over NaN", [](Problem& p) {
      for (std::int64_t i = 0; i < 20; ++i) set_bias(p, i, 100, 230, -kInf);
      p.k.set(120 * p.params.k.row_stride + 3, std::nan(""));
      p.k.set(121 * p.params.k.row_stride + 3, kInf);
    });
    for (const double bad : {kInf, std::nan("")}) {
      check_changed(biased(dtype), "a bad bias", [&](Problem& p) {
        set_bias(p, 3, 0, 1, bad);
        set_bias(p, 9, 200, 201, bad);
        set_bias(p, 12, 0, 230, bad);
      });
    }
  }
}

void slopes() {
  for (const DType dtype : kDTypes) {
    for (const double slope : {1e-30, 1000.0, 0x1p28, 1e9, 0x1p64, 1e20, 1e30, 3.4e38, kInf}) {
      for (const double sign : {1.0, -1.0}) {
        Spec spec;
        spec.dtype = dtype;
        spec.alibi = true;
        check_changed(spec, "slope " + std::to_string(sign * slope), [&](Problem& p) {
          for (std::int64_t h = 0; h < p.alibi.size(); h += 2) p.alibi.set(h, sign * slope);
        });
      }
    }
    Spec spec;
    spec.dtype = dtype;
    spec.alibi = true;
    check_changed(spec, "a slope of NaN", [](Problem& p) { p.alibi.set(1, std::nan("")); });
  }
}

// Two keys at the same distance have the same penalty, rounded before the scores come to it: one
// that absorbs them leaves the mean of the two. This one lies half-way between two floats, so that
// adding the scores before the rounding would give the keys different ones.
void equal_penalties() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32}) {
    for (const double sign : {1.0, -1.0}) {
      Spec spec;
      spec.dtype = dtype;
      spec.batch_size = spec.num_heads = spec.num_heads_kv = 1;
      spec.seqlen_q = 21;
      spec.seqlen_k = 41;  // query 0 stands at key 20
      spec.alibi = spec.mask = true;
      Problem problem(spec);
      problem.alibi.set(0, sign * 128.0 * (8388608 + 4));  // times 13
      for (std::int64_t j = 0; j < 41; ++j) problem.mask[j] = j == 20 - 13 || j == 20 + 13;
      for (std::int64_t d = 0; d < spec.head_dim; ++d) {
        problem.q.set(d, 1.0);
        problem.k.set((20 - 13) * problem.params.k.row_stride + d, 0.5);
        problem.k.set((20 + 13) * problem.params.k.row_stride + d, -0.5);
      }
      for (const char* isa : test::isas()) {
        problem.poison();
        cpu::forward(problem.params, core::make_plan(problem.params, test::cpu_device(isa), {}));
        for (std::int64_t d = 0; d < spec.head_dim_v; ++d) {
          const double a = problem.v.get((20 - 13) * problem.params.v.row_stride + d);
          const double b = problem.v.get((20 + 13) * problem.params.v.row_stride + d);
          const double got = problem.out.get(problem.out_index(0, 0, 0, d));
          CHECK_FOR(std::fabs(got - (a + b) / 2) <= 0.005 * (std::fabs(a) + std::fabs(b)), isa);
        }
      }
    }
  }
}

void sinks() {
  for (const DType dtype : kDTypes) {
    for (const double sink : std::initializer_list<double>{
             1e-30, 1e9, -1e9, 2.3e38, 2.4e38, FLT_MAX, -FLT_MAX, kInf, -kInf, std::nan("")}) {
      Spec spec;
      spec.dtype = dtype;
      spec.sinks = true;
      spec.seqlen_q = 90;  // rows without a key among them
      spec.causal = Causal::kBottomRight;
      check_changed(spec, "sink " + std::to_string(sink), [&](Problem& p) {
        p.sinks.set(0, sink);
        p.sinks.set(4, sink);
      });
    }
  }
}

void softcaps() {
  for (const DType dtype : kDTypes) {
    for (const int exponent : {-100, -60, -20, -3, 0, 5, 10, 17, 24, 40, 70, 100}) {
      for (const double scale : {0.01, 1.0, 100.0}) {
        Spec spec;
        spec.dtype = dtype;
        spec.softcap = std::ldexp(1.0, exponent);
        spec.softmax_scale = scale;
        spec.seqlen_q = 5;
        check_changed(spec, "scale " + std::to_string(scale), [](Problem&) {});
      }
    }
  }
}

// q and k by which the scores are what they are elsewhere, whatever the scale.
void scales() {
  for (const DType dtype : {DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const int exponent : {-126, -100, -40, 40, 100, 126}) {
      for (const bool adjusts : {false, true}) {
        Spec spec;
        spec.dtype = dtype;
        spec.softmax_scale = std::ldexp(1.0, exponent);
        spec.alibi = adjusts;
        spec.causal = Causal::kBottomRight;
        check_changed(spec, "scale 2^" + std::to_string(exponent), [&](Problem& p) {
          // Scores are of a few units, but q.k stays within 2^126.
          const double factor = std::ldexp(exponent == -126 ? 0.1 : 0.4, -exponent / 2);
          for (std::int64_t i = 0; i < p.q.size(); ++i) p.q.set(i, p.q.get(i) * factor);
          for (std::int64_t i = 0; i < p.k.size(); ++i) p.k.set(i, p.k.get(i) * factor);
        });
      }
    }
  }
}

// Equal keys at q = k = 30,000 weigh the same: 1e9 * head_dim is common to all scores.
void equal_huge_scores() {
  for (const DType dtype : kDTypes) {
    for (const bool adjusts : {false, true}) {
      Spec spec;
      spec.dtype = dtype;
      spec.mask = adjusts;
      spec.seqlen_k = 300;
      check_changed(spec, "q = k = 30000", [](Problem& p) {
        for (std::int64_t i = 0; i < p.q.size(); ++i) p.q.set(i, 30000.0);
        for (std::int64_t i = 0; i < p.k.size(); ++i) p.k.set(i, 30000.0);
      });
    }
  }
}

// The unnormalised sum of V would be beyond its type.
void largest_values() {
  for (const DType dtype : kDTypes) {
    Spec spec;
    spec.dtype = dtype;
    spec.seqlen_q = 4;
    const double largest = dtype == DType::kFloat16   ? 65504.0
                           : dtype == DType::kFloat64 ? DBL_MAX
                                                      : 3.38e38;
    for (const std::int64_t seqlen_k : {70, 4000}) {
      spec.seqlen_k = seqlen_k;
      Problem problem(spec);
      for (std::int64_t i = 0; i < problem.v.size(); ++i) problem.v.set(i, largest);
      for (const char* isa : test::isas()) {
        problem.poison();
        cpu::forward(problem.params, core::make_plan(problem.params, test::cpu_device(isa), {}));
        const double got = problem.out.get(problem.out_index(1, 2, 3, 4));
        CHECK_FOR(std::fabs(got / problem.v.get(0) - 1) < 1e-6, std::to_string(got));
      }
    }
  }
}

// Millions of keys of one query, in a single pass too: constants lose the most of a sum that is too
// short, and slowly rising scores the most of a rescaling at every tile.
void very_many_keys() {
  const float q = 0.5f, k = 2.0f, v = 0.3f;
  for (const float slope : {0.0f, 4e-6f}) {
    float out = 0, lse = 0;
    const std::int64_t num_keys = std::int64_t{1} << (slope > 0 ? 22 : 25);
    AttentionParams p;
    p.q.dtype = p.k.dtype = p.v.dtype = p.out.dtype = DType::kFloat32;
    p.q.data = &q, p.k.data = &k, p.v.data = &v, p.out.data = &out,
    p.lse.data = &lse;  // K and V by strides of 0
    p.batch_size = p.seqlen_q = p.num_heads = p.num_heads_kv = p.head_dim = p.head_dim_v = 1;
    p.seqlen_k = num_keys;
    p.softmax_scale = 1.0;
    p.alibi_slopes.data = slope > 0 ? &slope : nullptr;
    const double a = slope;
    const double sum =
        a > 0 ? -std::expm1(-a * num_keys) / -std::expm1(-a) : static_cast<double>(num_keys);
    for (const char* isa : test::isas()) {
      for (const bool whole : {true, false}) {
        if (!whole && isa != test::isas().back()) continue;
        Options options;
        options.batch_invariant = whole;
        out = lse = NAN;
        cpu::forward(p, core::make_plan(p, test::cpu_device(isa), options));
        const std::string what = std::string(isa) + (whole ? " whole" : " split");
        CHECK_FOR(std::fabs(out - v) <= 1e-6, what + ": out is " + std::to_string(out));
        CHECK_FOR(std::fabs(lse - (1.0 + std::log(sum))) <= 4e-6,
                  what + ": lse is " + std::to_string(lse));
      }
    }
  }
}

// Random V with a mean over more keys than a run: within the bound of fewer.
void long_rows() {
  for (const DType dtype : kDTypes) {
    Spec spec;
    spec.dtype = dtype;
    spec.batch_size = spec.num_heads = spec.num_heads_kv = 1;
    spec.seqlen_q = 2;
    spec.seqlen_k = 50000;
    spec.head_dim = spec.head_dim_v = 3;
    check_changed(spec, "50000 keys", [](Problem&) {});
  }
}

}  // namespace

int main() {
  large_bias_hides();
  large_bias_on_all_keys();
  least_bias_and_slopes();
  special_bias();
  slopes();
  equal_penalties();
  sinks();
  softcaps();
  scales();
  equal_huge_scores();
  largest_values();
  long_rows();
  very_many_keys();
  return test::summary();
}
