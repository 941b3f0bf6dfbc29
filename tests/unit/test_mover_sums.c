/* Checksums that the device makes while a mover stores: which ones, and what becomes of them when it fails, hangs or is late. */
#include "daemon/mover.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/sums.h"
#include "daemon/thread.h"
#include "tests/support/fault_device.h"
#include "tests/support/random.h"
#include "tests/support/sink.h"

#define IN_TIME UINT64_C(1000000) /* here it is a processor that makes them, and maybe under a sanitizer */

enum { SLOTS = 24, BLOCKS = 20, KIB = 1024, BLOCK = 300 * KIB /* two parts */, EDGE = 4096 };

typedef struct world {
    device *d;
    mover *m;
    sink done;
    region_map *map;
    uint8_t *memory, *dev, *host;
    uint64_t block, stride;
    mover_item items[BLOCKS];
    mover_job job;
    unsigned n_done;
} world;

static void on_done(work *w)
{
    (void)w;
}

static void begin(world *w, device_dir dir, uint64_t block, uint64_t off)
{
    device *cpu = NULL;
    rnd r = {block + off};

    *w = (world){.block = block, .stride = (block + 15) / 16 * 16 + 64};
    w->memory = aligned_alloc(EDGE, EDGE + (2 * SLOTS * w->stride + EDGE - 1) / EDGE * EDGE);
    w->map = calloc(1, sizeof *w->map + sizeof w->map->planes[0]);
    cr_assert(w->memory != NULL && w->map != NULL);
    w->dev = w->memory + off;
    w->host = w->memory + SLOTS * w->stride + 64;
    rnd_bytes(&r, w->memory, EDGE + 2 * SLOTS * w->stride);
    *w->map = (region_map){.slot_bytes = block, .n_slots = SLOTS, .n_planes = 1, .cross_layer = true};
    w->map->planes[0] = (region_plane){.base = w->dev, .stride = w->stride, .page_bytes = block};
    sink_init(&w->done);
    cr_assert_eq(device_cpu_open(&cpu, NULL), KVS_OK);
    cr_assert_eq(fault_device_open(cpu, &w->d, NULL), KVS_OK);
    fault_device_pretend(w->d, 2, true);
    fault_device_pretend_sums(w->d);
    cr_assert_eq(mover_create(&w->m, w->d, dir, sink_face(&w->done), NULL), KVS_OK);
}

static void set(world *w, uint64_t batch_bytes, uint64_t sums_us)
{
    mover_set(w->m, &(mover_settings){.batch_bytes = batch_bytes, .sums_us = sums_us});
}

static void finish(world *w)
{
    mover_destroy(w->m);
    w->d->ops->close(w->d);
    sink_fini(&w->done);
    free(w->map);
    free(w->memory);
}

/* Slots in no order, the last one first. */
static void submit(world *w, bool checksum)
{
    w->job = (mover_job){.map = w->map, .items = w->items, .n_items = BLOCKS, .checksum = checksum};
    job_init(&w->job.job, on_done);
    for (uint32_t i = 0; i < BLOCKS; i++)
        w->items[i] = (mover_item){.host = w->host + i * w->block, .slot = SLOTS - 1 - (7 * i) % SLOTS};
    mover_submit(w->m, &w->job);
}

static void await(world *w)
{
    cr_assert(sink_run_until(&w->done, ++w->n_done));
}

static void expect_sums(const world *w)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        cr_assert_eq(w->items[i].status, KVS_OK, "block %u", i);
        cr_assert_eq(memcmp(w->items[i].host, w->dev + w->items[i].slot * w->stride, w->block), 0, "block %u", i);
        cr_assert_eq(w->items[i].checksum, sums_one(w->items[i].host, w->block), "block %u", i);
    }
}

static uint64_t asked(const world *w)
{
    return fault_device_calls(w->d, FAULT_SUM);
}

static uint64_t device_bytes(const world *w)
{
    mover_stats s;

    mover_get_stats(w->m, &s);
    return s.device_sum_bytes;
}

static void plan(const world *w, fault_action action, uint64_t nth, uint64_t count, kvs_status status,
                 uint32_t delay_us)
{
    const fault_plan p = {FAULT_SUM, action, nth, count, status, delay_us};

    fault_device_plan(w->d, &p);
}

