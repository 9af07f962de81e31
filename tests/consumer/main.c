/* As main.cpp, by the C API. */
#include <dlattn/c.h>
#include <math.h>
#include <stdio.h>

int main(void) {
  float q[4] = {1, 0, 0, 0};
  float k[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
  float v[2][4] = {{1, 2, 3, 4}, {5, 6, 7, 8}};
  float out[4] = {NAN, NAN, NAN, NAN}, lse = NAN;
  DlattnAttention attention = {.struct_size = sizeof attention};
  int i, ok;

  k[0][0] = logf(3.0f);
  attention.q.data = q;
  attention.k.data = k;
  attention.v.data = v;
  attention.out.data = out;
  attention.lse.data = &lse;
  attention.q.dtype = attention.k.dtype = attention.v.dtype = DLATTN_FLOAT32;
  attention.out.dtype = DLATTN_FLOAT32;
  attention.batch_size = attention.num_heads = attention.num_heads_kv = attention.seqlen_q = 1;
  attention.seqlen_k = 2;
  attention.head_dim = attention.head_dim_v = 4;
  attention.k.row_stride = attention.v.row_stride = 4;
  attention.softmax_scale = 1.0;
  if (dlattn_attention(&attention, NULL, NULL) != DLATTN_OK) {
    printf("failed: %s\n", dlattn_last_error());
    return 1;
  }
  printf("dlattn %d: out = %g %g %g %g, lse = %g\n", (int)dlattn_version(), out[0], out[1], out[2],
         out[3], lse);
  ok = fabsf(lse - logf(4.0f)) < 1e-6f;
  for (i = 0; i < 4; ++i) ok = ok && fabsf(out[i] - (2.0f + (float)i)) < 1e-6f;

  attention.softmax_scale = NAN;
  if (dlattn_attention(&attention, NULL, NULL) != DLATTN_UNSUPPORTED) ok = 0;
  printf("refused: %s\n", dlattn_last_error());
  return ok ? 0 : 1;
}
