/* The C API from a C99 program: results against float64 on the CPU, structs of other versions, and
 * every error. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "dlattn/c.h"

static int passed = 0;
static int failures = 0;

static void check(int ok, int line, const char* what) {
  if (ok) {
    ++passed;
    return;
  }
  ++failures;
  fprintf(stderr, "c_api_test.c:%d: FAILED: %s\n    dlattn_last_error: %s\n", line, what,
          dlattn_last_error());
}
#define CHECK(condition) check((condition), __LINE__, #condition)

/* `call` must return `code` and leave exactly these words. */
static void check_fails(int32_t got, int32_t code, const char* words, int line) {
  const char* const error = dlattn_last_error();
  if (got == code && strcmp(error, words) == 0) {
    ++passed;
    return;
  }
  ++failures;
  fprintf(stderr,
          "c_api_test.c:%d: FAILED: returned %d, expected %d\n    words:   %s\n    instead: %s\n",
          line, (int)got, (int)code, error, words);
}
#define CHECK_FAILS(call, code, words) check_fails((call), (code), (words), __LINE__)
#define CHECK_REFUSED(call, words) CHECK_FAILS(call, DLATTN_UNSUPPORTED, words)

enum { kBatch = 2, kQueries = 21, kKeys = 37, kHeads = 4, kHeadsKv = 2, kDim = 24, kDimV = 20 };
enum { kGap = 4 }; /* elements between rows, so that a wrong stride is seen */

static uint64_t random_state = 7;
static double random_number(void) { /* in [-1, 1) */
  random_state = random_state * 6364136223846793005u + 1442695040888963407u;
  return (double)(int32_t)(random_state >> 32) / 2147483648.0;
}

static size_t size_of(int32_t dtype) {
  return dtype == DLATTN_FLOAT64 ? 8 : dtype == DLATTN_FLOAT32 ? 4 : 2;
}
static double load(const void* data, int32_t dtype, int64_t i) {
  uint32_t bits;
  float single;
  if (dtype == DLATTN_FLOAT64) return ((const double*)data)[i];
  if (dtype == DLATTN_FLOAT32) return ((const float*)data)[i];
  bits = (uint32_t)((const uint16_t*)data)[i] << 16;
  memcpy(&single, &bits, 4);
  return single;
}
static double rounded(double x, int32_t dtype) {
  uint32_t bits;
  float single = (float)x;
  if (dtype == DLATTN_FLOAT64) return x;
  if (dtype == DLATTN_FLOAT32) return single;
  memcpy(&bits, &single, 4);
  bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u;
  memcpy(&single, &bits, 4);
  return single;
}
static void store(void* data, int32_t dtype, int64_t i, double x) {
  uint32_t bits;
  float single = (float)rounded(x, dtype);
  if (dtype == DLATTN_FLOAT64) {
    ((double*)data)[i] = x;
  } else if (dtype == DLATTN_FLOAT32) {
    ((float*)data)[i] = single;
  } else {
    memcpy(&bits, &single, 4);
    ((uint16_t*)data)[i] = (uint16_t)(bits >> 16);
  }
}

/* `count` random elements with this mean, or NaN (mean NaN) as an output before a call. */
static void* elements(int32_t dtype, int64_t count, double mean) {
  void* data = malloc((size_t)count * size_of(dtype));
  int64_t i;
  if (!data) exit(2);
  for (i = 0; i < count; ++i) store(data, dtype, i, mean + random_number());
  return data;
}

/* (batch, rows, heads, columns) with gaps; heads before rows if heads_first. */
static DlattnTensor tensor(int32_t dtype, int64_t batch, int64_t rows, int64_t heads,
                           int64_t columns, int heads_first, double mean) {
  DlattnTensor t = {0};
  const int64_t inner = columns + kGap;
  t.row_stride = heads_first ? inner : heads * inner + kGap;
  t.head_stride = heads_first ? rows * inner + kGap : inner;
  t.batch_stride = heads_first ? heads * t.head_stride : rows * t.row_stride;
  t.dtype = dtype;
  t.data = elements(dtype, batch * t.batch_stride + kGap, mean);
  return t;
}

static DlattnAttention problem(int32_t dtype, int heads_first) {
  DlattnAttention a = {.struct_size = sizeof a};
  a.q = tensor(dtype, kBatch, kQueries, kHeads, kDim, heads_first, 0.3);
  a.k = tensor(dtype, kBatch, kKeys, kHeadsKv, kDim, heads_first, 0.2);
  a.v = tensor(dtype, kBatch, kKeys, kHeadsKv, kDimV, heads_first, 1.0);
  a.out = tensor(dtype, kBatch, kQueries, kHeads, kDimV, heads_first, NAN);
  a.lse.data = elements(DLATTN_FLOAT32, kBatch * kHeads * (kQueries + kGap), NAN);
  a.lse.head_stride = kQueries + kGap;
  a.lse.batch_stride = kHeads * a.lse.head_stride;
  a.batch_size = kBatch;
  a.seqlen_q = kQueries;
  a.seqlen_k = kKeys;
  a.num_heads = kHeads;
  a.num_heads_kv = kHeadsKv;
  a.head_dim = kDim;
  a.head_dim_v = kDimV;
  return a;
}
static void release(DlattnAttention* a) {
  free(a->q.data);
  free(a->k.data);
  free(a->v.data);
  free(a->out.data);
  free(a->lse.data);
  free(a->bias.data);
  free(a->mask.data);
  free(a->alibi_slopes.data);
  free(a->sinks.data);
}

/* One row by the plain formula: in float64, or with every step rounded to fp32. */
static int single_steps;
static double step(double x) {
  return single_steps ? (double)(float)x : x;
}

