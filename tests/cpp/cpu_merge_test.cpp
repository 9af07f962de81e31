// merge_states on the CPU: parts over disjoint keys give what all keys give, for every dtype,
// stride and empty part.
#include <cfloat>
#include <cmath>
#include <limits>

#include "check.h"
#include "problem.h"

using namespace dlattn;
using test::Buffer;

namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::int64_t kBatch = 2, kHeads = 3, kDim = 9;

struct Parts {
  Parts(DType dtype, int count, std::int64_t gap, std::int64_t rows = 5) {
    std::mt19937 random(3);
    params.out.dtype = dtype;
    for (TensorView& part : params.outs) part.dtype = dtype;
    params.num_states = count;
    params.batch_size = kBatch;
    params.seqlen_q = rows;
    params.num_heads = kHeads;
    params.head_dim_v = kDim;
    const std::int64_t head = kDim + gap, row = kHeads * head + gap, batch = rows * row + gap;
    const std::int64_t lse_row = 1 + gap, lse_head = rows * lse_row + gap,
                       lse_batch = kHeads * lse_head + gap;
    for (int n = 0; n < count; ++n) {
      outs.emplace_back(dtype, kBatch * batch);
      lses.emplace_back(DType::kFloat32, kBatch * lse_batch);
      outs.back().fill_normal(random, 0.5, 1.0);
      lses.back().fill_normal(random, 1.0, 3.0);
    }
    for (int n = 0; n < count; ++n) {
      params.outs[n].data = outs[n].data();
      params.lses[n].data = static_cast<const float*>(lses[n].data());
      params.outs[n].batch_stride = batch, params.outs[n].row_stride = row,
      params.outs[n].head_stride = head;
      params.lses[n].batch_stride = lse_batch, params.lses[n].head_stride = lse_head;
      params.lses[n].row_stride = lse_row;
    }
    out = Buffer(dtype, kBatch * batch);
    lse = Buffer(DType::kFloat32, kBatch * kHeads * (rows + gap));
    params.out.data = out.data();
    params.lse.data = static_cast<float*>(lse.data());
    params.out.batch_stride = batch, params.out.row_stride = row, params.out.head_stride = head;
    params.lse.head_stride = rows + gap;
    params.lse.batch_stride = kHeads * params.lse.head_stride;
  }
  std::int64_t out_at(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return b * params.out.batch_stride + i * params.out.row_stride + h * params.out.head_stride;
  }
  std::int64_t lse_in(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return b * params.lses[0].batch_stride + h * params.lses[0].head_stride +
           i * params.lses[0].row_stride;
  }
  std::int64_t lse_out(std::int64_t b, std::int64_t i, std::int64_t h) const {
    return b * params.lse.batch_stride + h * params.lse.head_stride + i;
  }

  MergeParams params;
  std::vector<Buffer> outs, lses;
  Buffer out, lse;
};

double unit(DType dtype) {
  switch (dtype) {
    case DType::kFloat16:
      return 0x1p-10;
    case DType::kBFloat16:
      return 0x1p-7;
    case DType::kFloat32:
      return 0x1p-23;
    case DType::kFloat64:
      return 0x1p-50;  // the inputs' lse are fp32, but exact as such
  }
  return 0;
}

// Merges and compares every row with the formula in long double.
void check(Parts& parts) {
  merge_states(parts.params);
  const int count = parts.params.num_states;
  for (std::int64_t b = 0; b < kBatch; ++b) {
    for (std::int64_t i = 0; i < parts.params.seqlen_q; ++i) {
      for (std::int64_t h = 0; h < kHeads; ++h) {
        long double sum = 0;
        for (int n = 0; n < count; ++n)
          sum += std::exp(static_cast<long double>(parts.lses[n].get(parts.lse_in(b, i, h))));
        const double want_lse = sum == 0 ? -kInf : static_cast<double>(std::log(sum));
        const double got_lse = parts.lse.get(parts.lse_out(b, i, h));
        CHECK(got_lse == want_lse ||
              std::fabs(got_lse - want_lse) <= 1e-6 * (1 + std::fabs(want_lse)));
        parts.lse.expect_write(parts.lse_out(b, i, h));
        for (std::int64_t d = 0; d < kDim; ++d) {
          long double want = 0;
          for (int n = 0; n < count; ++n) {
            const double lse = parts.lses[n].get(parts.lse_in(b, i, h));
            if (lse == -kInf) continue;
            want += std::exp(static_cast<long double>(lse)) / sum *
                    parts.outs[n].get(parts.out_at(b, i, h) + d);
          }
          const double got = parts.out.get(parts.out_at(b, i, h) + d);
          CHECK(std::fabs(got - static_cast<double>(want)) <=
                unit(parts.params.out.dtype) * (1 + std::fabs(got)));
          parts.out.expect_write(parts.out_at(b, i, h) + d);
        }
      }
    }
  }
  CHECK_EQ(parts.out.stray_writes(), 0);
  CHECK_EQ(parts.lse.stray_writes(), 0);
}

