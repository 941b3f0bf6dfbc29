#ifndef KVS_TESTS_KERNELS_KT_ATTEND_H
#define KVS_TESTS_KERNELS_KT_ATTEND_H

/* Attention in fp64 as its definition says it, for every operation that attends: rows of queries, each with a list of
 * tokens by their addresses.  The addresses are the test's own arithmetic.  And the judge that compares results with it.
 *
 * Knows numbers.  Shares no code with kernels/, not even number formats.  Single thread; memory is the case's. */

#include "tests/kernels/kt.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum kt_type { KT_BF16, KT_FP16, KT_E4M3 } kt_type;

uint32_t kt_type_bytes(kt_type type);
double kt_attend_value(kt_type type, const uint8_t *p, uint64_t i); /* of element i behind p */

/* n values of about unit variance that the type holds exactly; never a NaN. */
void kt_attend_fill(rnd r, kt_type type, uint8_t *p, uint32_t n, double scale);
/* Random numbers that depend on these numbers alone. */
rnd kt_stream(uint64_t seed, uint64_t kind, uint64_t i, uint64_t j);

/* A row sees entries from .. to - 1 of the list of tokens; heads lie k_off and v_off behind a token's address. */
typedef struct kt_query {
    uint64_t from, to, k_off, v_off;
} kt_query;

typedef struct kt_attention {
    kt_type cache;
    uint32_t n_rows, d_qk, d_v;
    double scale, cap, v_scale;         /* cap 0: none */
    const kt_query *rows;               /* [n_rows] */
    const double *q;                    /* [n_rows][d_qk] */
    const uint8_t *const *k, *const *v; /* the list: where keys and values of a token lie; NULL: left out */
    uint64_t n_tokens;                  /* of the list */
} kt_attention;

/* out [n_rows][d_v], lse [n_rows]. */
void kt_attend(kt *k, const kt_attention *a, double *out, double *lse);
/* The same on the GPU: addresses in the list are device memory, all else is the test's. */
void kt_attend_cuda(kt *k, const kt_attention *a, double *out, double *lse);
/* Its launch, all in device memory; scores [n_rows][n_tokens].  false: refused. */
bool kt_attend_launch(const kt_attention *a, double *scores, double *out, double *lse, struct CUstream_st *stream);
bool kt_attend_is_big(const kt_attention *a); /* for the processor */

/* Judge row by row: cosine distance below 1e-5 (e4m3: 1e-4), error at most 0.03 of the row's RMS, LSE within 1e-3.
 * out_at and lse_at: the rows of the results in host memory. */
bool kt_judge(kt *k, const kt_attention *a, kt_type type, const uint8_t *const *out_at, const uint8_t *const *lse_at,
              const double *out, const double *lse);

#ifdef __cplusplus
}
#endif
#endif