static void plain_row(const DlattnAttention* a, int64_t b, int64_t i, int64_t h, int64_t q_row,
                      int64_t k_row, int64_t num_q, int64_t num_k, double* out, double* lse) {
  const int64_t kv = h / (a->num_heads / a->num_heads_kv);
  const int64_t qb = a->cu_seqlens_q ? 0 : b, c_end = a->head_dim_v;
  const int64_t p = i + (a->causal == DLATTN_TOP_LEFT ? 0 : num_k - num_q);
  const double scale = a->softmax_scale != 0 ? a->softmax_scale : 1 / sqrt((double)a->head_dim);
  double* const scores = (double*)malloc((size_t)(num_k + 1) * sizeof *scores);
  double most = -INFINITY, total = 0;
  int64_t j, c;
  if (!scores) exit(2);
  for (j = 0; j < num_k; ++j) {
    const int64_t at_q =
        qb * a->q.batch_stride + (q_row + i) * a->q.row_stride + h * a->q.head_stride;
    const int64_t at_k =
        qb * a->k.batch_stride + (k_row + j) * a->k.row_stride + kv * a->k.head_stride;
    double s = 0;
    for (c = 0; c < a->head_dim; ++c) {
      s = step(s +
               step(load(a->q.data, a->q.dtype, at_q + c) * load(a->k.data, a->k.dtype, at_k + c)));
    }
    s = step(s * scale);
    if (a->softcap != 0) s = step(a->softcap * step(tanh(step(s / a->softcap))));
    if (a->alibi_slopes.data) {
      const double slope =
          ((float*)a->alibi_slopes
               .data)[b * a->alibi_slopes.batch_stride + h * a->alibi_slopes.head_stride];
      s = step(s - step(slope * fabs((double)(p - j))));
    }
    if (a->bias.data) {
      s = step(s + load(a->bias.data, a->bias.dtype,
                        b * a->bias.batch_stride + h * a->bias.head_stride +
                            i * a->bias.row_stride + j * a->bias.col_stride));
    }
    if (a->mask.data &&
        !((uint8_t*)a->mask.data)[b * a->mask.batch_stride + h * a->mask.head_stride +
                                  i * a->mask.row_stride + j * a->mask.col_stride]) {
      s = -INFINITY;
    }
    if (a->causal != DLATTN_NOT_CAUSAL && j > p) s = -INFINITY;
    if (a->has_window_left && j < p - a->window_left) s = -INFINITY;
    if (a->has_window_right && j > p + a->window_right) s = -INFINITY;
    scores[j] = s;
    if (s > most) most = s;
  }
  if (a->sinks.data) {
    const double sink = ((float*)a->sinks.data)[h];
    if (sink > most) most = sink;
    total = step(exp(step(sink - most)));
  }
  for (c = 0; c < c_end; ++c) out[c] = 0;
  for (j = 0; j < num_k && most > -INFINITY; ++j) {
    const double weight = step(exp(step(scores[j] - most)));
    const int64_t at_v =
        qb * a->v.batch_stride + (k_row + j) * a->v.row_stride + kv * a->v.head_stride;
    total = step(total + weight);
    for (c = 0; c < c_end; ++c)
      out[c] = step(out[c] + step(weight * load(a->v.data, a->v.dtype, at_v + c)));
  }
  for (c = 0; c < c_end && most > -INFINITY; ++c) out[c] = step(out[c] / total);
  *lse = most == -INFINITY ? -INFINITY : step(most + step(log(total)));
  free(scores);
}

/* Whether out and lse are as near to float64 as twice a plain computation in the dtype. */
static int near_float64(const DlattnAttention* a) {
  double worst = 0, plain_worst = 0, lse_worst = 0, lse_plain = 0;
  int64_t b, h, i, c;
  for (b = 0; b < a->batch_size; ++b) {
    const int varlen = a->cu_seqlens_q != NULL;
    const int64_t q_row = varlen ? a->cu_seqlens_q[b] : 0, k_row = varlen ? a->cu_seqlens_k[b] : 0;
    const int64_t num_q = varlen ? a->cu_seqlens_q[b + 1] - q_row : a->seqlen_q;
    const int64_t num_k = a->seqused_k ? a->seqused_k[b]
                          : varlen     ? a->cu_seqlens_k[b + 1] - k_row
                                       : a->seqlen_k;
    for (h = 0; h < a->num_heads; ++h) {
      for (i = 0; i < num_q; ++i) {
        const int64_t at = (varlen ? 0 : b * a->out.batch_stride) +
                           (q_row + i) * a->out.row_stride + h * a->out.head_stride;
        const int64_t at_lse =
            (varlen ? 0 : b * a->lse.batch_stride) + h * a->lse.head_stride + q_row + i;
        double exact[kDimV], plain[kDimV], exact_lse, plain_lse;
        single_steps = 0;
        plain_row(a, b, i, h, q_row, k_row, num_q, num_k, exact, &exact_lse);
        single_steps = a->q.dtype != DLATTN_FLOAT64;
        plain_row(a, b, i, h, q_row, k_row, num_q, num_k, plain, &plain_lse);
        for (c = 0; c < a->head_dim_v; ++c) {
          const double error = fabs(load(a->out.data, a->out.dtype, at + c) - exact[c]);
          if (!(error <= worst)) worst = error; /* NaN stays */
          plain_worst = fmax(plain_worst, fabs(rounded(plain[c], a->out.dtype) - exact[c]));
        }
        if (a->lse.data) {
          const double got = ((float*)a->lse.data)[at_lse];
          const double error = got == exact_lse ? 0 : fabs(got - exact_lse);
          if (!(error <= lse_worst)) lse_worst = error;
          if (exact_lse > -INFINITY)
            lse_plain =
                fmax(lse_plain, fmax(fabs((float)plain_lse - exact_lse), 1e-7 * fabs(exact_lse)));
        }
      }
    }
  }
  if (a->q.dtype == DLATTN_FLOAT64) plain_worst = 1e-14;
  if (worst <= 2 * plain_worst && lse_worst <= 2 * lse_plain) return 1;
  fprintf(stderr, "    out: %g of %g, lse: %g of %g\n", worst, 2 * plain_worst, lse_worst,
          2 * lse_plain);
  return 0;
}

