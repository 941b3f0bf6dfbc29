/* Movers under TSan: one loop submits, drops, stops and kicks while two movers run and a client writes its
 * counters. */
#include <sched.h>
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/mover.h"
#include "proto/cpus.h"
#include "tests/support/sink.h"
#include "tests/support/stub_device.h"

enum { ROUNDS = 60, JOBS = 64, ITEMS = 4, PLANES = 256, PAGE = 16, BLOCK = PLANES * PAGE };

typedef struct task {
    mover_job job; /* first */
    mover_item items[ITEMS];
    unsigned done;
} task;

typedef struct world {
    stub_device dev;
    sink done;
    mover *movers[2];
    region_map *map;
    uint8_t *host, *gpu;
    task tasks[JOBS];
    _Atomic bool closing;
    unsigned wrong;
} world;

/* Where there are many processors, threads look out for work without sleeping: every third round has them. */
static _Atomic unsigned cpus = 2;

unsigned cpus_usable(void)
{
    return atomic_load(&cpus);
}

static alignas(4096) uint8_t counters[WIRE_COUNTER_PAGE_BYTES];

static void on_done(work *w)
{
    ((task *)(void *)w)->done++;
}

/* A client whose counters advance all the time. */
static void *client(void *arg)
{
    world *w = arg;

    for (uint64_t v = 1; !atomic_load(&w->closing); v++) {
        for (uint32_t c = 0; c < 8; c++)
            atomic_store_explicit((_Atomic uint64_t *)(void *)(counters + c * 16), v, memory_order_release);
        sched_yield();
    }
    return NULL;
}

static void prepare(world *w, unsigned t)
{
    task *k = &w->tasks[t];

    *k = (task){.job = {.map = w->map, .items = k->items, .n_items = ITEMS, .checksum = true}};
    job_init(&k->job.job, on_done);
    k->job.job.counters = counters;
    k->job.job.signal_by_worker = true;
    k->job.job.signal_counter = t % 16;
    k->job.job.signal_value = t;
    if (t % 3 != 0) {
        k->job.job.after_counter = t % 8;
        /* Every seventh never: it is dropped, or given back by destroy. */
        k->job.job.after_value = t % 7 == 0 ? UINT64_MAX : 1 + (uint64_t)rand() % 64;
    }
    /* Every job has its own blocks, as admission sees to it. */
    for (uint32_t i = 0; i < ITEMS; i++)
        k->items[i] = (mover_item){.host = w->host + (size_t)(t * ITEMS + i) * BLOCK, .slot = t * ITEMS + i};
}

static void disturb(world *w, unsigned t)
{
    mover_stats s;

    if (t % 5 == 0 && !mover_drop(w->movers[t % 2], &w->tasks[t].job))
        atomic_store(&w->tasks[t].job.job.stop, true);
    mover_kick(w->movers[t % 2]);
    mover_get_stats(w->movers[t % 2], &s);
}

static bool ended_well(const task *k)
{
    if (k->done != 1)
        return false;
    return k->job.job.status == KVS_OK || k->job.job.status == KVS_E_CANCELLED;
}

/* In parts: the mover may have begun by the second one. */
static void hand_over(mover *m, mover_job *j, bool in_parts)
{
    if (!in_parts) {
        mover_submit(m, j);
        return;
    }
    j->n_items = 0;
    mover_begin(m, j, ITEMS);
    while (j->n_items < ITEMS - 1) {
        j->n_items++;
        mover_add(m, j);
        sched_yield();
    }
    j->n_items++;
    mover_complete(m, j);
}

static void one_round(world *w)
{
    kvs_err err;
    unsigned never = 0;

    sink_init(&w->done);
    for (int i = 0; i < 2; i++)
        if (mover_create(&w->movers[i], &w->dev.dev, DEVICE_STORE, sink_face(&w->done), &err) != KVS_OK)
            abort();
    for (unsigned t = 0; t < JOBS; t++) {
        prepare(w, t);
        never += w->tasks[t].job.job.after_value == UINT64_MAX;
        mover_expect(w->movers[t % 2]);
        hand_over(w->movers[t % 2], &w->tasks[t].job, t % 8 < 4);
        if (t % 4 == 3)
            disturb(w, (unsigned)rand() % (t + 1));
    }
    w->wrong += !sink_run_until(&w->done, JOBS - never);
    for (int i = 0; i < 2; i++)
        mover_destroy(w->movers[i]);
    w->wrong += !sink_run_until(&w->done, JOBS);
    for (unsigned t = 0; t < JOBS; t++)
        w->wrong += !ended_well(&w->tasks[t]);
    sink_fini(&w->done);
}

int main(void)
{
    static world w;
    pthread_t t;
    unsigned passed = 0, failed = 0;

    stub_init(&w.dev);
    w.host = calloc(JOBS * ITEMS, BLOCK);
    w.gpu = calloc(JOBS * ITEMS, BLOCK);
    w.map = calloc(1, sizeof *w.map + PLANES * sizeof w.map->planes[0]);
    if (w.host == NULL || w.gpu == NULL || w.map == NULL || pthread_create(&t, NULL, client, &w) != 0)
        return 1;
    /* As many planes as a batch has copies: a job is several batches, so that a stop finds it between two. */
    *w.map = (region_map){.slot_bytes = BLOCK, .n_slots = JOBS * ITEMS, .n_planes = PLANES};
    for (uint64_t p = 0; p < PLANES; p++)
        w.map->planes[p] = (region_plane){
            .base = w.gpu + p * PAGE * JOBS * ITEMS, .stride = PAGE, .page_bytes = PAGE, .block_offset = p * PAGE};
    for (int r = 0; r < ROUNDS; r++) {
        w.wrong = 0;
        atomic_store(&cpus, r % 3 == 0 ? 16 : 2);
        w.dev.ops.depth = r % 2 ? 2 : 1; /* every other round two batches at once, and sums by other threads */
        one_round(&w);
        passed += w.wrong == 0;
        failed += w.wrong != 0;
    }
    atomic_store(&w.closing, true);
    pthread_join(t, NULL);
    failed += w.dev.open_queues != 0;
    stub_fini(&w.dev);
    free(w.host);
    free(w.gpu);
    free(w.map);
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
