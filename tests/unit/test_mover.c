#include "daemon/mover.h"
#include "daemon/thread.h"

#include <criterion/criterion.h>
#include <sched.h>
#include <signal.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "daemon/beat.h"
#include "daemon/sums.h"
#include "proto/cpus.h"
#include "tests/support/fault_device.h"
#include "tests/support/sink.h"
#include "tests/support/stub_device.h"

enum { SLOTS = 8, PLANES = 3, PAGE = 4096, BLOCK = PLANES * PAGE, MAX_JOBS = 600 };
/* Planes of one tensor each that fill a batch to its last copy: so that a block is a batch. */
enum { BATCH_PLANES = 256, SMALL_PAGE = 16 };

/* Threads wait without sleeping only where there are processors enough: here they do unless a test says otherwise. */
static unsigned cpus = 16;

unsigned cpus_usable(void)
{
    return cpus;
}

static alignas(4096) uint8_t counters[WIRE_COUNTER_PAGE_BYTES];
static stub_device dev;
static sink done;
static mover *m;
static uint8_t *host, *gpu;
static region_map *map;

/* A job with room for its items, and what its on_done saw. */
typedef struct task {
    mover_job job; /* first */
    mover_item items[SLOTS];
    unsigned place; /* order of completion, from 1 */
} task;

static task tasks[MAX_JOBS];
static unsigned n_done;

static void on_done(work *w)
{
    ((task *)(void *)w)->place = ++n_done;
}

static region_map *make_map(bool cross_layer, uint32_t planes, uint64_t page, const uint64_t *offsets)
{
    region_map *r = calloc(1, sizeof *r + planes * sizeof r->planes[0]);

    cr_assert_not_null(r);
    r->slot_bytes = planes * page;
    r->n_slots = SLOTS;
    r->n_planes = planes;
    r->cross_layer = cross_layer;
    for (uint32_t p = 0; p < planes; p++) {
        region_plane *pl = &r->planes[p];

        pl->page_bytes = page;
        pl->block_offset = offsets != NULL ? offsets[p] : p * page;
        /* Cross-layer: planes side by side in a slot.  Else one tensor a layer, all slots of plane 0 first.
         */
        pl->base = cross_layer ? gpu + pl->block_offset : gpu + p * SLOTS * page;
        pl->stride = cross_layer ? r->slot_bytes : page;
    }
    return r;
}

static void fill_random(uint8_t *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * UINT64_C(6364136223846793005) + 1;
        p[i] = (uint8_t)(seed >> 56);
    }
}

static void start(device_dir dir, bool cross_layer, uint32_t planes, uint64_t page)
{
    kvs_err err = {0};

    host = malloc(SLOTS * planes * page);
    gpu = malloc(SLOTS * planes * page);
    cr_assert(host != NULL && gpu != NULL);
    fill_random(host, SLOTS * planes * page, 1);
    fill_random(gpu, SLOTS * planes * page, 2);
    map = make_map(cross_layer, planes, page, NULL);
    sink_init(&done);
    cr_assert_eq(mover_create(&m, &dev.dev, dir, sink_face(&done), &err), KVS_OK, "%s", err.msg);
}

static void end(void)
{
    mover_destroy(m);
    cr_assert_eq(dev.open_queues, 0);
    sink_fini(&done);
    free(map);
    free(host);
    free(gpu);
}

static void setup(void)
{
    stub_init(&dev);
}

static void teardown(void)
{
    stub_fini(&dev);
}

TestSuite(mover, .init = setup, .fini = teardown);

/* Items first .. first + n - 1: host slot i and device slot i, unless the test changes them. */
static task *make(unsigned t, uint32_t first, uint32_t n)
{
    task *k = &tasks[t];

    *k = (task){.job = {.map = map, .items = k->items, .n_items = n}};
    job_init(&k->job.job, on_done);
    k->job.job.counters = counters;
    for (uint32_t i = 0; i < n; i++)
        k->items[i] = (mover_item){.host = host + (first + i) * map->slot_bytes, .slot = first + i};
    return k;
}

static task *waiting(task *k, uint32_t counter, uint64_t value)
{
    k->job.job.after_counter = counter;
    k->job.job.after_value = value;
    return k;
}

static void submit(task *k)
{
    mover_submit(m, &k->job);
}

static void reach(uint32_t counter, uint64_t value)
{
    atomic_store((_Atomic uint64_t *)(void *)(counters + counter * 16), value);
}

static uint64_t signalled(uint32_t counter)
{
    return atomic_load((_Atomic uint64_t *)(void *)(counters + 4096 + counter * 16));
}

static bool same_block(uint32_t host_slot, uint32_t slot)
{
    for (uint32_t p = 0; p < map->n_planes; p++) {
        const region_plane *pl = &map->planes[p];

        if (memcmp(host + host_slot * map->slot_bytes + pl->block_offset, pl->base + slot * pl->stride,
                   pl->page_bytes) != 0)
            return false;
    }
    return true;
}

static uint64_t sum_of(uint32_t host_slot)
{
    return sums_one(host + host_slot * map->slot_bytes, map->slot_bytes);
}

/* --- two batches at once
 * ----------------------------------------------------------------------------------------- */

static task *deep(device_dir dir, unsigned t)
{
    dev.ops.depth = 2;
    start(dir, false, BATCH_PLANES, SMALL_PAGE);
    return make(t, 0, SLOTS);
}

Test(mover, queues_the_next_batch_before_it_waits_for_the_last_where_the_device_likes_that)
{
    task *k = deep(DEVICE_STORE, 0);

    k->job.checksum = true;
    stub_hold(&dev, 1);
    submit(k);
    stub_await_held(&dev);
    cr_assert_eq(stub_count(&dev, STUB_COPY), 2);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), SLOTS);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++) {
        cr_assert_eq(k->items[i].status, KVS_OK);
        cr_assert(same_block(i, i));
        cr_assert_eq(k->items[i].checksum, sum_of(i), "block %u", i);
    }
    end();
}

/* --- jobs that begin before all of their items are there --- */

/* The first item is there, and what is asked of the device for it has happened. */
static task *begun(unsigned waits)
{
    task *k;

    dev.ops.depth = 2;
    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, SLOTS);
    k->job.checksum = true;
    k->job.n_items = 1;
    mover_begin(m, &k->job, SLOTS);
    for (int i = 0; i < 5000 && stub_count(&dev, STUB_WAIT) < waits; i++)
        (void)usleep(1000);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), waits);
    return k;
}

static void complete(task *k)
{
    k->job.n_items = SLOTS;
    mover_complete(m, &k->job);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(n_done, 1);
}