static void dtypes_and_strides(void) {
  const int32_t dtypes[] = {DLATTN_BFLOAT16, DLATTN_FLOAT32, DLATTN_FLOAT64};
  int d, heads_first;
  for (d = 0; d < 3; ++d) {
    for (heads_first = 0; heads_first < 2; ++heads_first) {
      DlattnAttention a = problem(dtypes[d], heads_first);
      CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
      CHECK(near_float64(&a));
      release(&a);
    }
  }
}

/* Each field of DlattnAttention that changes results, alone and then all together. */
static void features(void) {
  int feature;
  for (feature = 0; feature <= 10; ++feature) {
    DlattnAttention a = problem(DLATTN_FLOAT32, 0);
    int64_t i;
    const int all = feature == 10;
    if (feature == 0 || all) a.causal = DLATTN_BOTTOM_RIGHT;
    if (feature == 1) a.causal = DLATTN_TOP_LEFT;
    if (feature == 2 || all) a.has_window_left = 1, a.window_left = 9;
    if (feature == 3) a.has_window_right = 1, a.window_right = 0;
    if (feature == 4 || all) a.softcap = 1.5;
    if (feature == 5 || all) { /* (1, heads, queries, keys) */
      a.bias.data = elements(DLATTN_FLOAT32, kHeads * kQueries * kKeys, 0.5);
      a.bias.dtype = DLATTN_FLOAT32;
      a.bias.head_stride = kQueries * kKeys;
      a.bias.row_stride = kKeys;
      a.bias.col_stride = 1;
    }
    if (feature == 6 || all) { /* (batch, 1, 1, keys); the last entry hides every key */
      a.mask.data = calloc(kBatch, kKeys);
      if (!a.mask.data) exit(2);
      for (i = 0; i < (kBatch - !all) * kKeys; ++i) ((uint8_t*)a.mask.data)[i] = i % 3 != 1;
      a.mask.batch_stride = kKeys;
      a.mask.col_stride = 1;
    }
    if (feature == 7 || all) {
      a.alibi_slopes.data = elements(DLATTN_FLOAT32, kBatch * kHeads, 0.0);
      a.alibi_slopes.batch_stride = kHeads;
      a.alibi_slopes.head_stride = 1;
    }
    if (feature == 8 || all) {
      a.sinks.data = elements(DLATTN_FLOAT32, kHeads, 2.0);
      a.sinks.head_stride = 1;
    }
    if (feature == 9 || all) a.softmax_scale = 0.4;
    CHECK(dlattn_supported(&a, NULL, NULL, 0) == DLATTN_OK);
    CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
    CHECK(near_float64(&a));
    release(&a);
  }
}

static void variable_length(void) {
  const int32_t cu_seqlens_q[] = {0, 13, 13, 40}, cu_seqlens_k[] = {2, 19, 30, 60},
                used[] = {17, 3, 0};
  int with_used;
  for (with_used = 0; with_used < 2; ++with_used) {
    DlattnAttention a = {.struct_size = sizeof a};
    a.q = tensor(DLATTN_FLOAT32, 1, 40, kHeads, kDim, 0, 0.3);
    a.k = tensor(DLATTN_FLOAT32, 1, 64, kHeadsKv, kDim, 0, 0.2);
    a.v = tensor(DLATTN_FLOAT32, 1, 64, kHeadsKv, kDimV, 0, 1.0);
    a.out = tensor(DLATTN_FLOAT32, 1, 40, kHeads, kDimV, 0, NAN);
    a.lse.data = elements(DLATTN_FLOAT32, kHeads * 40, NAN);
    a.lse.head_stride = 40;
    a.batch_size = 3;
    a.seqlen_q = 27;
    a.seqlen_k = 30;
    a.total_q = 40;
    a.total_k = 64;
    a.num_heads = kHeads;
    a.num_heads_kv = kHeadsKv;
    a.head_dim = kDim;
    a.head_dim_v = kDimV;
    a.cu_seqlens_q = cu_seqlens_q;
    a.cu_seqlens_k = cu_seqlens_k;
    a.seqused_k = with_used ? used : NULL;
    a.causal = DLATTN_BOTTOM_RIGHT;
    CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
    CHECK(near_float64(&a));
    release(&a);
  }
}

/* The norm of out's error over that of what float64 gives. */
static double relative_error(const DlattnAttention* a) {
  double square = 0, norm = 0;
  int64_t b, h, i, c;
  for (b = 0; b < a->batch_size; ++b) {
    for (h = 0; h < a->num_heads; ++h) {
      for (i = 0; i < a->seqlen_q; ++i) {
        double exact[kDimV], lse;
        single_steps = 0;
        plain_row(a, b, i, h, 0, 0, a->seqlen_q, a->seqlen_k, exact, &lse);
        for (c = 0; c < a->head_dim_v; ++c) {
          const double got =
              load(a->out.data, a->out.dtype,
                   b * a->out.batch_stride + i * a->out.row_stride + h * a->out.head_stride + c);
          square += (got - exact[c]) * (got - exact[c]);
          norm += exact[c] * exact[c];
        }
      }
    }
  }
  return sqrt(square / norm);
}