void all_dtypes() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    for (const int count : {1, 2, 3, kMaxMergeStates}) {
      for (const std::int64_t gap : {0, 3}) {
        Parts parts(dtype, count, gap);
        check(parts);
      }
    }
  }
}

// Enough rows for several threads.
void many_rows() {
  Parts parts(DType::kFloat32, kMaxMergeStates, 0, 700);
  check(parts);
}

void empty_parts() {
  Parts parts(DType::kFloat32, 3, 0);
  for (std::int64_t h = 0; h < kHeads; ++h) {
    parts.lses[1].set(parts.lse_in(0, 0, h), -kInf);  // its output does not count, not even NaN
    for (std::int64_t d = 0; d < kDim; ++d)
      parts.outs[1].set(parts.out_at(0, 0, h) + d, std::nan(""));
  }
  for (int n = 0; n < 3; ++n)
    parts.lses[n].set(parts.lse_in(1, 2, 0), -kInf);  // a row that no part saw
  for (int n = 0; n < 3; ++n)
    parts.lses[n].set(parts.lse_in(1, 3, 0), 1000.0 + n);  // beyond exp's range
  merge_states(parts.params);
  CHECK(parts.out.get(parts.out_at(1, 2, 0)) == 0.0);
  CHECK(parts.lse.get(parts.lse_out(1, 2, 0)) == -kInf);
  CHECK(std::isfinite(parts.out.get(parts.out_at(0, 0, 0))));
  CHECK(std::isfinite(parts.out.get(parts.out_at(1, 3, 0))));
  CHECK(std::fabs(parts.lse.get(parts.lse_out(1, 3, 0)) - 1002.4076) < 1e-3);
}

// +inf is what flash attention's functions say of rows that saw nothing.
void either_infinity_is_an_empty_part() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    Parts parts(dtype, 3, 0);
    const double nan = std::nan("");
    const auto empty = [&](int n, std::int64_t b, std::int64_t i, std::int64_t h, double lse) {
      parts.lses[n].set(parts.lse_in(b, i, h), lse);
      for (std::int64_t d = 0; d < kDim; ++d) parts.outs[n].set(parts.out_at(b, i, h) + d, nan);
    };
    empty(0, 0, 1, 0, kInf), empty(2, 0, 1, 0, kInf);  // one part is left
    empty(1, 0, 2, 1, kInf), empty(2, 0, 2, 1, -kInf);
    for (int n = 0; n < 3; ++n) empty(n, 1, 3, 2, n == 1 ? -kInf : kInf);  // none
    empty(0, 1, 4, 0, kInf), empty(1, 1, 4, 0, nan);
    merge_states(parts.params);
    const auto lse = [&](std::int64_t b, std::int64_t i, std::int64_t h) {
      return parts.lse.get(parts.lse_out(b, i, h));
    };
    CHECK(lse(0, 1, 0) == parts.lses[1].get(parts.lse_in(0, 1, 0)));
    CHECK(lse(0, 2, 1) == parts.lses[0].get(parts.lse_in(0, 2, 1)));
    CHECK(lse(1, 3, 2) == -kInf);
    CHECK(std::isnan(lse(1, 4, 0)));
    for (std::int64_t d = 0; d < kDim; ++d) {
      const auto same = [&](int n, std::int64_t at) {
        return parts.out.get(at) == parts.outs[n].get(at);
      };
      CHECK(same(1, parts.out_at(0, 1, 0) + d) && same(0, parts.out_at(0, 2, 1) + d));
      CHECK(parts.out.get(parts.out_at(1, 3, 2) + d) == 0.0);
      CHECK(std::isnan(parts.out.get(parts.out_at(1, 4, 0) + d)));
    }
  }
}