Test(mover, begins_with_the_first_items_and_ends_behind_the_last)
{
    task *k = begun(1);

    k->job.n_items = 3;
    mover_add(m, &k->job);
    for (int i = 0; i < 5000 && stub_count(&dev, STUB_WAIT) < 2; i++)
        (void)usleep(1000);
    cr_assert_eq(n_done, 0);
    complete(k);
    for (uint32_t i = 0; i < SLOTS; i++) {
        cr_assert_eq(k->items[i].status, KVS_OK);
        cr_assert(same_block(i, i));
        cr_assert_eq(k->items[i].checksum, sum_of(i), "block %u", i);
    }
    end();
}

Test(mover, is_not_done_before_it_is_complete_though_nothing_is_left_to_do)
{
    task *k = begun(1);
    mover_stats s;

    for (int i = 0; i < 20; i++) {
        mover_get_stats(m, &s);
        cr_assert_eq(s.jobs, 0);
        (void)usleep(1000);
    }
    k->job.n_items = 1;
    mover_complete(m, &k->job);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->items[0].status, KVS_OK);
    end();
}

Test(mover, loses_also_the_items_that_come_when_the_device_is_lost)
{
    task *k;

    stub_fail(&dev, STUB_WAIT, 1, KVS_E_DEVICE_LOST);
    k = begun(1);
    complete(k);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert_eq(k->items[i].status, KVS_E_DEVICE_LOST, "item %u", i);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 1, "a lost device was asked again");
    end();
}

static uint8_t *slow_at;
static const size_t slow_bytes = 1 << 20;

/* Memory that takes its time to be read. */
static void on_slow_read(int sig)
{
    (void)sig;
    (void)usleep(50000);
    (void)mprotect(slow_at, slow_bytes, PROT_READ | PROT_WRITE);
}

static void make_slow(uint8_t *at)
{
    struct sigaction a = {.sa_handler = on_slow_read};

    slow_at = at + (uintptr_t) - (uintptr_t)at % 4096;
    cr_assert_eq(sigaction(SIGSEGV, &a, NULL), 0);
    cr_assert_eq(mprotect(slow_at, slow_bytes, PROT_NONE), 0);
}

/* What was there before the loss is summed by other threads, which write into the job: they have ended when it is given back. */
Test(mover, gives_a_job_back_with_the_device_lost_when_nobody_sums_for_it_any_more)
{
    const uint64_t page = UINT64_C(16) << 20;
    uint64_t at_once;
    task *k;

    dev.ops.depth = 2;
    start(DEVICE_STORE, true, 1, page);
    k = make(0, 0, 1);
    k->job.checksum = true;
    stub_fail(&dev, STUB_COPY, 4, KVS_E_DEVICE_LOST); /* 4, 8 and 4 MiB: the first block is there */
    stub_hold(&dev, 3);
    mover_begin(m, &k->job, 2);
    stub_await_held(&dev);
    make_slow(host + (UINT64_C(14) << 20));
    k->job.n_items = 2;
    k->items[1] = (mover_item){.host = host + page, .slot = 1};
    mover_add(m, &k->job);
    stub_release(&dev);
    while (stub_count(&dev, STUB_COPY) < 4)
        thread_relax();
    mover_complete(m, &k->job);
    cr_assert(sink_run_until(&done, 1));
    at_once = k->items[0].checksum;
    (void)usleep(200000);
    cr_assert_eq(k->items[0].status, KVS_E_DEVICE_LOST);
    cr_assert_eq(k->items[0].checksum, at_once, "a thread wrote into a job that was given back");
    end();
}

/* Nobody is kept from looking items up by a mover that waits for them. */
Test(mover, begins_when_all_are_there_where_processors_are_few)
{
    task *k;

    cpus = 2;
    k = begun(0);
    k->job.n_items = 3;
    mover_add(m, &k->job);
    (void)usleep(20000);
    cr_assert_eq(stub_count(&dev, STUB_COPY), 0);
    complete(k);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert_eq(k->items[i].status, KVS_OK);
    end();
}

Test(mover, looks_up_little_at_first_and_all_in_the_end)
{
    task *k;
    uint32_t n = 0, parts[SLOTS] = {0};

    dev.ops.depth = 2;
    start(DEVICE_LOAD, true, PLANES, UINT64_C(2) << 20);
    k = make(0, 0, 0);
    for (uint32_t left = SLOTS; left > 0; left -= parts[n++]) {
        parts[n] = mover_part(&k->job, left);
        k->job.n_items += parts[n];
    }
    cr_assert_eq(n, 3);
    cr_assert_eq(parts[0], 1);
    cr_assert_eq(parts[1], 3);
    cr_assert_eq(parts[2], 4);
    k->job.n_items = 0; /* nothing was found: it ends all the same */
    mover_begin(m, &k->job, 0);
    mover_complete(m, &k->job);
    cr_assert(sink_run_until(&done, 1));
    end();
}

/* Two jobs of one batch each, which become due at the same time. */
static void two_jobs(task **ret_a, task **ret_b)
{
    dev.ops.depth = 2;
    start(DEVICE_STORE, true, 1, SMALL_PAGE);
    *ret_a = waiting(make(0, 0, 1), 1, 5);
    *ret_b = waiting(make(1, 1, 1), 1, 5);
    (*ret_a)->job.checksum = (*ret_b)->job.checksum = true;
    stub_hold(&dev, 1);
    submit(*ret_a);
    submit(*ret_b);
    reach(1, 5);
    stub_await_held(&dev);
}

Test(mover, queues_the_next_job_before_it_waits_for_the_last)
{
    task *a, *b;

    two_jobs(&a, &b);
    cr_assert_eq(stub_count(&dev, STUB_COPY), 2);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 2);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 2);
    cr_assert_eq(a->items[0].status, KVS_OK);
    cr_assert_eq(b->items[0].status, KVS_OK);
    cr_assert_eq(a->items[0].checksum, sum_of(0));
    cr_assert_eq(b->items[0].checksum, sum_of(1));
    cr_assert(same_block(0, 0) && same_block(1, 1));
    end();
}

Test(mover, waits_for_a_next_job_that_was_queued_and_then_stopped)
{
    task *a, *b;

    two_jobs(&a, &b);
    cr_assert_not(mover_drop(m, &b->job), "it has begun");
    atomic_store(&b->job.job.stop, true);
    mover_kick(m);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 2, "its batch was on the device");
    cr_assert_eq(b->items[0].status, KVS_OK, "all of it");
    end();
}