static void precisions(void) {
  const int32_t all[] = {DLATTN_INT8_FP8, DLATTN_FP8, DLATTN_INT8_FP16};
  int n;
  for (n = 0; n < 2; ++n) {
    DlattnAttention a = problem(DLATTN_BFLOAT16, 0);
    DlattnQuantize z = {.struct_size = sizeof z};
    uint16_t first;
    int64_t bytes = 0;
    a.precision = all[n];
    CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
    CHECK(relative_error(&a) < 0.06 && relative_error(&a) > 1e-3);
    memcpy(&first, a.out.data, 2);

    z.precision = all[n];
    z.k = a.k;
    z.v = a.v;
    z.batch_size = kBatch;
    z.seqlen_k = kKeys;
    z.num_heads_kv = kHeadsKv;
    z.head_dim = kDim;
    z.head_dim_v = kDimV;
    CHECK(dlattn_quantized_kv_bytes(&z, &bytes) == DLATTN_OK &&
          bytes > kBatch * kKeys * kHeadsKv * kDim);
    z.quantized_kv = malloc((size_t)bytes);
    CHECK(dlattn_quantize_kv(&z, NULL) == DLATTN_OK);
    a.quantized_kv = z.quantized_kv;
    a.k.data = a.v.data = NULL;
    memset(a.out.data, 0xff, 2);
    CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
    CHECK(memcmp(&first, a.out.data, 2) == 0);
    a.k = z.k;
    a.v = z.v;
    CHECK_REFUSED(dlattn_quantized_kv_bytes(&z, NULL), "bytes is null");
    {
      DlattnQuantize large = z;
      bytes = -7;
      large.batch_size = (int64_t)1 << 62;
      CHECK_REFUSED(dlattn_quantized_kv_bytes(&large, &bytes),
                    "batch_size is 4611686018427387904; accepted: up to 2147483647");
      large = z;
      large.seqlen_k = INT64_MAX;
      CHECK_REFUSED(dlattn_quantized_kv_bytes(&large, &bytes),
                    "seqlen_k is 9223372036854775807; accepted: up to 1099511627776");
      large = z;
      large.num_heads_kv = large.seqlen_k = (int64_t)1 << 30;
      CHECK_REFUSED(dlattn_quantized_kv_bytes(&large, &bytes),
                    "batch_size x seqlen_k x num_heads_kv is 2 x 1073741824 x 1073741824; "
                    "accepted: a product of up to 4503599627370496");
      large.num_heads_kv = (int64_t)1 << 40;
      CHECK_REFUSED(dlattn_quantized_kv_bytes(&large, &bytes),
                    "num_heads_kv is 1099511627776; accepted: up to 2147483647");
      CHECK(bytes == -7);
    }
    z.precision = DLATTN_INPUTS;
    CHECK_REFUSED(dlattn_quantized_kv_bytes(&z, &bytes),
                  "precision is inputs; accepted: int8_fp8, fp8, int8_fp16");
    z.reserved = 1;
    CHECK_REFUSED(dlattn_quantize_kv(&z, NULL), "reserved is 1; accepted: 0");
    CHECK_REFUSED(dlattn_quantize_kv(NULL, NULL), "DlattnQuantize is null");
    free(z.quantized_kv);
    release(&a);
  }
}

/* dot(out, dout) + dot(lse, dlse) of a problem, whose gradients these are. */
static double loss(const DlattnAttention* a, const DlattnTensor* dout, const DlattnTensor* dlse) {
  double sum = 0;
  int64_t b, i, h, c;
  for (b = 0; b < a->batch_size; ++b) {
    for (i = 0; i < a->seqlen_q; ++i) {
      for (h = 0; h < a->num_heads; ++h) {
        double out[kDimV], lse;
        plain_row(a, b, i, h, 0, 0, a->seqlen_q, a->seqlen_k, out, &lse);
        sum += lse * ((float*)dlse->data)[b * dlse->batch_stride + h * dlse->head_stride + i];
        for (c = 0; c < a->head_dim_v; ++c) {
          sum += out[c] *
                 load(dout->data, dout->dtype,
                      b * dout->batch_stride + i * dout->row_stride + h * dout->head_stride + c);
        }
      }
    }
  }
  return sum;
}

/* A gradient's element against a difference of the plain formula in float64. */
static void check_gradient(const DlattnBackward* b, const DlattnTensor* input,
                           const DlattnTensor* gradient, int64_t at, int line) {
  const double step_size = input->dtype == DLATTN_FLOAT64 ? 1e-5 : 0x1p-8;
  const double value = load(input->data, input->dtype, at);
  const double got = load(gradient->data, gradient->dtype, at);
  double above, below;
  single_steps = 0;
  store(input->data, input->dtype, at, value + step_size);
  above = loss(b->attention, &b->dout, &b->dlse);
  store(input->data, input->dtype, at, value - step_size);
  below = loss(b->attention, &b->dout, &b->dlse);
  store(input->data, input->dtype, at, value);
  above = (above - below) / (2 * step_size);
  check(fabs(got - above) <= 1e-3 * (1 + fabs(above)), line, "gradient near a difference");
}