Test(mover_sums, are_the_device_s_where_it_makes_them)
{
    static const uint64_t blocks[] = {64 * KIB, 256 * KIB, BLOCK, 511 * KIB + 16, 1100 * KIB};
    world w;

    for (size_t i = 0; i < sizeof blocks / sizeof blocks[0]; i++) {
        begin(&w, DEVICE_STORE, blocks[i], 32);
        set(&w, MOVER_BATCH_BYTES, IN_TIME);
        for (uint64_t n = 1; n <= 3; n++) {
            submit(&w, true);
            await(&w);
            expect_sums(&w);
            cr_assert_eq(device_bytes(&w), n * BLOCKS * blocks[i]);
        }
        finish(&w);
    }
}

/* Each reason by itself; the sums are right all the same. */
Test(mover_sums, are_the_processors_where_the_device_cannot_or_shall_not)
{
    static const struct {
        const char *why;
        uint64_t block, off;
        uint64_t sums_us;
        bool cross_layer;
    } cases[] = {
        {"it shall not", BLOCK, 0, 0, true},
        {"blocks are short", 48 * KIB, 0, IN_TIME, true},
        {"the last part is too short for it", 256 * KIB + 128, 0, IN_TIME, true},
        {"no multiple of 16", BLOCK + 8, 0, IN_TIME, true},
        {"slots lie askew", BLOCK, 8, IN_TIME, true},
        {"one tensor a layer", BLOCK, 0, IN_TIME, false},
    };
    world w;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        begin(&w, DEVICE_STORE, cases[i].block, cases[i].off);
        set(&w, MOVER_BATCH_BYTES, cases[i].sums_us);
        w.map->cross_layer = cases[i].cross_layer;
        submit(&w, true);
        await(&w);
        expect_sums(&w);
        cr_assert_eq(asked(&w), 0, "%s", cases[i].why);
        finish(&w);
    }
}

Test(mover_sums, are_not_asked_for_without_a_reason)
{
    world w;

    begin(&w, DEVICE_STORE, BLOCK, 0);
    set(&w, MOVER_BATCH_BYTES, IN_TIME);
    submit(&w, false);
    await(&w);
    cr_assert_eq(asked(&w), 0);
    cr_assert_eq(w.items[3].checksum, 0);
    finish(&w);
    begin(&w, DEVICE_LOAD, BLOCK, 0);
    set(&w, MOVER_BATCH_BYTES, IN_TIME);
    submit(&w, true);
    await(&w);
    cr_assert_eq(asked(&w), 0);
    finish(&w);
}

static uint64_t batches_of(uint64_t sums_us, bool checksum)
{
    uint64_t n = 0;
    world w;

    begin(&w, DEVICE_STORE, 1024 * KIB, 0);
    mover_alone(w.m, true);
    set(&w, 1024 * KIB, sums_us);
    for (int i = 0; i < 2; i++) { /* behind the first one it is known that the device is quick */
        n = fault_device_calls(w.d, FAULT_COPY);
        submit(&w, checksum);
        await(&w);
        n = fault_device_calls(w.d, FAULT_COPY) - n;
    }
    finish(&w);
    return n;
}

/* Processors sum what comes in little by little; the device has it all before. */
Test(mover_sums, of_the_device_leave_batches_as_long_as_they_are)
{
    cr_assert_eq(batches_of(IN_TIME, true), batches_of(IN_TIME, false));
    cr_assert_gt(batches_of(0, true), batches_of(IN_TIME, true));
}

Test(mover_sums, that_fail_are_made_by_processors)
{
    uint64_t began;
    world w;

    begin(&w, DEVICE_STORE, BLOCK, 0);
    set(&w, 2 * BLOCK, IN_TIME);
    plan(&w, FAULT_FAIL, 3, 1, KVS_E_DEVICE, 0);
    began = thread_now_us();
    submit(&w, true);
    await(&w);
    if (thread_now_us() - began < 50000)
        cr_assert_eq(asked(&w), 3, "it is asked again at once");
    expect_sums(&w);
    cr_assert_eq(w.job.job.status, KVS_OK);
    cr_assert_gt(device_bytes(&w), 0);
    cr_assert_lt(device_bytes(&w), BLOCKS * BLOCK);
    finish(&w);
}

