#include "tests/kernels/kt.h"

#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/kernels/kt_device.h"

enum { MAX_BLOCKS = 4096, ALIGN = 256 };
#define ARENA_BYTES (UINT64_C(256) << 20)

typedef enum piece { HOST, DEV, MAPPED, GRAPH } piece;

/* What a case holds.  On CUDA small pieces come from an arena that is reset after each case (an allocation takes longer
 * than most kernels here), but for runs under a sanitizer: there each piece has bounds of its own. */
struct kt_memory {
    struct {
        piece kind;
        void *p;
        uint64_t bytes;
    } block[MAX_BLOCKS];
    size_t n;
    uint8_t *arena, *sparse; /* CUDA; of the program, not of a case */
    uint64_t arena_used;
};

void kt_die(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    (void)printf("      ");
    (void)vprintf(fmt, ap);
    (void)printf("\n");
    va_end(ap);
    (void)fflush(stdout);
    exit(3);
}

bool kt_fail(kt *k, const char *fmt, ...)
{
    va_list ap;

    if (k->quiet)
        return false;
    (void)printf("      ");
    va_start(ap, fmt);
    (void)vprintf(fmt, ap);
    va_end(ap);
    (void)printf("\n      again: kernels-test %s\n", k->rerun);
    return false;
}

void kt_error(kt *k, double error)
{
    if (!(error <= k->worst)) /* a NaN counts too */
        k->worst = error;
}

/* --- memory ------------------------------------------------------------------------------------------------------- */

static void *keep(kt *k, piece kind, void *p, uint64_t bytes)
{
    kt_memory *m = k->memory;

    if (p == NULL)
        kt_die("no memory for %" PRIu64 " bytes", bytes);
    if (m->n == MAX_BLOCKS)
        kt_die("a case takes more than %d pieces of memory", MAX_BLOCKS);
    m->block[m->n].kind = kind;
    m->block[m->n].p = p;
    m->block[m->n++].bytes = bytes;
    return p;
}

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + ALIGN - 1) / ALIGN * ALIGN;
}

void *kt_alloc(kt *k, uint64_t bytes)
{
    kt_memory *m = k->memory;
    uint64_t size = bytes > 0 ? bytes : 1;
    void *p = NULL;

    if (k->where == KT_CPU) {
        if (posix_memalign(&p, ALIGN, size) != 0)
            p = NULL;
        (void)keep(k, HOST, p, size);
        memset(p, 0xFF, size);
        return p;
    }
    if (!k->subset && m->arena_used + rounded(size) <= ARENA_BYTES) {
        p = m->arena + m->arena_used;
        m->arena_used += rounded(size);
    } else
        p = keep(k, DEV, kt_cuda_alloc(size), size);
    kt_cuda_fill(p, 0xFF, size);
    return p;
}

void *kt_host(kt *k, uint64_t bytes)
{
    return keep(k, HOST, calloc(bytes > 0 ? bytes : 1, 1), bytes);
}

void kt_put(kt *k, void *dev, const void *host, uint64_t bytes)
{
    if (bytes == 0)
        return;
    if (k->where == KT_CPU)
        memcpy(dev, host, bytes);
    else
        kt_cuda_put(dev, host, bytes);
}

void kt_get(kt *k, void *host, const void *dev, uint64_t bytes)
{
    if (bytes == 0)
        return;
    if (k->where == KT_CPU)
        memcpy(host, dev, bytes);
    else
        kt_cuda_get(k, host, dev, bytes);
}

void *kt_in(kt *k, const void *host, uint64_t bytes)
{
    void *dev = kt_alloc(k, bytes);

    kt_put(k, dev, host, bytes);
    return dev;
}

/* --- buffers ------------------------------------------------------------------------------------------------------ */

kt_buf kt_buf_make(kt *k, const char *name, uint64_t bytes)
{
    kt_buf b = {.name = name, .bytes = bytes, .dev = kt_alloc(k, bytes), .want = kt_host(k, bytes)};

    rnd_bytes(&k->r, b.want, bytes);
    return b;
}

static void *map_sparse(kt *k, uint64_t bytes)
{
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);

    return keep(k, MAPPED, p != MAP_FAILED ? p : NULL, bytes);
}

kt_buf kt_buf_sparse(kt *k, const char *name, uint64_t bytes)
{
    kt_buf b = {.name = name, .bytes = bytes};

    if (bytes > KT_SPARSE_BYTES)
        kt_die("%s: %" PRIu64 " bytes are above %" PRIu64, name, bytes, (uint64_t)KT_SPARSE_BYTES);
    b.want = map_sparse(k, bytes);
    if (k->where == KT_CPU)
        b.dev = map_sparse(k, bytes);
    else {
        if (k->memory->sparse == NULL) {
            k->memory->sparse = kt_cuda_alloc(KT_SPARSE_BYTES);
            kt_cuda_fill(k->memory->sparse, 0xFF, KT_SPARSE_BYTES);
        }
        b.dev = k->memory->sparse;
    }
    return b;
}

void kt_buf_window(kt *k, kt_buf *b, uint64_t at, uint64_t bytes)
{
    if (b->n_windows == KT_MAX_WINDOWS || at > b->bytes)
        kt_die("%s: window %u at %" PRIu64, b->name, b->n_windows, at);
    if (bytes > b->bytes - at)
        bytes = b->bytes - at;
    rnd_bytes(&k->r, b->want + at, bytes);
    b->window[b->n_windows].at = at;
    b->window[b->n_windows++].bytes = bytes;
}

