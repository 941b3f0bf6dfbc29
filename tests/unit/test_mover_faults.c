/* Each early return of the mover: every submit and every wait of a job fails, hangs or is late, by both means, in both
 * directions, with one and with two batches under way. */
#include "daemon/mover.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/sums.h"
#include "tests/support/fault_device.h"
#include "tests/support/random.h"
#include "tests/support/sink.h"

/* A block fills a batch to its last copy: so that batch k is block k. */
enum { BLOCKS = 4, PAGE = 16, ENGINE_PLANES = 256, KERNEL_PLANES = 1024 };

typedef struct world {
    device *d;
    mover *m;
    sink done;
    region_map *map;
    uint8_t *host, *dev, *before_host, *before_dev;
    mover_item items[BLOCKS];
    mover_job job;
    unsigned n_done;
    device_dir dir;
    bool by_kernel;
} world;

static void on_done(work *w)
{
    (void)w;
}

static region_map *one_tensor_a_layer(uint8_t *base, uint32_t planes)
{
    region_map *r = calloc(1, sizeof *r + planes * sizeof r->planes[0]);

    cr_assert_not_null(r);
    r->slot_bytes = (uint64_t)planes * PAGE;
    r->n_slots = BLOCKS;
    r->n_planes = planes;
    for (uint32_t p = 0; p < planes; p++)
        r->planes[p] = (region_plane){.base = base + (uint64_t)p * BLOCKS * PAGE,
                                      .stride = PAGE,
                                      .page_bytes = PAGE,
                                      .block_offset = (uint64_t)p * PAGE};
    return r;
}

static void begin(world *w, device_dir dir, uint32_t depth, bool by_kernel)
{
    uint32_t planes = by_kernel ? KERNEL_PLANES : ENGINE_PLANES;
    size_t bytes = (size_t)planes * PAGE * BLOCKS;
    mover_settings s = {.batch_bytes = MOVER_BATCH_BYTES};
    rnd r = {depth + 2 * by_kernel};
    device *cpu = NULL;

    *w = (world){.dir = dir, .by_kernel = by_kernel};
    w->host = malloc(4 * bytes);
    cr_assert_not_null(w->host);
    w->dev = w->host + bytes;
    w->before_host = w->dev + bytes;
    w->before_dev = w->before_host + bytes;
    rnd_bytes(&r, w->host, 2 * bytes);
    memcpy(w->before_host, w->host, 2 * bytes);
    w->map = one_tensor_a_layer(w->dev, planes);
    sink_init(&w->done);
    cr_assert_eq(device_cpu_open(&cpu, NULL), KVS_OK);
    cr_assert_eq(fault_device_open(cpu, &w->d, NULL), KVS_OK);
    fault_device_pretend(w->d, depth, true);
    cr_assert_eq(mover_create(&w->m, w->d, dir, sink_face(&w->done), NULL), KVS_OK);
    s.rules.n = by_kernel;
    s.rules.rules[0] = (route_rule){.below = UINT64_MAX, .idle = {DEVICE_BY_KERNEL, 8}, .busy = {DEVICE_BY_KERNEL, 8}};
    mover_set(w->m, &s);
}

static void finish(world *w)
{
    mover_destroy(w->m);
    w->d->ops->close(w->d);
    sink_fini(&w->done);
    free(w->map);
    free(w->host);
}

static void submit(world *w)
{
    w->job = (mover_job){.map = w->map, .items = w->items, .n_items = BLOCKS, .checksum = true};
    job_init(&w->job.job, on_done);
    for (uint32_t i = 0; i < BLOCKS; i++)
        w->items[i] = (mover_item){.host = w->host + i * w->map->slot_bytes, .slot = BLOCKS - 1 - i};
    mover_submit(w->m, &w->job);
}

static void await(world *w)
{
    cr_assert(sink_run_until(&w->done, ++w->n_done));
}

/* Block i is where it was sent, from what was there before. */
static bool arrived(const world *w, uint32_t i)
{
    uint64_t block = w->map->slot_bytes;
    bool load = w->dir == DEVICE_LOAD;
    const uint8_t *host = load ? w->before_host : w->host, *dev = load ? w->dev : w->before_dev;

    for (uint32_t p = 0; p < w->map->n_planes; p++)
        if (memcmp(host + i * block + (uint64_t)p * PAGE, dev + ((uint64_t)p * BLOCKS + w->items[i].slot) * PAGE,
                   PAGE) != 0)
            return false;
    return load || w->items[i].checksum == sums_one(w->host + i * block, block);
}

