#ifndef KVS_TESTS_KERNELS_KT_H
#define KVS_TESTS_KERNELS_KT_H

/* The fixture of kernels-test: every operation of kernels/ against an oracle, by the same test on the cpu and on CUDA.
 *
 * A case is a function that makes its inputs from k->r, runs the operation where k->where says and compares; it returns
 * true, or says why not with kt_fail.  All memory that it takes here is released when it returns.  A failing CUDA call,
 * or no memory, ends the program: nothing after it would mean anything.
 *
 * Knows memory, copies and reports.  Knows no operation.  Single thread. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/view.h"
#include "proto/status.h"
#include "tests/support/random.h"

struct CUstream_st;

typedef enum kt_where { KT_CPU, KT_CUDA } kt_where;

typedef struct kt_memory kt_memory; /* of kt.c */

typedef struct kt {
    kt_where where;
    bool subset;                /* few and small cases: for runs under a sanitizer */
    bool quiet;                 /* failures are expected: say nothing */
    bool capturing;             /* inside kt_graph_make */
    rnd r;                      /* of this case: everything random comes from here */
    struct CUstream_st *stream; /* CUDA: where operations run */
    uint32_t mutant_site, mutant_kinds;
    const char *op, *rerun; /* for kt_fail */
    double worst;           /* greatest kt_error of this case */
    kt_memory *memory;
} kt;

/* One operation: cases with names, and any number of random ones. */
typedef struct kt_fixed {
    const char *name;
    bool (*run)(kt *k);
    bool big; /* not under a sanitizer */
} kt_fixed;

typedef struct kt_op {
    const char *name;     /* as in view_site.h */
    const char *equality; /* "byte-equal", or what kt_error counts: "row RMS" */
    const kt_fixed *fixed;
    uint32_t n_fixed;
    bool (*random)(kt *k);
    uint32_t n_cpu, n_cuda, n_subset; /* random cases: in make test, on a GPU, under a sanitizer */
} kt_op;

/* Print why and how to have it again; returns false. */
__attribute__((format(printf, 2, 3))) bool kt_fail(kt *k, const char *fmt, ...);
/* An error that is still in order; the greatest is printed with its case. */
void kt_error(kt *k, double error);

/* --- memory --- */

/* Where the operation runs; 256-byte aligned, and filled with 0xFF, which is NaN in every format. */
void *kt_alloc(kt *k, uint64_t bytes);
void *kt_host(kt *k, uint64_t bytes); /* of the test itself; zero */
void kt_put(kt *k, void *dev, const void *host, uint64_t bytes);
void kt_get(kt *k, void *host, const void *dev, uint64_t bytes); /* waits for the stream */
void *kt_in(kt *k, const void *host, uint64_t bytes);            /* kt_alloc and kt_put */

/* Memory that is compared as a whole: `want` starts as random bytes and the test writes into it what must be in `dev`
 * afterwards.  So outputs have canaries wherever nothing may be written. */
enum { KT_MAX_WINDOWS = 40 };
typedef struct kt_buf {
    const char *name;
    uint8_t *dev, *want;
    uint64_t bytes;
    /* A sparse one is larger than memory: only these parts hold random bytes and are compared. */
    uint32_t n_windows;
    struct {
        uint64_t at, bytes;
    } window[KT_MAX_WINDOWS];
} kt_buf;

kt_buf kt_buf_make(kt *k, const char *name, uint64_t bytes);
kt_buf kt_buf_sparse(kt *k, const char *name, uint64_t bytes); /* up to KT_SPARSE_BYTES; one a case */
void kt_buf_window(kt *k, kt_buf *b, uint64_t at, uint64_t bytes);
void kt_upload(kt *k, const kt_buf *b);   /* want -> dev */
bool kt_same(kt *k, const kt_buf *b);     /* dev == want, or kt_fail with the first byte that differs */
uint8_t *kt_read(kt *k, const kt_buf *b); /* a host copy of dev; not for a sparse one */
#define KT_SPARSE_BYTES (UINT64_C(6) << 30)

/* --- running --- */

/* A word for ret_bad: set to 0xFFFFFFFF; its value when the stream has come to it. */
uint32_t *kt_word(kt *k);
uint32_t kt_word_value(kt *k, const uint32_t *word);

/* KT_RUN(k, err, c, cuda): the C call, or the CUDA call on k->stream and a wait for it. */
#ifdef KVS_CUDA
#define KT_RUN(k, err, c, cuda) ((k)->where == KT_CUDA ? kt_finish((k), (cuda), (err)) : (c))
#else
#define KT_RUN(k, err, c, cuda) ((void)(k), (void)(err), (c))
#endif
kvs_status kt_finish(kt *k, kvs_status launched, kvs_err *err);

/* Capture a call in a CUDA graph and replay it; on the cpu a replay is the call once more. */
typedef kvs_status (*kt_call)(kt *k, void *args, kvs_err *err);
typedef struct kt_graph {
    kt_call call;
    void *args, *exec;
} kt_graph;
bool kt_graph_make(kt *k, kt_call call, void *args, kt_graph *ret);
bool kt_graph_run(kt *k, kt_graph *g);

/* In the mutation build: let the view make the mistake that the program was asked for.  `offset`: of the view's base in
 * its region.  Every view that goes to an operation passes here. */
void kt_mutate(const kt *k, kvs_view *v, uint64_t offset);

/* --- numbers --- */

uint32_t kt_pick(kt *k, const uint32_t *from, size_t n);
#define KT_PICK(k, array) kt_pick((k), (array), sizeof(array) / sizeof *(array))
bool kt_chance(kt *k, uint32_t one_in);

/* --- for main --- */

bool kt_open(kt *k, kt_where where, char *why, size_t cap); /* false: no such device; why */
void kt_case_end(kt *k);                                    /* releases what the case took */
void kt_close(kt *k);

#endif