static void gradients(void) {
  char text[500];
  DlattnPlan plan = {.struct_size = sizeof plan};
  DlattnAttention a = problem(DLATTN_FLOAT64, 0);
  DlattnBackward b = {.struct_size = sizeof b}, wrong;
  a.causal = DLATTN_BOTTOM_RIGHT;
  a.softcap = 2.0;
  a.sinks = tensor(DLATTN_FLOAT32, 1, 1, 1, kHeads, 0, 0.5);
  a.sinks.head_stride = 1;
  CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
  b.attention = &a;
  b.dout = tensor(DLATTN_FLOAT64, kBatch, kQueries, kHeads, kDimV, 0, 0.2);
  b.dlse = a.lse;
  b.dlse.data = elements(DLATTN_FLOAT32, kBatch * kHeads * (kQueries + kGap), 0.1);
  b.dlse.row_stride = 1;
  b.dq = tensor(DLATTN_FLOAT64, kBatch, kQueries, kHeads, kDim, 0, NAN);
  b.dk = tensor(DLATTN_FLOAT64, kBatch, kKeys, kHeadsKv, kDim, 0, NAN);
  b.dv = tensor(DLATTN_FLOAT64, kBatch, kKeys, kHeadsKv, kDimV, 0, NAN);
  b.dsinks = tensor(DLATTN_FLOAT32, 1, 1, 1, kHeads, 0, NAN);
  b.dsinks.head_stride = 1;
  CHECK(dlattn_attention_backward(&b, NULL, NULL) == DLATTN_OK);
  check_gradient(&b, &a.q, &b.dq, a.q.batch_stride + 3 * a.q.row_stride + 5, __LINE__);
  check_gradient(&b, &a.k, &b.dk, 7 * a.k.row_stride + a.k.head_stride + 2, __LINE__);
  check_gradient(&b, &a.v, &b.dv, a.v.batch_stride + 9 * a.v.row_stride + 1, __LINE__);
  check_gradient(&b, &a.sinks, &b.dsinks, 2, __LINE__);
  CHECK(dlattn_attention_backward_plan(&b, NULL, &plan, text, sizeof text) == DLATTN_OK);
  CHECK(strcmp(plan.kernel, "cpu") == 0 && plan.workspace_bytes > 0);
  CHECK(strncmp(text, "operation: backward\n", 20) == 0);

#define REFUSED_BACKWARD(change, words)                                  \
  do {                                                                   \
    wrong = b;                                                           \
    change;                                                              \
    CHECK_REFUSED(dlattn_attention_backward(&wrong, NULL, NULL), words); \
  } while (0)
  REFUSED_BACKWARD(wrong.attention = NULL, "DlattnAttention is null");
  REFUSED_BACKWARD(wrong.reserved = 3, "reserved is 3; accepted: 0");
  REFUSED_BACKWARD(wrong.deterministic = 2, "deterministic is 2; accepted: 0 or 1");
  REFUSED_BACKWARD(wrong.dq.dtype = DLATTN_FLOAT32,
                   "dq: dtype is float32; accepted: float64, that of q");
  REFUSED_BACKWARD((wrong.dbias = wrong.dq, wrong.dq.data = NULL),
                   "dbias is given and bias is null; accepted: none");
  CHECK_REFUSED(dlattn_attention_backward(NULL, NULL, NULL), "DlattnBackward is null");
  CHECK_REFUSED(dlattn_attention_backward_plan(&b, NULL, NULL, NULL, 0), "DlattnPlan is null");
  free(b.dout.data);
  free(b.dlse.data);
  free(b.dq.data);
  free(b.dk.data);
  free(b.dv.data);
  free(b.dsinks.data);
  release(&a);
}

/* Two rows behind the one that is there; the rest of the cache stays. */
static void appends(void) {
  float k[2 * 4], v[2 * 4], k_cache[5 * 4], v_cache[5 * 4];
  const int32_t used[1] = {1};
  DlattnAppend a = {.struct_size = sizeof a};
  int i;
  for (i = 0; i < 8; ++i) {
    k[i] = (float)random_number() + 0.5f;
    v[i] = (float)random_number() - 0.5f;
  }
  for (i = 0; i < 20; ++i) k_cache[i] = v_cache[i] = 7.0f;
  a.k.data = k;
  a.v.data = v;
  a.k_cache.data = k_cache;
  a.v_cache.data = v_cache;
  a.k.row_stride = a.v.row_stride = a.k_cache.row_stride = a.v_cache.row_stride = 4;
  a.k.dtype = a.v.dtype = a.k_cache.dtype = a.v_cache.dtype = DLATTN_FLOAT32;
  a.batch_size = a.num_heads_kv = 1;
  a.seqlen_new = 2;
  a.seqlen_k = 5;
  a.head_dim = a.head_dim_v = 4;
  a.seqused_k = used;
  CHECK(dlattn_append_kv(&a, NULL, NULL) == DLATTN_OK);
  CHECK(memcmp(k_cache + 4, k, sizeof k) == 0 && memcmp(v_cache + 4, v, sizeof v) == 0);
  for (i = 0; i < 20; ++i) CHECK((i >= 4 && i < 12) || (k_cache[i] == 7.0f && v_cache[i] == 7.0f));
  a.k_cache.dtype = 6;
  CHECK_REFUSED(dlattn_append_kv(&a, NULL, NULL),
                "k_cache: dtype is 6; accepted: 0 to 4 (DLATTN_FLOAT16, DLATTN_BFLOAT16, "
                "DLATTN_FLOAT32, DLATTN_FLOAT64, DLATTN_FLOAT8_E4M3) or 5 (DLATTN_INT8)");
  a.k_cache.dtype = DLATTN_INT8;
  CHECK_REFUSED(dlattn_append_kv(&a, NULL, NULL),
                "v_cache: dtype is float32; accepted: int8, that of k_cache");
  a.rotary_interleaved = 2;
  CHECK_REFUSED(dlattn_append_kv(&a, NULL, NULL), "rotary_interleaved is 2; accepted: 0 or 1");
  a.rotary_interleaved = 0;
  a.q_fixed_position = -1;
  CHECK_REFUSED(dlattn_append_kv(&a, NULL, NULL), "q_fixed_position is -1; accepted: 0 or 1");
  a.reserved = 1;
  CHECK_REFUSED(dlattn_append_kv(&a, NULL, NULL), "reserved is 1; accepted: 0");
  CHECK_REFUSED(dlattn_append_kv(NULL, NULL, NULL), "DlattnAppend is null");
}