// lse of any finite size, of parts that saw keys: weights by differences, which double holds.
void lse_of_any_size() {
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16, DType::kFloat32, DType::kFloat64}) {
    Parts parts(dtype, 3, 0);
    const double sizes[] = {FLT_MAX, -FLT_MAX, 2.4e38, -1e9, 0.0, 1e-38};
    int at = 0;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t i = 0; i < 5; ++i) {
        for (std::int64_t h = 0; h < kHeads; ++h, ++at) {
          const double top = sizes[at % 6];
          for (int n = 0; n < 3; ++n) {  // two equal ones, and one far below or absent
            const double least = at % 2 || top == -FLT_MAX ? -kInf : -FLT_MAX;
            parts.lses[n].set(parts.lse_in(b, i, h), n == at % 3 ? least : top);
          }
        }
      }
    }
    merge_states(parts.params);
    at = 0;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t i = 0; i < 5; ++i) {
        for (std::int64_t h = 0; h < kHeads; ++h, ++at) {
          const double top = sizes[at % 6];
          const double lse = parts.lse.get(parts.lse_out(b, i, h));
          CHECK(lse == static_cast<float>(top + std::log(2.0)));
          for (std::int64_t d = 0; d < kDim; ++d) {
            double want = 0;
            for (int n = 0; n < 3; ++n) {
              if (n != at % 3) want += 0.5 * parts.outs[n].get(parts.out_at(b, i, h) + d);
            }
            const double got = parts.out.get(parts.out_at(b, i, h) + d);
            CHECK(std::fabs(got - want) <= unit(dtype) * (1 + std::fabs(want)));
          }
        }
      }
    }
  }
}

void nan_lse_reaches_the_result() {
  Parts parts(DType::kFloat32, 2, 0);
  parts.lses[1].set(parts.lse_in(0, 0, 0), std::nan(""));
  merge_states(parts.params);
  CHECK(std::isnan(parts.out.get(parts.out_at(0, 0, 0))));
  CHECK(std::isnan(parts.lse.get(parts.lse_out(0, 0, 0))));
}

// Attention over keys [0, 30) and [30, 70), merged, is attention over all.
void merges_attention() {
  test::Spec spec;
  test::Problem whole(spec);
  const test::Reference reference(whole);
  test::Problem parts[2] = {test::Problem(spec), test::Problem(spec)};
  const std::int64_t first = 30;
  parts[0].params.seqlen_k = first;
  parts[1].params.seqlen_k = spec.seqlen_k - first;
  parts[1].params.k.data =
      static_cast<const float*>(parts[1].params.k.data) + first * parts[1].params.k.row_stride;
  parts[1].params.v.data =
      static_cast<const float*>(parts[1].params.v.data) + first * parts[1].params.v.row_stride;
  const AttentionParams& p = whole.params;
  MergeParams merge;
  merge.num_states = 2;
  merge.batch_size = p.batch_size, merge.seqlen_q = p.seqlen_q, merge.num_heads = p.num_heads;
  merge.head_dim_v = p.head_dim_v;
  for (int n = 0; n < 2; ++n) {
    forward(parts[n].params);
    const MutableTensorView& out = parts[n].params.out;
    const BasicTensorView<float>& lse = parts[n].params.lse;
    merge.outs[n] = {out.data,        out.batch_stride, out.row_stride,
                     out.head_stride, out.col_stride,   out.dtype};
    merge.lses[n] = {lse.data, lse.batch_stride, 1, lse.head_stride};
  }
  merge.out = p.out, merge.lse = p.lse;
  merge_states(merge);
  const test::Errors errors = test::errors_of(whole, reference);
  CHECK(errors.out < 1e-6);
  CHECK(errors.lse < 1e-6);
}

}  // namespace

int main() {
  all_dtypes();
  many_rows();
  empty_parts();
  either_infinity_is_an_empty_part();
  lse_of_any_size();
  nan_lse_reaches_the_result();
  merges_attention();
  return test::summary();
}