Test(mover, loses_the_next_job_with_the_device_though_it_was_queued)
{
    task *a, *b;

    stub_fail(&dev, STUB_WAIT, 1, KVS_E_DEVICE_LOST);
    two_jobs(&a, &b);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(a->items[0].status, KVS_E_DEVICE_LOST);
    cr_assert_eq(b->items[0].status, KVS_E_DEVICE_LOST);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 1);
    end();
}

Test(mover, sums_many_blocks_of_a_batch_each_for_itself)
{
    task *k;

    dev.ops.depth = 2;
    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, SLOTS);
    k->job.checksum = true;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert_eq(k->items[i].checksum, sum_of(i), "block %u", i);
    end();
}

/* Each job has had its first bytes when an older one becomes due, and goes first.  Symptom: with more of them than there are
 * places for sums the mover stood still for ever. */
Test(mover, sums_the_blocks_of_any_number_of_jobs_that_were_overtaken, .timeout = 60)
{
    enum { JOBS = SUMS_BLOCKS + 10, TURNS = 6 /* in which all that wait are looked at */, BATCHES = 16 };
    const mover_settings s = {.batch_bytes = PAGE};

    dev.ops.depth = 2;
    start(DEVICE_STORE, true, BATCHES, PAGE);
    mover_set(m, &s);
    stub_hold(&dev, 1);
    for (unsigned t = 0; t < JOBS; t++) {
        task *k = waiting(make(t, t % SLOTS, 1), 0, JOBS - t);

        k->job.checksum = true;
        submit(k);
    }
    for (unsigned t = 1; t < JOBS; t++) {
        reach(0, t);
        stub_await_held(&dev);
        stub_hold(&dev, stub_count(&dev, STUB_WAIT) + TURNS);
        reach(0, t + 1);
        stub_release(&dev);
    }
    stub_await_held(&dev);
    cr_assert_eq(n_done, 0);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, JOBS));
    for (unsigned t = 0; t < JOBS; t++) {
        cr_assert_eq(tasks[t].items[0].status, KVS_OK, "job %u", t);
        cr_assert_eq(tasks[t].items[0].checksum, sum_of(t % SLOTS), "job %u", t);
    }
    end();
}

Test(mover, fails_only_the_items_of_one_of_two_batches)
{
    task *k = deep(DEVICE_LOAD, 0);

    stub_fail(&dev, STUB_COPY, 2, KVS_E_DEVICE); /* never queued, so that the waits of blocks 2.. are one earlier */
    stub_fail(&dev, STUB_WAIT, 4, KVS_E_DEVICE);
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->job.job.status, KVS_E_DEVICE);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert_eq(k->items[i].status, i == 1 || i == 4 ? KVS_E_DEVICE : KVS_OK, "block %u", i);
    end();
}

Test(mover, loses_every_item_with_two_batches_under_way)
{
    task *k = deep(DEVICE_STORE, 0);

    stub_fail(&dev, STUB_WAIT, 3, KVS_E_DEVICE_LOST);
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert_eq(k->items[i].status, KVS_E_DEVICE_LOST);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 3, "a lost device was asked again");
    end();
}

Test(mover, waits_for_what_two_batches_have_begun_when_it_is_stopped)
{
    task *k = deep(DEVICE_LOAD, 0);

    stub_hold(&dev, 1);
    submit(k);
    stub_await_held(&dev);
    atomic_store(&k->job.job.stop, true);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->job.job.status, KVS_E_CANCELLED);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 2);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert_eq(k->items[i].status, i < 2 ? KVS_OK : KVS_E_CANCELLED, "block %u", i);
    end();
}

/* --- copies
 * ------------------------------------------------------------------------------------------------------ */

Test(mover, stores_scattered_blocks_with_their_checksums)
{
    static const uint32_t slots[] = {6, 1, 3};
    task *k;

    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, 3);
    for (int i = 0; i < 3; i++)
        k->items[i].slot = slots[i];
    k->job.checksum = true;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->job.job.status, KVS_OK);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert_eq(k->items[i].status, KVS_OK);
        cr_assert(same_block(i, slots[i]));
        cr_assert_eq(k->items[i].checksum, sum_of(i));
    }
    cr_assert_not(same_block(3, 3), "a block that nobody asked for was copied");
    cr_assert_eq(dev.batch_copies[0], 3);
    end();
}

Test(mover, stores_without_a_checksum_when_none_is_asked)
{
    task *k;

    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, 1);
    k->items[0].checksum = 77;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->items[0].checksum, 0);
    cr_assert(same_block(0, 0));
    end();
}

Test(mover, loads_into_the_device)
{
    task *k;

    start(DEVICE_LOAD, true, PLANES, PAGE);
    k = make(0, 2, 2);
    k->items[0].slot = 7;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert(same_block(2, 7));
    cr_assert(same_block(3, 3));
    end();
}

/* They may lie in two pieces of the arena: a copy across two registered ranges is refused by the driver. */
Test(mover, does_not_join_blocks_that_are_neighbours_on_both_sides)
{
    start(DEVICE_LOAD, true, PLANES, PAGE);
    submit(make(0, 0, SLOTS));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 1);
    cr_assert_eq(dev.batch_copies[0], SLOTS);
    cr_assert_eq(dev.batch_bytes[0], SLOTS * BLOCK);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert(same_block(i, i));
    end();
}

Test(mover, joins_neighbours_of_one_run)
{
    task *k;

    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, SLOTS);
    for (uint32_t i = 0; i < SLOTS; i++)
        k->items[i].run = i < 4 ? 1 : 2;
    k->items[6].host = host + 7 * BLOCK; /* 6 and 7 change places on one side */
    k->items[7].host = host + 6 * BLOCK;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 1);
    cr_assert_eq(dev.batch_copies[0], 4, "0 to 3, 4 and 5, 6, 7");
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert(same_block(i < 6 ? i : 13 - i, i));
    end();
}

Test(mover, joins_pages_of_a_block_that_are_neighbours_on_both_sides)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    map->cross_layer = false; /* as where only some layers share a tensor */
    submit(make(0, 0, 2));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(dev.batch_copies[0], 2);
    cr_assert(same_block(0, 0) && same_block(1, 1));
    end();
}

Test(mover, moves_one_page_a_plane_where_layers_lie_apart)
{
    task *k;

    start(DEVICE_STORE, false, PLANES, PAGE);
    k = make(0, 0, 4);
    k->job.checksum = true;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(dev.batch_copies[0], 4 * PLANES);
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert(same_block(i, i));
        cr_assert_eq(k->items[i].checksum, sum_of(i));
    }
    end();
}

