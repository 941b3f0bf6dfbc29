/* What the mover makes of memcpy: whole blocks of 61 layers between an arena and a device's slots, with and
 * without checksums, as ratios to plain memcpy of the same blocks in the same run.  All variants take turns
 * in every round, so that another load on the machine meets all of them; the median round counts. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/mover.h"
#include "daemon/thread.h"
#include "tests/support/sink.h"

enum { LAYERS = 61, PAGE = 64 * 1152, BLOCK = LAYERS * PAGE, BLOCKS = 48, ROUNDS = 15 };

enum variant { MEMCPY, STORE, STORE_SUM, LOAD, LOAD_VERIFY, STORE_PAGES, STORE_PAGES_SUM, VARIANTS };

static const char *const names[VARIANTS] = {
    "plain memcpy",
    "store",
    "store, checksum",
    "load",
    "load, verified",
    "store, one tensor a layer",
    "store, one tensor a layer, checksum",
};

typedef struct bench {
    device *dev;
    sink done;
    unsigned n_done;
    mover *load, *store;
    region_map *blocks, *pages; /* cross-layer; one tensor a layer */
    uint8_t *host, *slots;
    mover_item items[BLOCKS];
    double seconds[VARIANTS][ROUNDS];
} bench;

static void on_done(work *w)
{
    (void)w;
}

static region_map *make_map(uint8_t *base, bool cross_layer)
{
    region_map *m = calloc(1, sizeof *m + LAYERS * sizeof m->planes[0]);

    if (m == NULL)
        return NULL;
    m->slot_bytes = BLOCK;
    m->n_slots = BLOCKS;
    m->n_planes = LAYERS;
    m->tokens_per_block = 64;
    m->cross_layer = cross_layer;
    for (uint64_t p = 0; p < LAYERS; p++)
        m->planes[p] = (region_plane){.base = base + (cross_layer ? p * PAGE : p * PAGE * BLOCKS),
                                      .stride = cross_layer ? BLOCK : PAGE,
                                      .page_bytes = PAGE,
                                      .block_offset = p * PAGE};
    return m;
}

/* Both sides are walked in steps that are prime to their number: no block has its neighbour beside it. */
static uint32_t host_slot(uint32_t i)
{
    return i * 7 % BLOCKS;
}

static uint32_t device_slot(uint32_t i)
{
    return i * 5 % BLOCKS;
}

static void plain(bench *b)
{
    for (uint32_t i = 0; i < BLOCKS; i++)
        memcpy(b->host + (uint64_t)host_slot(i) * BLOCK, b->slots + (uint64_t)device_slot(i) * BLOCK, BLOCK);
}

static bool move(bench *b, enum variant v)
{
    bool is_load = v == LOAD || v == LOAD_VERIFY;
    mover_job j = {.map = v >= STORE_PAGES ? b->pages : b->blocks,
                   .items = b->items,
                   .n_items = BLOCKS,
                   .checksum = v == STORE_SUM || v == STORE_PAGES_SUM};

    job_init(&j.job, on_done);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        b->items[i].host = b->host + (uint64_t)host_slot(i) * BLOCK;
        b->items[i].slot = device_slot(i);
        b->items[i].verify = v == LOAD_VERIFY;
    }
    mover_submit(is_load ? b->load : b->store, &j);
    return sink_run_until(&b->done, ++b->n_done) && j.job.status == KVS_OK;
}

static double timed(bench *b, enum variant v)
{
    uint64_t began = thread_now_us();

    if (v == MEMCPY)
        plain(b);
    else if (!move(b, v))
        return -1;
    return (double)(thread_now_us() - began) * 1e-6;
}

/* LOAD_VERIFY needs the sums of what is there: it comes right behind a round of STORE_SUM. */
static bool run_rounds(bench *b)
{
    static const enum variant order[VARIANTS] = {MEMCPY,    STORE,       STORE_PAGES, STORE_PAGES_SUM,
                                                 STORE_SUM, LOAD_VERIFY, LOAD};

    for (int r = -1; r < ROUNDS; r++) /* one to warm up */
        for (int i = 0; i < VARIANTS; i++) {
            double s = timed(b, order[i]);

            if (s < 0)
                return false;
            if (r >= 0)
                b->seconds[order[i]][r] = s;
        }
    return true;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static void report(bench *b)
{
    double base = 0;

    printf("%-38s %8s %8s\n", "4,497,408-byte blocks, one thread", "GB/s", "ratio");
    for (int v = 0; v < VARIANTS; v++) {
        double median;

        qsort(b->seconds[v], ROUNDS, sizeof b->seconds[v][0], by_value);
        median = b->seconds[v][ROUNDS / 2];
        if (v == MEMCPY)
            base = median;
        printf("%-38s %8.2f %8.2f\n", names[v], (double)BLOCK * BLOCKS / median * 1e-9, base / median);
    }
}

static bool prepare(bench *b, kvs_err *err)
{
    size_t bytes = (size_t)BLOCK * BLOCKS;

    sink_init(&b->done);
    b->host = malloc(bytes);
    b->slots = malloc(bytes);
    if (b->host == NULL || b->slots == NULL) {
        (void)kvs_fail(err, KVS_E_NO_MEMORY, "no memory for twice %zu bytes", bytes);
        return false;
    }
    memset(b->host, 1, bytes);
    memset(b->slots, 2, bytes);
    b->blocks = make_map(b->slots, true);
    b->pages = make_map(b->slots, false);
    if (b->blocks == NULL || b->pages == NULL) {
        (void)kvs_fail(err, KVS_E_NO_MEMORY, "no memory for the maps");
        return false;
    }
    return device_cpu_open(&b->dev, err) == KVS_OK &&
           mover_create(&b->load, b->dev, DEVICE_LOAD, sink_face(&b->done), err) == KVS_OK &&
           mover_create(&b->store, b->dev, DEVICE_STORE, sink_face(&b->done), err) == KVS_OK;
}

int main(void)
{
    static bench b;
    kvs_err err = {.status = KVS_OK};
    bool ok = prepare(&b, &err);

    if (!ok)
        fprintf(stderr, "bench_mover: %s\n", err.msg);
    else if (!(ok = run_rounds(&b)))
        fprintf(stderr, "bench_mover: a job failed or took too long\n");
    else
        report(&b);
    mover_destroy(b.load);
    mover_destroy(b.store);
    if (b.dev != NULL)
        b.dev->ops->close(b.dev);
    sink_fini(&b.done);
    free(b.blocks);
    free(b.pages);
    free(b.host);
    free(b.slots);
    return ok ? 0 : 1;
}