static void expect_blocks(const world *w, uint32_t failed)
{
    for (uint32_t i = 0; i < BLOCKS; i++) {
        cr_assert_eq(w->items[i].status, i == failed ? KVS_E_DEVICE : KVS_OK, "block %u", i);
        if (i != failed)
            cr_assert(arrived(w, i), "block %u", i);
    }
    cr_assert_eq(w->job.job.status, failed < BLOCKS ? KVS_E_DEVICE : KVS_OK);
}

static void fail_and_go_on(world *w, fault_call call, uint64_t nth)
{
    fault_device_plan(w->d, &(fault_plan){call, FAULT_FAIL, nth, 1, KVS_E_DEVICE, 0});
    submit(w);
    await(w);
    expect_blocks(w, (uint32_t)nth - 1);
    fault_device_clear(w->d, call);
    submit(w);
    await(w);
    expect_blocks(w, BLOCKS);
}

static void be_late(world *w, fault_call call, uint64_t nth)
{
    fault_device_set_lazy(w->d, true);
    fault_device_plan(w->d, &(fault_plan){call, FAULT_DELAY, nth, 1, KVS_OK, 500});
    submit(w);
    await(w);
    expect_blocks(w, BLOCKS);
}

static void hang(world *w, fault_call call, uint64_t nth, kvs_status then)
{
    fault_device_plan(w->d, &(fault_plan){call, FAULT_SWALLOW, nth, 1, then, 0});
    submit(w);
    fault_device_await_held(w->d, 1);
    cr_assert_eq(sink_posted(&w->done), 0, "answered while the device still has it");
    fault_device_release(w->d);
    await(w);
    expect_blocks(w, then == KVS_OK ? BLOCKS : (uint32_t)nth - 1);
}

static void lose(world *w, fault_call call, uint64_t nth)
{
    uint64_t copies, waits;

    fault_device_plan(w->d, &(fault_plan){call, FAULT_FAIL, nth, 1, KVS_E_DEVICE_LOST, 0});
    submit(w);
    await(w);
    copies = fault_device_calls(w->d, FAULT_COPY);
    waits = fault_device_calls(w->d, FAULT_WAIT);
    for (int again = 0; again < 2; again++) {
        cr_assert_eq(w->job.job.status, KVS_E_DEVICE_LOST);
        for (uint32_t i = 0; i < BLOCKS; i++)
            cr_assert_eq(w->items[i].status, KVS_E_DEVICE_LOST, "block %u", i);
        submit(w);
        await(w);
    }
    cr_assert_eq(fault_device_calls(w->d, FAULT_COPY), copies, "a lost device was asked again");
    cr_assert_eq(fault_device_calls(w->d, FAULT_WAIT), waits, "a lost device was asked again");
}

enum misfortune { FAILS, HANGS, HANGS_AND_FAILS, IS_LATE, IS_LOST };

/* Every one of the submits and waits of a job in turn. */
static void at_every_call(enum misfortune what)
{
    for (unsigned k = 0; k < 16; k++)
        for (uint64_t nth = 1; nth <= BLOCKS; nth++) {
            fault_call call = k & 8 ? FAULT_WAIT : FAULT_COPY;
            world w;

            begin(&w, k & 1 ? DEVICE_STORE : DEVICE_LOAD, k & 2 ? 2 : 1, (k & 4) != 0);
            if (what == FAILS)
                fail_and_go_on(&w, call, nth);
            else if (what == IS_LATE)
                be_late(&w, call, nth);
            else if (what == IS_LOST)
                lose(&w, call, nth);
            else
                hang(&w, call, nth, what == HANGS ? KVS_OK : KVS_E_DEVICE);
            cr_assert_eq(fault_device_by_kernel(w.d) > 0, w.by_kernel);
            finish(&w);
        }
}

Test(mover_faults, a_call_that_fails_costs_its_own_block)
{
    at_every_call(FAILS);
}

Test(mover_faults, a_call_that_hangs_answers_nothing_before_it_returns)
{
    at_every_call(HANGS);
}

Test(mover_faults, a_call_that_hangs_and_fails_costs_its_own_block)
{
    at_every_call(HANGS_AND_FAILS);
}

Test(mover_faults, a_call_that_is_late_costs_nothing)
{
    at_every_call(IS_LATE);
}

Test(mover_faults, a_lost_device_costs_everything_and_is_not_asked_again)
{
    at_every_call(IS_LOST);
}
