#include "attention_test.h"
#include "core/operations/merge.h"
#include "cuda/merge/row_per_warp/kernel.cuh"

namespace {

struct MergeCase {
  int num_states;
  int batch_size;
  int seqlen_q;
  int num_heads;
  int head_dim_v;
  int num_blocks;  // fewer than rows / kNumWarps: warps take several rows
  simt::Layout layout = simt::Layout::kBshd;
};

// Parts: some empty (lse an infinity, out = NaN), and row 0 of batch 0 empty in all of them.
template <typename T>
struct Parts {
  std::vector<simt::Tensor<T>> outs;
  std::vector<simt::Tensor<float>> lses;  // [batch, heads, rows, 1]
};

template <typename T>
Parts<T> make_parts(const MergeCase& c) {
  Parts<T> parts;
  parts.outs.resize(c.num_states);
  parts.lses.resize(c.num_states);
  std::mt19937 random(c.num_states);
  for (int n = 0; n < c.num_states; ++n) {
    simt::Tensor<T>& out = parts.outs[n];
    simt::Tensor<float>& lse = parts.lses[n];
    // Parts need not have the same layout.
    simt::allocate(&out, n % 2 ? simt::Layout::kBhsd : c.layout, c.batch_size, c.seqlen_q,
                   c.num_heads, c.head_dim_v);
    simt::allocate(&lse, simt::Layout::kBshd, c.batch_size, c.num_heads, c.seqlen_q, 1);
    out.fill(&random, 1.0, 0.5);
    lse.fill(&random, 3.0, 20.0);
    for (int b = 0; b < c.batch_size; ++b) {
      for (int h = 0; h < c.num_heads; ++h) {
        for (int i = 0; i < c.seqlen_q; ++i) {
          if ((b > 0 || i > 0) && (i + n) % 5 != 4) continue;
          lse.at(b, h, i, 0) = (i + h + n) % 2 ? INFINITY : -INFINITY;
          for (int d = 0; d < c.head_dim_v; ++d) out.at(b, i, h, d) = static_cast<T>(NAN);
        }
      }
    }
  }
  return parts;
}

template <typename T>
dlattn::MergeParams make_merge_params(const MergeCase& c, const Parts<T>& parts,
                                      const simt::Tensor<T>& out, const simt::Tensor<float>& lse) {
  dlattn::MergeParams p;
  p.num_states = c.num_states;
  for (int n = 0; n < c.num_states; ++n) {
    p.outs[n].data = parts.outs[n].data(), p.outs[n].dtype = simt::DTypeOf<T>::value;
    p.lses[n].data = parts.lses[n].data();
    p.outs[n].batch_stride = parts.outs[n].stride(0),
    p.outs[n].row_stride = parts.outs[n].stride(1);
    p.outs[n].head_stride = parts.outs[n].stride(2);
    p.lses[n].batch_stride = parts.lses[n].stride(0);
    p.lses[n].head_stride = parts.lses[n].stride(1), p.lses[n].row_stride = parts.lses[n].stride(2);
  }
  p.out.data = out.data(), p.lse.data = lse.data();
  p.out.batch_stride = out.stride(0), p.out.row_stride = out.stride(1);
  p.out.head_stride = out.stride(2);
  p.lse.batch_stride = lse.stride(0), p.lse.head_stride = lse.stride(1);
  p.out.dtype = simt::DTypeOf<T>::value;
  p.device.type = dlattn::DeviceType::kCuda;
  p.batch_size = c.batch_size, p.seqlen_q = c.seqlen_q, p.num_heads = c.num_heads;
  p.head_dim_v = c.head_dim_v;
  return p;
}

// One row merged in Real; weights are summed in the order of the parts.
template <typename Real, typename T>
void merge_row(const Parts<T>& parts, int b, int h, int i, std::vector<Real>* out, Real* lse) {
  Real maximum = -INFINITY, sum = 0;
  for (const auto& part : parts.lses) {
    if (!std::isfinite(part.at(b, h, i, 0))) continue;
    maximum = std::max(maximum, static_cast<Real>(part.at(b, h, i, 0)));
  }
  std::fill(out->begin(), out->end(), Real{0});
  *lse = -INFINITY;
  if (maximum == -INFINITY) return;
  for (std::size_t n = 0; n < parts.outs.size(); ++n) {
    if (!std::isfinite(parts.lses[n].at(b, h, i, 0))) continue;
    const Real weight = std::exp(static_cast<Real>(parts.lses[n].at(b, h, i, 0)) - maximum);
    sum += weight;
    for (std::size_t d = 0; d < out->size(); ++d) {
      (*out)[d] += weight * static_cast<Real>(static_cast<float>(parts.outs[n].at(b, i, h, d)));
    }
  }
  for (Real& x : *out) x /= sum;
  *lse = maximum + std::log(sum);
}

template <typename T>
simt::Errors compare(const MergeCase& c, const Parts<T>& parts, const simt::Tensor<T>& out,
                     const simt::Tensor<float>& lse) {
  simt::Errors e;
  std::vector<double> exact(c.head_dim_v);
  std::vector<float> plain(c.head_dim_v);
  double exact_lse;
  float plain_lse;
  for (int b = 0; b < c.batch_size; ++b) {
    for (int h = 0; h < c.num_heads; ++h) {
      for (int i = 0; i < c.seqlen_q; ++i) {
        merge_row(parts, b, h, i, &exact, &exact_lse);
        merge_row(parts, b, h, i, &plain, &plain_lse);
        for (int d = 0; d < c.head_dim_v; ++d) {
          const float rounded = static_cast<float>(static_cast<T>(plain[d]));
          const float got = static_cast<float>(out.at(b, i, h, d));
          e.out = std::max(e.out, simt::distance(got, exact[d]));
          e.plain_out = std::max(e.plain_out, simt::distance(rounded, exact[d]));
        }
        e.lse = std::max(e.lse, simt::distance(lse.at(b, h, i, 0), exact_lse));
        e.plain_lse = std::max(e.plain_lse, simt::distance(plain_lse, exact_lse));
      }
    }
  }
  return e;
}

// All tensors of a call.
template <typename T>
struct All {
  const Parts<T>& parts;
  const simt::Tensor<T>& out;
  const simt::Tensor<float>& lse;
};

template <typename T>
void rewrite(const All<T>& all) {
  for (const auto& part : all.parts.outs) simt::rewrite(part);
  for (const auto& part : all.parts.lses) simt::rewrite(part);
  simt::rewrite(all.out), simt::rewrite(all.lse);
}

template <typename T>
void run(simt::Tests* tests, const MergeCase& c, bool aligned) {
  const Parts<T> parts = make_parts<T>(c);
  simt::Tensor<T> out;
  simt::Tensor<float> lse;
  simt::allocate(&out, c.layout, c.batch_size, c.seqlen_q, c.num_heads, c.head_dim_v);
  simt::allocate(&lse, simt::Layout::kBshd, c.batch_size, c.num_heads, c.seqlen_q, 1);
  const dlattn::MergeParams params = make_merge_params(c, parts, out, lse);
  dlattn::core::validate(params);
  if (aligned && !dlattn::merge::row_per_warp::rows_are_aligned(params, sizeof(T))) return;
  std::string trouble;
  const All<T> all{parts, out, lse};
  for (const simt::Schedule schedule : simt::schedules()) {
    out.poison(), lse.poison();
    simt::Launch launch{dim3(c.num_blocks), dim3(dlattn::merge::row_per_warp::kNumThreads), 0,
                        schedule};
    simt::start_early(&launch, all);
    simt::launch(launch, [&] { dlattn::merge::row_per_warp::kernel<T>(params, aligned); });
    if (!out.gaps_intact() || !lse.gaps_intact()) trouble = "a write outside out or lse";
  }
  const std::string name = std::string("merge ") + dlattn::to_string(params.out.dtype) + " " +
                           std::to_string(c.num_states) + " parts, b" +
                           std::to_string(c.batch_size) + " q" + std::to_string(c.seqlen_q) + " h" +
                           std::to_string(c.num_heads) + " d" + std::to_string(c.head_dim_v) +
                           (aligned ? " aligned" : "");
  tests->report(name, compare(c, parts, out, lse), params.out.dtype, trouble);
}

}  // namespace

int main() {
  simt::Tests tests("merge", "");
  const std::vector<MergeCase> cases = {
      {1, 1, 5, 1, 1, 2},     {2, 2, 9, 3, 64, 14},
      {3, 1, 7, 2, 40, 1},    {5, 2, 6, 1, 33, 3, simt::Layout::kAlign4},
      {32, 1, 3, 2, 128, 40}, {7, 1, 11, 2, 256, 2, simt::Layout::kPacked},
  };
  for (const MergeCase& c : cases) {
    for (const bool aligned : {false, true}) {
      run<half>(&tests, c, aligned);
      run<__nv_bfloat16>(&tests, c, aligned);
      run<float>(&tests, c, aligned);
    }
  }
  return tests.finish();
}