Test(mover_sums, that_are_late_leave_the_gpu_to_others_for_a_while)
{
    world w;
    uint64_t before, began;

    begin(&w, DEVICE_STORE, BLOCK, 0);
    set(&w, 2 * BLOCK, 20000);
    plan(&w, FAULT_DELAY, 1, 2, KVS_OK, 40000);
    began = thread_now_us();
    for (int i = 0; i < 3; i++) {
        submit(&w, true);
        await(&w);
        expect_sums(&w);
        if (thread_now_us() - began < 125000) /* 80 until two were late, and a pause of 50 */
            cr_assert_eq(asked(&w), 2, "asked in its pause");
    }
    before = asked(&w);
    (void)usleep(300000); /* longer than its first pauses */
    submit(&w, true);
    await(&w);
    expect_sums(&w);
    cr_assert_gt(asked(&w), before);
    finish(&w);
}

/* Blocks that begin in one batch and end in another, while the device comes and goes. */
Test(mover_sums, of_cut_blocks_are_right_whoever_makes_them)
{
    static const uint64_t batches[] = {100 * KIB, 450 * KIB, 700 * KIB};
    const fault_plan slow = {FAULT_WAIT, FAULT_DELAY, 1, 0, KVS_OK, 4000};
    uint64_t by_device = 0, n = 0;
    world w;

    for (size_t i = 0; i < sizeof batches / sizeof batches[0]; i++) {
        begin(&w, DEVICE_STORE, BLOCK, 0);
        set(&w, batches[i], IN_TIME);
        fault_device_plan(w.d, &slow); /* so that a job lasts longer than a pause */
        for (uint64_t nth = 1; nth <= 4; nth++, n++) {
            plan(&w, FAULT_FAIL, nth, 1, KVS_E_DEVICE, 0);
            submit(&w, true);
            await(&w);
            expect_sums(&w);
        }
        by_device += device_bytes(&w);
        finish(&w);
    }
    cr_assert_gt(by_device, 0);
    cr_assert_lt(by_device, n * BLOCKS * BLOCK);
}

Test(mover_sums, that_lose_the_device_lose_the_job)
{
    world w;
    uint64_t waits, copies;

    begin(&w, DEVICE_STORE, BLOCK, 0);
    set(&w, 2 * BLOCK, IN_TIME);
    plan(&w, FAULT_FAIL, 2, 0, KVS_E_DEVICE_LOST, 0);
    submit(&w, true);
    await(&w);
    cr_assert_eq(w.job.job.status, KVS_E_DEVICE_LOST);
    for (uint32_t i = 0; i < BLOCKS; i++)
        cr_assert_eq(w.items[i].status, KVS_E_DEVICE_LOST, "block %u", i);
    waits = fault_device_calls(w.d, FAULT_WAIT);
    copies = fault_device_calls(w.d, FAULT_COPY);
    submit(&w, true);
    await(&w);
    cr_assert_eq(w.items[BLOCKS - 1].status, KVS_E_DEVICE_LOST);
    cr_assert(asked(&w) == 2 && fault_device_calls(w.d, FAULT_WAIT) == waits &&
                  fault_device_calls(w.d, FAULT_COPY) == copies,
              "a lost device was asked again");
    finish(&w);
}

Test(mover_sums, that_hang_answer_nothing_and_then_all)
{
    world w;

    begin(&w, DEVICE_STORE, BLOCK, 0);
    set(&w, 2 * BLOCK, IN_TIME);
    plan(&w, FAULT_SWALLOW, 2, 1, KVS_OK, 0);
    submit(&w, true);
    fault_device_await_held(w.d, 1);
    (void)usleep(20000);
    cr_assert_eq(sink_posted(&w.done), 0);
    fault_device_release(w.d);
    await(&w);
    expect_sums(&w);
    finish(&w);
}

Test(mover_sums, of_a_failed_copy_publish_nothing)
{
    const fault_plan bad = {FAULT_WAIT, FAULT_FAIL, 2, 1, KVS_E_DEVICE, 0};
    uint32_t n_failed = 0;
    world w;

    begin(&w, DEVICE_STORE, BLOCK, 0);
    set(&w, 2 * BLOCK, IN_TIME);
    fault_device_plan(w.d, &bad);
    submit(&w, true);
    await(&w);
    for (uint32_t i = 0; i < BLOCKS; i++) {
        n_failed += w.items[i].status == KVS_E_DEVICE;
        if (w.items[i].status == KVS_OK)
            cr_assert_eq(w.items[i].checksum, sums_one(w.items[i].host, w.block), "block %u", i);
        else
            cr_assert_eq(w.items[i].status, KVS_E_DEVICE, "block %u", i);
    }
    cr_assert(n_failed >= 1 && n_failed <= 3, "%u", n_failed);
    finish(&w);
}