/* Two new rows and attention over the three that there are then, as one call. */
static void appends_and_attends(void) {
  float k[2 * 4], v[2 * 4], k_cache[5 * 4], v_cache[5 * 4], apart[2][5 * 4], q[2 * 4],
      out[2][2 * 4];
  const int32_t before[1] = {1}, after[1] = {3};
  DlattnAppend append = {.struct_size = sizeof append};
  DlattnAttention a = {.struct_size = sizeof a};
  int i;
  for (i = 0; i < 8; ++i) {
    k[i] = (float)random_number() + 0.5f;
    v[i] = (float)random_number() - 0.5f;
    q[i] = (float)random_number() + 0.3f;
    out[0][i] = out[1][i] = NAN;
  }
  for (i = 0; i < 20; ++i) {
    k_cache[i] = (float)random_number() + 0.5f;
    v_cache[i] = (float)random_number() + 0.5f;
  }
  memcpy(apart[0], k_cache, sizeof k_cache);
  memcpy(apart[1], v_cache, sizeof v_cache);
  append.k.data = k;
  append.v.data = v;
  append.k_cache.data = k_cache;
  append.v_cache.data = v_cache;
  append.k.row_stride = append.v.row_stride = append.k_cache.row_stride = 4;
  append.v_cache.row_stride = 4;
  append.k.dtype = append.v.dtype = append.k_cache.dtype = append.v_cache.dtype = DLATTN_FLOAT32;
  append.batch_size = append.num_heads_kv = 1;
  append.seqlen_new = 2;
  append.seqlen_k = 5;
  append.head_dim = append.head_dim_v = 4;
  append.seqused_k = before;
  a.q.data = q;
  a.q.row_stride = a.k.row_stride = a.v.row_stride = a.out.row_stride = 4;
  a.q.dtype = a.k.dtype = a.v.dtype = a.out.dtype = DLATTN_FLOAT32;
  a.k.data = k_cache;
  a.v.data = v_cache;
  a.out.data = out[0];
  a.batch_size = a.num_heads = a.num_heads_kv = 1;
  a.seqlen_q = 2;
  a.seqlen_k = 5;
  a.head_dim = a.head_dim_v = 4;
  a.seqused_k = after;
  a.causal = DLATTN_BOTTOM_RIGHT;
  a.softcap = -1.0;
  CHECK_REFUSED(dlattn_append_and_attend(&append, &a, NULL, NULL),
                "softcap is -1; accepted: 7.9e-31 to 1.27e30 (2^-100 to 2^100), or 0 for none");
  CHECK(memcmp(k_cache, apart[0], sizeof k_cache) == 0);
  CHECK(memcmp(v_cache, apart[1], sizeof v_cache) == 0);
  CHECK_REFUSED(dlattn_append_and_attend(&append, NULL, NULL, NULL), "DlattnAttention is null");
  a.softcap = 0.0;
  CHECK(dlattn_append_and_attend(&append, &a, NULL, NULL) == DLATTN_OK);
  append.k_cache.data = a.k.data = apart[0];
  append.v_cache.data = a.v.data = apart[1];
  a.out.data = out[1];
  CHECK(dlattn_append_kv(&append, NULL, NULL) == DLATTN_OK);
  CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_OK);
  CHECK(memcmp(k_cache, apart[0], sizeof k_cache) == 0 && memcmp(k_cache + 4, k, sizeof k) == 0);
  CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0 && !isnan(out[0][7]));
}

/* Attention over two halves of the keys, merged. */
static void merges(void) {
  DlattnAttention a = problem(DLATTN_FLOAT32, 0), half[2];
  DlattnTensor outs[2], lses[2];
  DlattnMerge m = {.struct_size = sizeof m};
  int n;
  for (n = 0; n < 2; ++n) {
    half[n] = a;
    half[n].seqlen_k = n ? kKeys - 20 : 20;
    half[n].k.data = (float*)a.k.data + (n ? 20 * a.k.row_stride : 0);
    half[n].v.data = (float*)a.v.data + (n ? 20 * a.v.row_stride : 0);
    half[n].out = tensor(DLATTN_FLOAT32, kBatch, kQueries, kHeads, kDimV, n, NAN);
    half[n].lse.data = elements(DLATTN_FLOAT32, kBatch * kHeads * (kQueries + kGap), NAN);
    CHECK(dlattn_attention(&half[n], NULL, NULL) == DLATTN_OK);
    outs[n] = half[n].out;
    lses[n] = half[n].lse;
    lses[n].row_stride = 1;
  }
  m.num_states = 2;
  m.outs = outs;
  m.lses = lses;
  m.out = a.out;
  m.lse = a.lse;
  m.batch_size = kBatch;
  m.seqlen_q = kQueries;
  m.num_heads = kHeads;
  m.head_dim_v = kDimV;
  CHECK(dlattn_merge_states(&m, NULL, NULL) == DLATTN_OK);
  CHECK(near_float64(&a));

  CHECK_REFUSED(dlattn_merge_states(NULL, NULL, NULL), "DlattnMerge is null");
  m.num_states = 33;
  CHECK_REFUSED(dlattn_merge_states(&m, NULL, NULL), "num_states is 33; accepted: 1 to 32");
  m.num_states = 2;
  m.outs = NULL;
  CHECK_REFUSED(dlattn_merge_states(&m, NULL, NULL), "outs is null");
  m.outs = outs;
  m.lses = NULL;
  CHECK_REFUSED(dlattn_merge_states(&m, NULL, NULL), "lses is null");
  m.lses = lses;
  m.reserved = -1;
  CHECK_REFUSED(dlattn_merge_states(&m, NULL, NULL), "reserved is -1; accepted: 0");
  for (n = 0; n < 2; ++n) {
    free(half[n].out.data);
    free(half[n].lse.data);
  }
  release(&a);
}