void kt_upload(kt *k, const kt_buf *b)
{
    if (b->n_windows == 0)
        kt_put(k, b->dev, b->want, b->bytes);
    for (uint32_t i = 0; i < b->n_windows; i++)
        kt_put(k, b->dev + b->window[i].at, b->want + b->window[i].at, b->window[i].bytes);
}

static bool say_difference(kt *k, const kt_buf *b, uint64_t at, uint64_t bytes, const uint8_t *got)
{
    const uint8_t *want = b->want + at;
    uint64_t n_wrong = 0, first = 0;

    for (uint64_t i = bytes; i-- > 0;)
        if (got[i] != want[i]) {
            first = i;
            n_wrong++;
        }
    return kt_fail(k, "%s: %" PRIu64 " bytes differ, the first at %" PRIu64 " of %" PRIu64 ": %02x, not %02x", b->name,
                   n_wrong, at + first, b->bytes, got[first], want[first]);
}

static bool same_part(kt *k, const kt_buf *b, uint64_t at, uint64_t bytes)
{
    uint8_t *copy = NULL;
    const uint8_t *got = b->dev + at;
    bool same;

    if (bytes == 0)
        return true;
    if (k->where != KT_CPU) {
        copy = malloc(bytes); /* not kt_host: some cases compare many times */
        if (copy == NULL)
            kt_die("no memory for %" PRIu64 " bytes", bytes);
        kt_get(k, copy, b->dev + at, bytes);
        got = copy;
    }
    same = memcmp(got, b->want + at, bytes) == 0 || say_difference(k, b, at, bytes, got);
    free(copy);
    return same;
}

bool kt_same(kt *k, const kt_buf *b)
{
    if (b->n_windows == 0)
        return same_part(k, b, 0, b->bytes);
    for (uint32_t i = 0; i < b->n_windows; i++)
        if (!same_part(k, b, b->window[i].at, b->window[i].bytes))
            return false;
    return true;
}

uint8_t *kt_read(kt *k, const kt_buf *b)
{
    uint8_t *copy = kt_host(k, b->bytes);

    kt_get(k, copy, b->dev, b->bytes);
    return copy;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

uint32_t *kt_word(kt *k)
{
    return kt_alloc(k, sizeof(uint32_t));
}

uint32_t kt_word_value(kt *k, const uint32_t *word)
{
    uint32_t value = 0;

    kt_get(k, &value, word, sizeof value);
    return value;
}

kvs_status kt_finish(kt *k, kvs_status launched, kvs_err *err)
{
    return launched != KVS_OK || k->capturing ? launched : kt_cuda_wait(k, err);
}

bool kt_graph_make(kt *k, kt_call call, void *args, kt_graph *ret)
{
    kvs_err err = {.msg = ""};
    kvs_status s;

    *ret = (kt_graph){call, args, NULL};
    if (k->where == KT_CPU)
        return true;
    kt_cuda_capture_begin(k);
    k->capturing = true;
    s = call(k, args, &err);
    k->capturing = false;
    ret->exec = kt_cuda_capture_end(k, s == KVS_OK);
    if (s != KVS_OK)
        return kt_fail(k, "under capture: %s", err.msg);
    (void)keep(k, GRAPH, ret->exec, 0);
    return true;
}

bool kt_graph_run(kt *k, kt_graph *g)
{
    kvs_err err = {.msg = ""};

    if (g->exec != NULL)
        kt_cuda_replay(k, g->exec);
    else if (g->call(k, g->args, &err) != KVS_OK)
        return kt_fail(k, "again: %s", err.msg);
    if (k->where == KT_CUDA && kt_cuda_wait(k, &err) != KVS_OK)
        return kt_fail(k, "replay: %s", err.msg);
    return true;
}

void kt_mutate(const kt *k, kvs_view *v, uint64_t offset)
{
#ifdef KVS_MUTATION
    v->mutant_site = k->mutant_site;
    v->mutant_kinds = k->mutant_kinds;
    v->mutant_offset = offset;
#else
    (void)k;
    (void)v;
    (void)offset;
#endif
}

/* --- numbers ------------------------------------------------------------------------------------------------------ */

uint32_t kt_pick(kt *k, const uint32_t *from, size_t n)
{
    return from[rnd_below(&k->r, n)];
}

bool kt_chance(kt *k, uint32_t one_in)
{
    return rnd_below(&k->r, one_in) == 0;
}

/* --- for main ----------------------------------------------------------------------------------------------------- */

bool kt_open(kt *k, kt_where where, char *why, size_t cap)
{
    k->where = where;
    k->memory = calloc(1, sizeof *k->memory);
    if (k->memory == NULL)
        kt_die("no memory");
    if (where == KT_CPU)
        return true;
    if (!kt_cuda_open(k, why, cap))
        return false;
    k->memory->arena = kt_cuda_alloc(ARENA_BYTES);
    return true;
}

void kt_case_end(kt *k)
{
    kt_memory *m = k->memory;

    while (m->n > 0) {
        m->n--;
        switch (m->block[m->n].kind) {
        case HOST:
            free(m->block[m->n].p);
            break;
        case DEV:
            kt_cuda_free(m->block[m->n].p);
            break;
        case MAPPED:
            (void)munmap(m->block[m->n].p, m->block[m->n].bytes);
            break;
        case GRAPH:
            kt_cuda_graph_free(m->block[m->n].p);
            break;
        }
    }
    m->arena_used = 0;
}

void kt_close(kt *k)
{
    if (k->where == KT_CUDA && k->stream != NULL) {
        kt_cuda_free(k->memory->arena);
        if (k->memory->sparse != NULL)
            kt_cuda_free(k->memory->sparse);
        kt_cuda_close(k);
    }
    free(k->memory);
}
