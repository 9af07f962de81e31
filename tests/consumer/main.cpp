// One query, two keys with scores log(3) and 0: the weights are 3/4 and 1/4, the softmax's
// denominator is 4.
#include <dlattn/attention.h>

#include <cmath>
#include <cstdio>

int main() {
  const float q[4] = {1, 0, 0, 0};
  const float k[2][4] = {{std::log(3.0f), 0, 0, 0}, {0, 0, 0, 0}};
  const float v[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  float out[4] = {NAN, NAN, NAN, NAN}, lse = NAN;

  dlattn::AttentionParams params;
  params.q.data = q, params.k.data = k, params.v.data = v, params.out.data = out,
  params.lse.data = &lse;
  params.q.dtype = params.k.dtype = params.v.dtype = params.out.dtype = dlattn::DType::kFloat32;
  params.batch_size = params.num_heads = params.num_heads_kv = params.seqlen_q = 1;
  params.seqlen_k = 2;
  params.head_dim = params.head_dim_v = 4;
  params.k.row_stride = params.v.row_stride = 4;
  params.softmax_scale = 1.0;
  dlattn::forward(params);
  std::printf("dlattn %s: out = %g %g %g %g, lse = %g\n", dlattn::build_info().version, out[0],
              out[1], out[2], out[3], lse);
  bool ok = std::fabs(lse - std::log(4.0f)) < 1e-6f;
  for (int i = 0; i < 4; ++i) ok = ok && std::fabs(out[i] - (2.0f + i)) < 1e-6f;

  params.softmax_scale = NAN;  // errors of the library are caught by their type here
  try {
    dlattn::forward(params);
    ok = false;
  } catch (const dlattn::UnsupportedError& error) {
    std::printf("refused: %s\n", error.what());
  }
  return ok ? 0 : 1;
}