static void versions_of_structs(void) {
  char words[300];
  DlattnAttention a = problem(DLATTN_FLOAT32, 0);
  struct {
    DlattnAttention known;
    int64_t later;
  } newer;
  struct {
    DlattnPlan known;
    int64_t later;
  } newer_plan;
  memset(&newer, 0, sizeof newer);
  newer.known = a;
  newer.known.struct_size = sizeof newer;
  CHECK(dlattn_attention(&newer.known, NULL, NULL) == DLATTN_OK);
  CHECK(near_float64(&a));
  newer.later = 1;
  snprintf(
      words, sizeof words,
      "DlattnAttention: struct_size is %d and byte %d is not 0; accepted: zeros after the %d bytes "
      "that dlattn %s knows",
      (int)sizeof newer, (int)sizeof a, (int)sizeof a, DLATTN_VERSION);
  CHECK_REFUSED(dlattn_attention(&newer.known, NULL, NULL), words);

  a.struct_size = 8;
  snprintf(words, sizeof words,
           "DlattnAttention: struct_size is 8; accepted: at least %d, its sizeof", (int)sizeof a);
  CHECK_REFUSED(dlattn_attention(&a, NULL, NULL), words);
  a.struct_size = sizeof a;
  CHECK_REFUSED(dlattn_attention(NULL, NULL, NULL), "DlattnAttention is null");

  memset(&newer_plan, 0xff, sizeof newer_plan);
  newer_plan.known.struct_size = sizeof newer_plan;
  CHECK(dlattn_attention_plan(&a, NULL, &newer_plan.known, NULL, 0) == DLATTN_OK);
  CHECK(newer_plan.later == 0 && strcmp(newer_plan.known.kernel, "cpu") == 0);
  CHECK(newer_plan.known.struct_size == sizeof newer_plan);
  newer_plan.known.struct_size = 0;
  snprintf(words, sizeof words, "DlattnPlan: struct_size is 0; accepted: at least %d, its sizeof",
           (int)sizeof(DlattnPlan));
  CHECK_REFUSED(dlattn_attention_plan(&a, NULL, &newer_plan.known, NULL, 0), words);
  CHECK_REFUSED(dlattn_attention_plan(&a, NULL, NULL, NULL, 0), "DlattnPlan is null");
  release(&a);
}

static void plans(void) {
  DlattnAttention a = problem(DLATTN_FLOAT32, 0);
  DlattnPlan plan = {.struct_size = sizeof plan};
  DlattnOptions options = {.struct_size = sizeof options};
  char text[500], cut[9];
  options.num_threads = 1;
  options.kernel = "cpu";
  CHECK(dlattn_attention_plan(&a, &options, &plan, text, sizeof text) == DLATTN_OK);
  CHECK(strcmp(plan.kernel, "cpu") == 0 && strcmp(plan.variant, "") == 0);
  CHECK(plan.num_launches == 1 && plan.num_splits == 1 && plan.predicted_ns == 0);
  CHECK(strncmp(text, "kernel: cpu\ndtype: float32\n", 27) == 0);
  CHECK(strstr(text, "\nthreads: 1, ") != NULL);
  memset(cut, 'x', sizeof cut);
  CHECK(dlattn_attention_plan(&a, &options, &plan, cut, 8) == DLATTN_OK);
  CHECK(strcmp(cut, "kernel:") == 0 && cut[8] == 'x');
  release(&a);
}

static int32_t polls = 0;
static int32_t stop(void* context) {
  ++polls;
  return *(int32_t*)context;
}

static void option_fields(void) {
  DlattnAttention a = problem(DLATTN_FLOAT32, 0);
  DlattnOptions options = {.struct_size = sizeof options};
  char why[80], words[200];
  int32_t answer = 0, index, num_names = 0;
  const char* accepted = "";

  options.poll = stop;
  options.poll_context = &answer;
  options.batch_invariant = 1;
  CHECK(dlattn_attention(&a, NULL, &options) == DLATTN_OK);
  CHECK(near_float64(&a));
  options.batch_invariant = 2;
  CHECK_REFUSED(dlattn_attention(&a, NULL, &options), "batch_invariant is 2; accepted: 0 or 1");
  options.batch_invariant = 0;
  options.num_threads = -1;
  CHECK_REFUSED(dlattn_attention(&a, NULL, &options),
                "num_threads is -1; accepted: at least 0, which is all");
  options.num_threads = 0;

  options.kernel = "fastest";
  CHECK(dlattn_supported(&a, &options, why, sizeof why) == DLATTN_UNSUPPORTED);
  CHECK(strncmp(why, "kernel is fastest; accepted: auto, cpu, ", 40) == 0 && strlen(why) == 79);
  CHECK(strncmp(why, dlattn_last_error(), 79) == 0);
  for (index = 0; dlattn_kernel_name(index); ++index) {
    ++num_names;
    accepted = dlattn_kernel_name(index);
    CHECK(strstr(dlattn_last_error(), accepted) != NULL);
  }
  CHECK(num_names >= 3 && strcmp(dlattn_kernel_name(1), "cpu") == 0);
  CHECK(dlattn_kernel_name(-1) == NULL && dlattn_kernel_name(num_names) == NULL);
  options.kernel = NULL;
  CHECK(dlattn_supported(&a, &options, why, sizeof why) == DLATTN_OK && why[0] == '\0');
  options.variant = "wide";
  CHECK(dlattn_supported(&a, &options, why, sizeof why) == DLATTN_UNSUPPORTED);
  CHECK(strstr(why, "variant is wide; accepted: none") != NULL);
  options.variant = NULL;

  options.struct_size = 4;
  snprintf(words, sizeof words,
           "DlattnOptions: struct_size is 4; accepted: at least %d, its sizeof",
           (int)sizeof options);
  CHECK_REFUSED(dlattn_attention(&a, NULL, &options), words);
  release(&a);
}

/* Long enough to be asked whether to go on. */
static void cancelling(void) {
  const int64_t seqlen = 6000, heads = 16, dim = 64;
  DlattnAttention a = {.struct_size = sizeof a};
  DlattnOptions options = {.struct_size = sizeof options};
  int32_t answer = 1;
  a.q = tensor(DLATTN_FLOAT32, 1, seqlen, heads, dim, 0, 0.0);
  a.k = tensor(DLATTN_FLOAT32, 1, seqlen, heads, dim, 0, 0.0);
  a.v = tensor(DLATTN_FLOAT32, 1, seqlen, heads, dim, 0, 0.0);
  a.out = tensor(DLATTN_FLOAT32, 1, seqlen, heads, dim, 0, NAN);
  a.batch_size = 1;
  a.seqlen_q = a.seqlen_k = seqlen;
  a.num_heads = a.num_heads_kv = heads;
  a.head_dim = a.head_dim_v = dim;
  options.poll = stop;
  options.poll_context = &answer;
  polls = 0;
  CHECK_FAILS(dlattn_attention(&a, NULL, &options), DLATTN_CANCELLED, "poll ended the call");
  CHECK(polls == 1);
  release(&a);
}