/* Below, at and above what a batch holds: bytes and sums do not depend on where a block is cut. */
Test(mover, cuts_blocks_anywhere_without_changing_bytes_or_sums)
{
    static const uint32_t planes[] = {1, 7, 100, 255, 256, 257, 600};

    for (unsigned l = 0; l < sizeof planes / sizeof planes[0]; l++) {
        unsigned before = stub_count(&dev, STUB_COPY);
        task *k;

        n_done = 0;
        start(DEVICE_STORE, false, planes[l], 48);
        k = make(0, 0, 3);
        k->items[1].slot = 5;
        k->job.checksum = true;
        submit(k);
        cr_assert(sink_run_until(&done, 1));
        for (uint32_t i = 0; i < 3; i++) {
            cr_assert_eq(k->items[i].status, KVS_OK);
            cr_assert(same_block(i, k->items[i].slot), "planes %u", planes[l]);
            cr_assert_eq(k->items[i].checksum, sum_of(i), "planes %u", planes[l]);
        }
        cr_assert_eq(stub_count(&dev, STUB_COPY) - before, (3 * planes[l] + 255) / 256);
        end();
    }
}

Test(mover, sums_a_block_whose_planes_are_listed_out_of_order)
{
    static const uint64_t offsets[PLANES] = {2 * PAGE, 0, PAGE};
    task *k;

    start(DEVICE_STORE, false, PLANES, PAGE);
    free(map);
    map = make_map(false, PLANES, PAGE, offsets);
    k = make(0, 0, 2);
    k->job.checksum = true;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    for (uint32_t i = 0; i < 2; i++) {
        cr_assert(same_block(i, i));
        cr_assert_eq(k->items[i].checksum, sum_of(i));
    }
    end();
}

Test(mover, keeps_batches_below_what_is_set)
{
    uint64_t total = 0;

    start(DEVICE_LOAD, true, PLANES, UINT64_C(2) << 20);
    mover_set(m, &(mover_settings){.batch_bytes = UINT64_C(16) << 20});
    submit(make(0, 0, SLOTS));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 3, "48 MiB");
    for (unsigned b = 0; b < 3; b++) {
        cr_assert_leq(dev.batch_bytes[b], UINT64_C(16) << 20);
        total += dev.batch_bytes[b];
    }
    cr_assert_eq(total, SLOTS * map->slot_bytes);
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert(same_block(i, i));
    end();
}

/* How a job of 48 MiB is cut where batches are queued ahead. */
static void taper(device_dir dir, bool checksum, uint64_t last)
{
    uint64_t total = 0, longest = 0;
    unsigned n;
    task *k;

    dev.ops.depth = 2;
    start(dir, true, PLANES, UINT64_C(2) << 20);
    k = make(0, 0, SLOTS);
    k->job.checksum = checksum;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    n = stub_count(&dev, STUB_COPY);
    for (unsigned b = 0; b < n; b++) {
        total += dev.batch_bytes[b];
        longest = dev.batch_bytes[b] > longest ? dev.batch_bytes[b] : longest;
    }
    cr_assert_eq(total, SLOTS * map->slot_bytes);
    cr_assert_leq(dev.batch_bytes[0], UINT64_C(4) << 20, "the first is on its way at once");
    cr_assert_leq(dev.batch_bytes[n - 1], last, "the last is short");
    cr_assert_geq(longest, UINT64_C(10) << 20);
    for (uint32_t i = 0; i < SLOTS; i++) {
        cr_assert(same_block(i, i));
        if (checksum)
            cr_assert_eq(k->items[i].checksum, sum_of(i));
    }
    end();
}

Test(mover, begins_and_ends_with_short_batches_where_it_queues_ahead)
{
    taper(DEVICE_LOAD, false, UINT64_C(8) << 20);
}

Test(mover, ends_with_shorter_ones_still_where_they_are_summed)
{
    taper(DEVICE_STORE, true, UINT64_C(2) << 20);
}

/* The longest batch of a job of 48 MiB where at most 2 MiB are set. */
static uint64_t longest(device_dir dir, bool checksum, bool alone)
{
    mover_settings s = {.batch_bytes = UINT64_C(2) << 20};
    uint64_t most = 0;
    task *k;

    dev.ops.depth = 2;
    start(dir, true, PLANES, UINT64_C(2) << 20);
    mover_set(m, &s);
    mover_alone(m, alone);
    k = make(0, 0, SLOTS);
    k->job.checksum = checksum;
    n_done = 0;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    for (unsigned b = 0; b < stub_count(&dev, STUB_COPY); b++)
        most = dev.batch_bytes[b] > most ? dev.batch_bytes[b] : most;
    end();
    stub_fini(&dev);
    stub_init(&dev);
    return most;
}

Test(mover, makes_longer_batches_while_nobody_else_could_come_in_between)
{
    cr_assert_eq(longest(DEVICE_LOAD, false, false), UINT64_C(2) << 20);
    cr_assert_eq(longest(DEVICE_LOAD, false, true), UINT64_C(8) << 20);
    cr_assert_eq(longest(DEVICE_STORE, false, true), UINT64_C(8) << 20);
    cr_assert_eq(longest(DEVICE_STORE, true, true), UINT64_C(2) << 20, "sums begin when a batch has landed");
}

Test(mover, does_not_cut_one_block)
{
    dev.ops.depth = 2;
    start(DEVICE_LOAD, true, PLANES, 1499136); /* 4,497,408 bytes */
    submit(make(0, 3, 1));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 1);
    cr_assert_eq(dev.batch_copies[0], 1);
    end();
}

static _Atomic unsigned n_soon;

static void on_soon(void *ud)
{
    (void)ud;
    n_soon++;
}

/* Once a job, and only where a thread may find the time to wake up. */
Test(mover, announces_the_end_of_a_job)
{
    static const unsigned depths[] = {1, 2};

    for (unsigned i = 0; i < 2; i++) {
        work_sink face;
        kvs_err err = {0};
        mover *loud;

        dev.ops.depth = depths[i];
        start(DEVICE_LOAD, true, PLANES, UINT64_C(2) << 20);
        face = sink_face(&done);
        face.soon = on_soon;
        n_soon = 0;
        n_done = 0;
        cr_assert_eq(mover_create(&loud, &dev.dev, DEVICE_LOAD, face, &err), KVS_OK, "%s", err.msg);
        mover_expect(loud); /* whether or not a job comes */
        for (unsigned t = 0; t < 3; t++) {
            mover_submit(loud, &make(t, 0, t == 0 ? 1 : SLOTS)->job);
            cr_assert(sink_run_until(&done, t + 1));
        }
        cr_assert_eq(n_soon, depths[i] == 1 ? 0 : 3);
        mover_destroy(loud);
        end();
    }
}

