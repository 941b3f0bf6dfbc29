/* Twins under TSan: two movers load the same blocks for two devices, one stops or fails now and then, and slots are
 * overwritten as soon as their side is free: a read that comes after that is a race, and its block is wrong.
 *
 * race_twin [ROUNDS [SEED]]: other rounds by hand. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/mover.h"
#include "tests/support/sink.h"
#include "tests/support/stub_device.h"

enum { ROUNDS = 3000, N = 48, BLOCK = 4096, BATCH_BLOCKS = 4, STOP_EVERY = 5, FAIL_EVERY = 27 };

typedef struct side {
    stub_device dev;
    mover *mover;
    region_map *map;
    uint8_t *gpu;
    mover_job job; /* of the round */
    mover_item items[N];
    uint32_t order[2 * N];
    bool back, over; /* its job is; its slots are somebody else's */
} side;

typedef struct world {
    sink done;
    side sides[2];
    uint8_t *host;
    unsigned wrong;
    bool disturbed; /* the round: stopped, or a call fails */
    uint64_t pulled;
} world;

static world w;

static void on_done(work *x)
{
    for (int i = 0; i < 2; i++)
        if (&w.sides[i].job.job.work == x)
            w.sides[i].back = true;
}

static void open_side(side *s)
{
    mover_settings set = {.batch_bytes = BATCH_BLOCKS * BLOCK};
    kvs_err err;

    stub_init(&s->dev);
    s->dev.ops.depth = 2;
    s->gpu = calloc(N, BLOCK);
    s->map = calloc(1, sizeof *s->map + sizeof s->map->planes[0]);
    if (s->gpu == NULL || s->map == NULL)
        abort();
    *s->map = (region_map){.slot_bytes = BLOCK, .n_slots = N, .n_planes = 1, .cross_layer = true};
    s->map->planes[0] = (region_plane){.base = s->gpu, .stride = BLOCK, .page_bytes = BLOCK};
    if (mover_create(&s->mover, &s->dev.dev, DEVICE_LOAD, sink_face(&w.done), &err) != KVS_OK)
        abort();
    mover_set(s->mover, &set);
}

static void close_side(side *s)
{
    mover_destroy(s->mover);
    stub_fini(&s->dev);
    free(s->map);
    free(s->gpu);
}

static void prepare(side *s, twin *t, unsigned number)
{
    uint32_t first = (uint32_t)rand() % N;

    memset(s->gpu, 0, (size_t)N * BLOCK);
    s->job = (mover_job){.map = s->map, .items = s->items, .n_items = N, .twin = t, .side = number, .order = s->order};
    job_init(&s->job.job, on_done);
    for (uint32_t k = 0; k < N; k++) {
        uint32_t slot = (k + first) % N;

        s->items[k] = (mover_item){.host = w.host + (size_t)k * BLOCK, .slot = slot, .run = 1};
        twin_place(t, number, k, s->gpu + (size_t)slot * BLOCK);
    }
    s->back = s->over = false;
}

/* Every block, unless something was done to the round; and none that is said to be there and is not. */
static bool holds(const side *s)
{
    for (uint32_t k = 0; k < N; k++)
        if (s->items[k].status != KVS_OK && !w.disturbed)
            return false;
        else if (s->items[k].status == KVS_OK &&
                 memcmp(s->gpu + (size_t)s->items[k].slot * BLOCK, w.host + (size_t)k * BLOCK, BLOCK) != 0)
            return false;
    return true;
}

/* Its job is back: look at it and use its slots for something else, when that may be. */
static void finish(side *s, twin *t, unsigned number, bool impatient)
{
    if (!s->back || s->over)
        return;
    twin_back(t, number);
    if (impatient)
        twin_close(t, number);
    if (!twin_is_free(t, number))
        return;
    w.wrong += !holds(s);
    memset(s->gpu, 0xee, (size_t)N * BLOCK);
    s->over = true;
}

static void one_round(unsigned round)
{
    twin *t = twin_create(N, BATCH_BLOCKS);
    side *first = &w.sides[round % 2], *second = &w.sides[1 - round % 2];
    bool impatient = round % 3 == 0, joined;

    if (t == NULL)
        abort();
    prepare(first, t, 0);
    mover_submit(first->mover, &first->job);
    for (int spin = rand() % 2000; spin > 0; spin--)
        __asm__ volatile("");
    prepare(second, t, 1);
    joined = twin_join(t);
    if (!joined)
        second->over = second->back = true; /* the first one was through */
    else
        mover_submit(second->mover, &second->job);
    if (round % STOP_EVERY == 0) {
        side *stopped = rand() % 2 ? first : second;

        if (!stopped->over && !mover_drop(stopped->mover, &stopped->job))
            atomic_store(&stopped->job.job.stop, true);
        mover_kick(stopped->mover);
    }
    while (!first->over || !second->over) {
        unsigned posted = sink_posted(&w.done);

        w.wrong += !sink_run_until(&w.done, posted);
        finish(first, t, 0, impatient);
        finish(second, t, 1, impatient);
        (void)usleep(20);
    }
    twin_unref(t);
}

int main(int argc, char **argv)
{
    unsigned rounds = argc > 1 ? (unsigned)strtoul(argv[1], NULL, 0) : ROUNDS;
    stub_device *failing = NULL;
    enum stub_call failing_call = STUB_COPY;
    unsigned fails_at = 0, failed;
    mover_stats s;

    srand(argc > 2 ? (unsigned)strtoul(argv[2], NULL, 0) : 1);
    w.host = malloc((size_t)N * BLOCK);
    if (w.host == NULL)
        return 1;
    for (size_t i = 0; i < (size_t)N * BLOCK; i++)
        w.host[i] = (uint8_t)(1 + i % 200 + i / BLOCK);
    sink_init(&w.done);
    for (int i = 0; i < 2; i++)
        open_side(&w.sides[i]);
    for (unsigned r = 0; r < rounds; r++) {
        stub_device *d = &w.sides[r / FAIL_EVERY % 2].dev;
        enum stub_call call = r % 2 ? STUB_COPY : STUB_WAIT;

        if (r % FAIL_EVERY == 0) {
            failing = d;
            failing_call = call;
            fails_at = stub_count(d, call) + 3;
            stub_fail(d, call, fails_at, KVS_E_DEVICE);
        }
        w.disturbed = r % STOP_EVERY == 0 || stub_count(failing, failing_call) < fails_at;
        one_round(r);
    }
    for (int i = 0; i < 2; i++) {
        mover_get_stats(w.sides[i].mover, &s);
        w.pulled += s.path[MOVER_EXCHANGE].blocks;
        close_side(&w.sides[i]);
    }
    sink_fini(&w.done);
    free(w.host);
    failed = w.wrong > 0 || w.pulled == 0;
    (void)printf("%u rounds, %llu blocks from the twin, %u wrong\n%u passed, %u failed, 0 skipped\n", rounds,
                 (unsigned long long)w.pulled, w.wrong, !failed, failed);
    return (int)failed;
}