static void errors(void) {
  DlattnAttention a = problem(DLATTN_FLOAT32, 0);
  DlattnAttention wrong;
#define REFUSED(change, words)                                  \
  do {                                                          \
    wrong = a;                                                  \
    change;                                                     \
    CHECK_REFUSED(dlattn_attention(&wrong, NULL, NULL), words); \
  } while (0)
  REFUSED(wrong.device_type = 2, "device_type is 2; accepted: 0 to 1 (DLATTN_CPU, DLATTN_CUDA)");
  REFUSED(wrong.q.dtype = 5,
          "q: dtype is 5; accepted: 0 to 4 (DLATTN_FLOAT16, DLATTN_BFLOAT16, DLATTN_FLOAT32, "
          "DLATTN_FLOAT64, DLATTN_FLOAT8_E4M3)");
  REFUSED(wrong.out.dtype = -1,
          "out: dtype is -1; accepted: 0 to 4 (DLATTN_FLOAT16, DLATTN_BFLOAT16, DLATTN_FLOAT32, "
          "DLATTN_FLOAT64, DLATTN_FLOAT8_E4M3)");
  REFUSED(wrong.bias.dtype = 258,
          "bias: dtype is 258; accepted: 0 to 4 (DLATTN_FLOAT16, DLATTN_BFLOAT16, DLATTN_FLOAT32, "
          "DLATTN_FLOAT64, DLATTN_FLOAT8_E4M3)");
  REFUSED(
      wrong.causal = 3,
      "causal is 3; accepted: 0 to 2 (DLATTN_NOT_CAUSAL, DLATTN_BOTTOM_RIGHT, DLATTN_TOP_LEFT)");
  REFUSED(wrong.precision = -1,
          "precision is -1; accepted: 0 to 3 (DLATTN_INPUTS, DLATTN_INT8_FP8, DLATTN_FP8, "
          "DLATTN_INT8_FP16)");
  REFUSED(wrong.has_window_left = 7, "has_window_left is 7; accepted: 0 or 1");
  REFUSED(wrong.has_window_right = 7, "has_window_right is 7; accepted: 0 or 1");
  REFUSED(wrong.v.reserved = 3, "v: reserved is 3; accepted: 0");
  REFUSED(wrong.q.data = NULL, "q is null");
  REFUSED(wrong.out.data = NULL, "out is null");
  REFUSED(wrong.head_dim = 0, "head_dim is 0; accepted: at least 1");
  REFUSED(wrong.v.dtype = DLATTN_FLOAT64, "v: dtype is float64; accepted: float32, that of q");
  REFUSED(wrong.softmax_scale = -1,
          "softmax_scale is -1; accepted: 1.18e-38 to 8.5e37 (2^-126 to 2^126)");
  REFUSED((wrong.has_window_left = 1, wrong.window_left = -2),
          "window left is -2; accepted: 0 to 1099511627776 tokens, or -1 for no limit");
  release(&a);
}

static void devices(void) {
  DlattnDeviceInfo info = {.struct_size = sizeof info};
  DlattnAttention a = problem(DLATTN_FLOAT16, 0);
  char why[200] = "x";
  int32_t count = -1;
  CHECK(dlattn_version() ==
        10000 * DLATTN_VERSION_MAJOR + 100 * DLATTN_VERSION_MINOR + DLATTN_VERSION_PATCH);
  CHECK(dlattn_device_count(&count, why, sizeof why) == DLATTN_OK && count >= 0);
  CHECK((count == 0) == (strlen(why) > 0));
  CHECK_REFUSED(dlattn_device_count(NULL, why, sizeof why), "count is null");
  CHECK(dlattn_device_info(DLATTN_CPU, 0, &info) == DLATTN_OK);
  CHECK(info.struct_size == sizeof info && info.device_type == DLATTN_CPU && info.num_threads >= 1);
  CHECK(strlen(info.name) > 0 && strlen(info.isa) > 0 && info.unserved[0] == '\0');
  CHECK_REFUSED(dlattn_device_info(DLATTN_CPU, 0, NULL), "DlattnDeviceInfo is null");
  CHECK_REFUSED(dlattn_device_info(9, 0, &info),
                "device_type is 9; accepted: 0 to 1 (DLATTN_CPU, DLATTN_CUDA)");
  CHECK(dlattn_device_info(DLATTN_CUDA, count, &info) == DLATTN_DEVICE_ERROR);
  CHECK(strlen(dlattn_last_error()) > 0);
  a.device_type = DLATTN_CUDA;
  a.device_index = count;
  CHECK(dlattn_attention(&a, NULL, NULL) == DLATTN_DEVICE_ERROR);
  CHECK(dlattn_supported(&a, NULL, why, sizeof why) == DLATTN_DEVICE_ERROR);
  CHECK(strncmp(why, dlattn_last_error(), sizeof why - 1) == 0);
  release(&a);
}

int main(void) {
  CHECK(strcmp(dlattn_last_error(), "") == 0);
  dtypes_and_strides();
  features();
  variable_length();
  precisions();
  gradients();
  appends();
  appends_and_attends();
  merges();
  versions_of_structs();
  plans();
  option_fields();
  cancelling();
  errors();
  devices();
  printf("%d passed, %d failed\n", passed, failures);
  return failures == 0 && passed > 0 ? 0 : 1;
}