/* One tensor a layer: the rules decide by the size of a page, of all layouts by that of a block. */
Test(mover, copies_by_the_means_that_its_rules_say)
{
    mover_settings s = {.batch_bytes = MOVER_BATCH_BYTES, .rules = {.n = 1}};

    s.rules.rules[0] = (route_rule){.below = PAGE + 1, .idle = {DEVICE_BY_KERNEL, 9}};
    start(DEVICE_LOAD, false, PLANES, PAGE);
    mover_set(m, &s);
    submit(make(0, 0, 4));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(dev.batch_how[0].means, DEVICE_BY_KERNEL);
    cr_assert_eq(dev.batch_how[0].n_blocks, 9);
    map->cross_layer = true;
    submit(make(1, 0, 4));
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(dev.batch_how[1].means, DEVICE_BY_ENGINE);
    end();
}

Test(mover, keeps_batches_of_a_kernel_below_1024_copies)
{
    mover_settings s = {.batch_bytes = MOVER_BATCH_BYTES, .rules = {.n = 1}};
    mover_stats stats;

    s.rules.rules[0] = (route_rule){.below = UINT64_MAX, .idle = {DEVICE_BY_KERNEL, 9}};
    start(DEVICE_STORE, false, 600, 48);
    mover_set(m, &s);
    submit(make(0, 0, 3));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 2);
    cr_assert_eq(dev.batch_copies[0], 1024);
    for (uint32_t i = 0; i < 3; i++)
        cr_assert(same_block(i, i));
    mover_get_stats(m, &stats);
    cr_assert_eq(stats.kernel_bytes, stats.bytes);
    end();
}

Test(mover, keeps_batches_below_256_copies)
{
    enum { ITEMS = 300 };
    static mover_item items[ITEMS];
    task *k;

    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, 1);
    k->job.items = items;
    k->job.n_items = ITEMS;
    for (uint32_t i = 0; i < ITEMS; i++) /* backwards, so that no two are neighbours */
        items[i] = (mover_item){.host = host + (SLOTS - 1 - i % SLOTS) * BLOCK, .slot = SLOTS - 1 - i % SLOTS};
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(stub_count(&dev, STUB_COPY), 2);
    cr_assert_eq(dev.batch_copies[0], 256);
    for (uint32_t i = 0; i < ITEMS; i++)
        cr_assert_eq(items[i].status, KVS_OK);
    end();
}

Test(mover, does_not_load_a_corrupt_block)
{
    task *k;

    start(DEVICE_LOAD, true, PLANES, PAGE);
    k = make(0, 0, 4);
    for (uint32_t i = 0; i < 4; i++) {
        k->items[i].verify = i != 3;
        k->items[i].checksum = i == 3 ? 0 : sum_of(i);
    }
    host[1 * BLOCK + 5000] ^= 1;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->items[0].status, KVS_OK);
    cr_assert_eq(k->items[1].status, KVS_E_CORRUPT);
    cr_assert_eq(k->items[2].status, KVS_OK);
    cr_assert_eq(k->items[3].status, KVS_OK);
    cr_assert_eq(k->job.job.status, KVS_E_CORRUPT);
    cr_assert(strstr(k->job.job.err.msg, "item 1") != NULL, "%s", k->job.job.err.msg);
    cr_assert(same_block(0, 0) && same_block(2, 2) && same_block(3, 3));
    for (uint32_t i = 0; i < 3; i++)
        cr_assert_neq(memcmp(gpu + BLOCK + i * PAGE, host + BLOCK + i * PAGE, PAGE), 0, "it was copied");
    end();
}

Test(mover, finishes_a_job_whose_last_block_is_corrupt)
{
    task *k;

    start(DEVICE_LOAD, true, PLANES, PAGE);
    k = make(0, 0, 1);
    k->items[0].verify = true;
    submit(k);
    submit(make(1, 1, 0));
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(k->items[0].status, KVS_E_CORRUPT);
    cr_assert_eq(stub_count(&dev, STUB_COPY), 0);
    cr_assert_eq(tasks[1].job.job.status, KVS_OK);
    end();
}

/* --- failures
 * ---------------------------------------------------------------------------------------------------- */

Test(mover, reports_a_queue_that_cannot_be_opened)
{
    kvs_err err = {0};
    sink s;

    sink_init(&s);
    stub_fail(&dev, STUB_OPEN, 1, KVS_E_DEVICE);
    m = NULL;
    cr_assert_eq(mover_create(&m, &dev.dev, DEVICE_LOAD, sink_face(&s), &err), KVS_E_DEVICE);
    cr_assert_str_eq(err.msg, "queue_open 1: planned failure");
    cr_assert_null(m);
    cr_assert_eq(mover_create(&m, &dev.dev, DEVICE_COMPUTE, sink_face(&s), &err), KVS_E_INVALID);
    mover_destroy(m);
    sink_fini(&s);
}

/* Batches of one block; the copy or the wait of batch `nth` of 4 fails. */
static void fail_one(enum stub_call call, unsigned nth)
{
    task *k;

    stub_fail(&dev, call, nth, KVS_E_DEVICE);
    start(DEVICE_STORE, false, BATCH_PLANES, SMALL_PAGE);
    k = make(0, 0, 4);
    k->job.checksum = true;
    k->job.job.signal_by_worker = true;
    k->job.job.signal_counter = 1;
    k->job.job.signal_value = 5;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    for (uint32_t i = 0; i < 4; i++) {
        cr_assert_eq(k->items[i].status, i + 1 == nth ? KVS_E_DEVICE : KVS_OK);
        if (i + 1 != nth)
            cr_assert_eq(k->items[i].checksum, sum_of(i));
    }
    cr_assert_eq(k->job.job.status, KVS_E_DEVICE);
    cr_assert(strstr(k->job.job.err.msg, "planned failure") != NULL);
    cr_assert_not(k->job.job.signalled, "a failure is signalled by the loop, which knows the final status");
    cr_assert_eq(signalled(1), 0);
    end();
}

Test(mover, fails_only_the_items_of_a_batch_that_was_not_queued_first)
{
    fail_one(STUB_COPY, 1);
}

Test(mover, fails_only_the_items_of_a_batch_that_was_not_queued_last)
{
    fail_one(STUB_COPY, 4);
}

Test(mover, fails_only_the_items_of_a_batch_whose_wait_failed)
{
    fail_one(STUB_WAIT, 2);
}

Test(mover, leaves_the_rest_of_a_failed_block_alone)
{
    task *k;

    stub_fail(&dev, STUB_WAIT, 2, KVS_E_DEVICE);
    start(DEVICE_STORE, false, 3 * BATCH_PLANES, SMALL_PAGE);
    k = make(0, 0, 2);
    k->job.checksum = true;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->items[0].status, KVS_E_DEVICE);
    cr_assert_eq(k->items[0].checksum, 0);
    cr_assert_eq(k->items[1].status, KVS_OK);
    cr_assert_eq(k->items[1].checksum, sum_of(1), "the failed block's bytes are in the next one's sum");
    cr_assert_eq(stub_count(&dev, STUB_COPY), 5);
    end();
}

static void lose(enum stub_call call)
{
    unsigned copies;

    stub_fail(&dev, call, 2, KVS_E_DEVICE_LOST);
    start(DEVICE_LOAD, false, BATCH_PLANES, SMALL_PAGE);
    submit(make(0, 0, 4));
    cr_assert(sink_run_until(&done, 1));
    for (uint32_t i = 0; i < 4; i++)
        cr_assert_eq(tasks[0].items[i].status, KVS_E_DEVICE_LOST);
    cr_assert_eq(tasks[0].job.job.status, KVS_E_DEVICE_LOST);
    copies = stub_count(&dev, STUB_COPY);
    submit(make(1, 0, 2));
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(tasks[1].job.job.status, KVS_E_DEVICE_LOST);
    cr_assert_eq(tasks[1].items[1].status, KVS_E_DEVICE_LOST);
    cr_assert(strstr(tasks[1].job.job.err.msg, "lost before") != NULL);
    cr_assert_eq(stub_count(&dev, STUB_COPY), copies, "a lost device was called again");
    end();
}

Test(mover, fails_everything_when_the_device_is_lost_at_submit)
{
    lose(STUB_COPY);
}

Test(mover, fails_everything_when_the_device_is_lost_at_wait)
{
    lose(STUB_WAIT);
}

Test(mover, shows_a_swallowed_completion_and_other_movers_go_on)
{
    mover *other;
    mover_stats s;
    kvs_err err;

    start(DEVICE_STORE, true, PLANES, PAGE);
    cr_assert_eq(mover_create(&other, &dev.dev, DEVICE_STORE, sink_face(&done), &err), KVS_OK);
    mover_get_stats(m, &s);
    cr_assert_eq(s.oldest_us, 0);
    stub_hold(&dev, 1);
    submit(make(0, 0, 1));
    stub_await_held(&dev);
    submit(make(1, 1, 1));
    mover_submit(other, &make(2, 2, 1)->job);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(tasks[2].place, 1);
    do
        mover_get_stats(m, &s);
    while (s.oldest_us < 3000 || beat_oldest(BEAT_IN_CALL).us < 3000); /* both grow for as long as it hangs */
    cr_assert_str_eq(beat_oldest(BEAT_IN_CALL).name, "kvs-store",
                     "it hangs in the device, which is no reason to restart");
    cr_assert_geq(beat_oldest(BEAT_IN_CALL).us, 3000);
    for (uint64_t end = thread_now_us() + 20000000; beat_oldest(BEAT_RUNNING).name != NULL;) /* the other one parks */
        cr_assert_lt(thread_now_us(), end, "%s hangs in our own code", beat_oldest(BEAT_RUNNING).name);
    cr_assert_eq(s.queued, 1);
    cr_assert_eq(s.jobs, 0);
    mover_get_stats(other, &s);
    cr_assert_eq(s.oldest_us, 0);
    cr_assert_eq(s.blocks, 1);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 3));
    mover_get_stats(m, &s);
    cr_assert_eq(s.oldest_us, 0);
    cr_assert_eq(s.queued, 0);
    cr_assert_eq(s.jobs, 2);
    cr_assert_eq(s.bytes, 2 * BLOCK);
    cr_assert_geq(s.busy_us, 3000);
    mover_destroy(other);
    end();
}

/* On a device whose bytes come with the wait: a sum or a signal before it would see the old ones. */
Test(mover, sums_and_signals_what_a_slow_device_has_brought)
{
    kvs_err err = {0};
    device *cpu, *slow;
    mover *real;
    task *k;

    cr_assert_eq(device_cpu_open(&cpu, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(fault_device_open(cpu, &slow, &err), KVS_OK, "%s", err.msg);
    fault_device_set_lazy(slow, true);
    fault_device_plan(slow, &(fault_plan){.call = FAULT_WAIT, .action = FAULT_DELAY, .nth = 1, .delay_us = 2000});
    start(DEVICE_STORE, true, PLANES, PAGE);
    cr_assert_eq(mover_create(&real, slow, DEVICE_STORE, sink_face(&done), &err), KVS_OK, "%s", err.msg);
    k = make(0, 0, 2);
    k->job.checksum = true;
    k->job.job.signal_by_worker = true;
    k->job.job.signal_counter = 0;
    k->job.job.signal_value = 1;
    mover_submit(real, &k->job);
    while (signalled(0) == 0)
        sched_yield();
    cr_assert(same_block(0, 0) && same_block(1, 1), "the counter came before the bytes");
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->items[1].checksum, sum_of(1));
    mover_destroy(real);
    slow->ops->close(slow);
    end();
}

/* --- order, drops, counters
 * -------------------------------------------------------------------------------------- */

Test(mover, runs_due_jobs_in_submit_order)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    stub_hold(&dev, 1);
    submit(make(0, 0, 1));
    stub_await_held(&dev);
    for (unsigned t = 1; t < 20; t++)
        submit(make(t, t % SLOTS, 1));
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 20));
    for (unsigned t = 0; t < 20; t++)
        cr_assert_eq(tasks[t].place, t + 1);
    end();
}

static task *of_tenant(task *k, uint32_t tenant)
{
    k->job.job.tenant = tenant;
    return k;
}

/* Submit while the first wait hangs, so that everything is ready when the next turn is given. */
static void begin_held(void)
{
    stub_hold(&dev, 1);
    start(DEVICE_LOAD, true, PLANES, PAGE);
    submit(of_tenant(make(0, 0, 1), 3));
    stub_await_held(&dev);
}

Test(mover, lets_a_block_of_one_tenant_wait_for_one_turn_of_another)
{
    enum { LONG = 40 };

    begin_held();
    for (unsigned i = 1; i <= LONG; i++)
        submit(of_tenant(make(i, 0, SLOTS), 1));
    submit(of_tenant(make(LONG + 1, 0, 1), 2));
    stub_release(&dev);
    cr_assert(sink_run_until(&done, LONG + 2));
    cr_assert_leq(tasks[LONG + 1].place, 2, "40 jobs of the other were there before it, it came as number %u",
                  tasks[LONG + 1].place);
    cr_assert_leq(dev.batch_copies[1], 2, "a short turn, while somebody waits");
    cr_assert_eq(tasks[LONG].place, LONG + 2, "in order among themselves");
    for (unsigned i = 1; i <= LONG; i++)
        for (unsigned k = 0; k < SLOTS; k++)
            cr_assert_eq(tasks[i].items[k].status, KVS_OK);
    end();
}

Test(mover, shares_the_link_between_tenants_by_weight)
{
    enum { JOBS = 20 };

    begin_held();
    mover_share(m, 1, 300);
    mover_share(m, 2, 100);
    for (unsigned i = 0; i < JOBS; i++) {
        submit(of_tenant(make(1 + i, 0, 6), 1));
        submit(of_tenant(make(1 + JOBS + i, 0, 2), 2));
    }
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1 + 2 * JOBS));
    for (unsigned i = 0; i < JOBS; i++) { /* three times the blocks in the same time: the two keep step */
        cr_assert_geq(tasks[1 + i].place, 2 * i + 1, "job %u came as %u", i, tasks[1 + i].place);
        cr_assert_leq(tasks[1 + i].place, 2 * i + 5, "job %u came as %u", i, tasks[1 + i].place);
    }
    end();
}

Test(mover, gives_nothing_extra_for_a_pause)
{
    enum { JOBS = 30 };

    begin_held();
    for (unsigned i = 0; i < JOBS; i++)
        submit(of_tenant(make(1 + i, 0, 2), 1));
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1 + JOBS)); /* tenant 1 has had much, tenant 2 nothing: that is over */
    stub_hold(&dev, stub_count(&dev, STUB_WAIT) + 1);
    submit(of_tenant(make(0, 0, 1), 1));
    stub_await_held(&dev);
    n_done = 0;
    for (unsigned i = 0; i < JOBS; i++) {
        submit(of_tenant(make(1 + i, 0, 2), 2));
        submit(of_tenant(make(1 + JOBS + i, 0, 2), 1));
    }
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 2 + 3 * JOBS));
    cr_assert_leq(tasks[1 + JOBS].place, 6, "its first job came as number %u", tasks[1 + JOBS].place);
    end();
}

Test(mover, lets_jobs_overtake_one_whose_counter_is_late)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    submit(waiting(make(0, 0, 1), 4, 10));
    for (unsigned t = 1; t < 4; t++)
        submit(make(t, t, 1));
    cr_assert(sink_run_until(&done, 3));
    cr_assert_eq(tasks[0].place, 0);
    reach(4, 9);
    submit(make(4, 4, 1));
    cr_assert(sink_run_until(&done, 4));
    cr_assert_eq(tasks[0].place, 0);
    reach(4, 10);
    cr_assert(sink_run_until(&done, 5));
    cr_assert_eq(tasks[0].place, 5);
    cr_assert_eq(tasks[0].job.job.status, KVS_OK);
    cr_assert(same_block(0, 0));
    end();
}

Test(mover, runs_late_jobs_before_younger_ones_once_they_are_due)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    submit(waiting(make(0, 0, 1), 0, 1));
    submit(waiting(make(1, 0, 1), 1, 1));
    stub_hold(&dev, 1);
    submit(make(2, 0, 1));
    stub_await_held(&dev);
    submit(make(3, 0, 1));
    reach(1, 1);
    reach(0, 1);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 4));
    cr_assert_eq(tasks[2].place, 1);
    cr_assert_eq(tasks[0].place, 2);
    cr_assert_eq(tasks[1].place, 3);
    cr_assert_eq(tasks[3].place, 4);
    end();
}

/* More stuck jobs than one look covers: a stopped client holds up neither others nor a job of its own that is
 * due. */
Test(mover, is_not_held_up_by_a_client_that_never_reaches_its_counters)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    for (unsigned t = 0; t < 500; t++)
        submit(waiting(make(t, 0, 1), t % 256, UINT64_MAX));
    submit(waiting(make(500, 1, 1), 255, 3));
    for (unsigned t = 501; t < 550; t++)
        submit(make(t, 2, 1));
    cr_assert(sink_run_until(&done, 49));
    reach(255, 3);
    cr_assert(sink_run_until(&done, 50));
    cr_assert_eq(tasks[500].place, 50);
    mover_destroy(m);
    m = NULL;
    cr_assert(sink_run_until(&done, 550));
    cr_assert_eq(tasks[0].job.job.status, KVS_E_CANCELLED);
    end();
}

Test(mover, gives_back_a_dropped_job_untouched)
{
    task *k;

    start(DEVICE_STORE, true, PLANES, PAGE);
    k = waiting(make(0, 0, 2), 0, 1);
    submit(k);
    cr_assert(mover_drop(m, &k->job));
    mover_kick(m);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->job.job.status, KVS_E_CANCELLED);
    cr_assert_eq(k->job.job.err.status, KVS_E_CANCELLED);
    cr_assert_eq(k->items[0].status, KVS_E_CANCELLED);
    cr_assert_eq(k->items[1].status, KVS_E_CANCELLED);
    cr_assert_eq(stub_count(&dev, STUB_COPY), 0);
    end();
}

/* A client's death waits for its jobs: they must not stand behind the queue of the others. */
Test(mover, gives_back_a_dropped_job_before_the_queue_ahead_of_it)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    stub_hold(&dev, 1);
    submit(make(0, 0, 1));
    stub_await_held(&dev);
    submit(make(1, 1, 1));
    submit(make(2, 2, 1));
    submit(waiting(make(3, 3, 1), 0, 1));
    cr_assert(mover_drop(m, &tasks[2].job));
    cr_assert(mover_drop(m, &tasks[3].job));
    mover_kick(m);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 4));
    cr_assert_eq(tasks[2].place, 2);
    cr_assert_eq(tasks[3].place, 3);
    cr_assert_eq(tasks[1].place, 4);
    cr_assert_eq(tasks[1].job.job.status, KVS_OK);
    end();
}

Test(mover, stops_between_batches)
{
    task *k;

    start(DEVICE_STORE, false, BATCH_PLANES, SMALL_PAGE);
    stub_hold(&dev, 2);
    k = make(0, 0, 4);
    submit(k);
    stub_await_held(&dev);
    cr_assert_not(mover_drop(m, &k->job));
    atomic_store(&k->job.job.stop, true);
    mover_kick(m);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->job.job.status, KVS_E_CANCELLED);
    cr_assert_eq(k->items[0].status, KVS_OK);
    cr_assert_eq(k->items[1].status, KVS_OK, "what was submitted is drained");
    cr_assert_eq(k->items[2].status, KVS_E_CANCELLED);
    cr_assert_eq(k->items[3].status, KVS_E_CANCELLED);
    cr_assert_str_eq(k->job.job.err.msg, "stopped at item 2 of 4");
    end();
}

Test(mover, cancels_a_block_that_a_stop_cuts)
{
    task *k;

    start(DEVICE_STORE, false, 3 * BATCH_PLANES, SMALL_PAGE);
    stub_hold(&dev, 2);
    k = make(0, 0, 1);
    k->job.checksum = true;
    submit(k);
    stub_await_held(&dev);
    atomic_store(&k->job.job.stop, true);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->items[0].status, KVS_E_CANCELLED);
    cr_assert_eq(k->items[0].checksum, 0);
    end();
}

Test(mover, signals_before_the_loop_hears_of_it)
{
    task *k;

    start(DEVICE_LOAD, true, PLANES, PAGE);
    k = make(0, 0, 1);
    k->job.job.signal_by_worker = true;
    k->job.job.signal_counter = 200;
    k->job.job.signal_value = 3;
    submit(k);
    while (signalled(200) == 0) /* what a client's stream does */
        sched_yield();
    cr_assert(same_block(0, 0), "the counter came before the bytes");
    cr_assert(sink_run_until(&done, 1));
    cr_assert(k->job.job.signalled);
    cr_assert_eq(signalled(200), 3);
    end();
}

Test(mover, leaves_the_signal_to_the_loop_where_the_job_says_so)
{
    task *k;

    start(DEVICE_STORE, true, PLANES, PAGE);
    k = make(0, 0, 1);
    k->job.job.signal_counter = 200;
    k->job.job.signal_value = 3;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(signalled(200), 0);
    job_signal(&k->job.job, k->job.job.status);
    cr_assert_eq(signalled(200), 3);
    end();
}

Test(mover, posts_everything_before_destroy_returns)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    stub_hold(&dev, 1);
    submit(make(0, 0, 1));
    stub_await_held(&dev);
    submit(waiting(make(1, 1, 1), 0, 1));
    submit(make(2, 2, 1));
    stub_release(&dev);
    mover_destroy(m);
    m = NULL;
    cr_assert_eq(sink_posted(&done), 3);
    cr_assert(sink_run_until(&done, 3));
    cr_assert_eq(tasks[0].job.job.status, KVS_OK, "what runs is waited for");
    cr_assert_eq(tasks[1].job.job.status, KVS_E_CANCELLED);
    end();
}

/* Wake-ups of the whole process in a stretch of `ms`: they show as voluntary context switches. */
static long wake_ups(unsigned ms)
{
    struct timespec t = {ms / 1000, (long)(ms % 1000) * 1000000};
    struct rusage before, after;

    (void)getrusage(RUSAGE_SELF, &before);
    (void)nanosleep(&t, NULL);
    (void)getrusage(RUSAGE_SELF, &after);
    return after.ru_nvcsw - before.ru_nvcsw;
}

Test(mover, sleeps_while_nothing_waits)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    submit(make(0, 0, 1));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_leq(wake_ups(300), 5);
    end();
}

/* Where a device is fast, a thread looks out for the next job first. */
Test(mover, sleeps_soon_after_a_job_of_a_fast_device)
{
    dev.ops.depth = 2;
    start(DEVICE_LOAD, true, PLANES, PAGE);
    submit(make(0, 0, 1));
    cr_assert(sink_run_until(&done, 1));
    (void)wake_ups(100);
    cr_assert_leq(wake_ups(300), 5);
    end();
}

/* A client whose requests are refused, each after it has been announced: the thread neither sleeps nor works. */
Test(mover, shows_that_it_lives_while_it_looks_out_for_jobs_that_never_come)
{
    uint64_t until, oldest = 0;

    dev.ops.depth = 2;
    start(DEVICE_LOAD, true, PLANES, PAGE);
    for (until = thread_now_us() + 400000; thread_now_us() < until; thread_relax()) {
        uint64_t us = beat_oldest(BEAT_RUNNING).us;

        oldest = us > oldest ? us : oldest;
        mover_expect(m);
    }
    cr_assert_lt(oldest, 200000, "the watchdog would take it for hung");
    end();
}

Test(mover, looks_at_a_stuck_counter_at_most_a_thousand_times_a_second)
{
    start(DEVICE_STORE, true, PLANES, PAGE);
    submit(waiting(make(0, 0, 1), 0, 1));
    submit(make(1, 1, 1));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_leq(wake_ups(300), 330);
    end();
}

/* --- twins ------------------------------------------------------------------------------------------------- */

/* Job 0, of tenant 0, has a twin that has taken all and lands nothing; job 1 is somebody's. */
static void beside_one_that_hopes(uint32_t tenant)
{
    static uint32_t order[2 * SLOTS];
    twin *t = twin_create(SLOTS, 1);
    const uint8_t *at;
    uint32_t block;
    task *k;

    dev.ops.depth = 2;
    start(DEVICE_LOAD, true, PLANES, PAGE);
    for (uint32_t i = 0; i < SLOTS; i++)
        twin_place(t, 0, i, gpu + i * BLOCK);
    cr_assert(twin_join(t));
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert(twin_take(t, 1, TWIN_FROM_HOST, &block, &at));
    k = waiting(make(0, 0, SLOTS), 1, 7);
    k->job.twin = t;
    k->job.order = order;
    submit(k);
    submit(of_tenant(waiting(make(1, 0, 2), 1, 7), tenant));
    reach(1, 7);
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(tasks[0].job.job.status, KVS_OK);
    cr_assert_eq(dev.batch_bytes[0], 2 * BLOCK, "the second one's");
    for (uint32_t i = 0; i < SLOTS; i++)
        cr_assert(same_block(i, i));
    twin_unref(t);
}

/* Symptom: the link stood still while a load waited for what its twin was about to land. */
Test(mover, a_load_that_waits_for_its_twin_leaves_the_link_to_the_next)
{
    beside_one_that_hopes(0);
    end();
}

Test(mover, a_load_that_waits_for_its_twin_holds_up_no_other_tenant)
{
    beside_one_that_hopes(2);
    cr_assert_eq(tasks[1].place, 1, "it is there before the other one has given up");
    end();
}
