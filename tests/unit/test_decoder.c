#include "daemon/decoder.h"

#include <criterion/criterion.h>
#include <stdalign.h>
#include <string.h>

#include "tests/support/sink.h"
#include "tests/support/stub_device.h"

enum { MAX_CALLS = 4, MAX_JOBS = 8 };

static alignas(4096) uint8_t counters[WIRE_COUNTER_PAGE_BYTES];
static stub_device dev;
static sink done;
static decoder *d;

typedef struct task {
    decoder_job job; /* first */
    decoder_call calls[MAX_CALLS];
    unsigned place; /* order of completion, from 1 */
} task;

static task tasks[MAX_JOBS];
static unsigned n_done;

static void on_done(work *w)
{
    ((task *)(void *)w)->place = ++n_done;
}

static void setup(void)
{
    kvs_err err = {0};

    stub_init(&dev);
    sink_init(&done);
    cr_assert_eq(decoder_create(&d, &dev.dev, sink_face(&done), &err), KVS_OK, "%s", err.msg);
}

static void teardown(void)
{
    decoder_destroy(d);
    cr_assert_eq(dev.open_queues, 0);
    sink_fini(&done);
    stub_fini(&dev);
}

TestSuite(decoder, .init = setup, .fini = teardown);

/* Write, decode, write, extend: parts 10, 11, ... so that a result tells its call. */
static task *make(unsigned t, uint32_t n)
{
    task *k = &tasks[t];

    *k = (task){.job = {.calls = k->calls, .n_calls = n}};
    job_init(&k->job.job, on_done);
    k->job.job.counters = counters;
    k->job.job.signal_by_worker = true;
    k->job.job.signal_counter = t;
    k->job.job.signal_value = 1;
    for (uint32_t i = 0; i < n; i++) {
        k->calls[i].kind = i % 2 == 0 ? DECODER_WRITE : i % 4 == 1 ? DECODER_DECODE : DECODER_EXTEND;
        if (i % 4 == 1)
            k->calls[i].args.decode.parts = 10 + i;
        if (i % 4 == 3)
            k->calls[i].args.extend.parts = 10 + i;
    }
    return k;
}

static void submit(task *k)
{
    decoder_submit(d, &k->job);
}

static uint64_t signalled(unsigned t)
{
    return atomic_load((_Atomic uint64_t *)(void *)(counters + 4096 + t * 16));
}

Test(decoder, runs_calls_in_order_and_signals)
{
    task *k = make(0, 4);
    decoder_stats s;

    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->job.job.status, KVS_OK);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(k->calls[i].status, KVS_OK);
    cr_assert_eq(k->calls[1].result.parts, 11);
    cr_assert_eq(k->calls[3].result.parts, 13);
    cr_assert_eq(k->calls[1].result.kernel, KVS_KERNEL_MLA_DECODE_C);
    cr_assert_eq(k->calls[3].result.kernel, KVS_KERNEL_MLA_EXTEND_C);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), 4);
    cr_assert_eq(signalled(0), 1);
    decoder_get_stats(d, &s);
    cr_assert_eq(s.jobs, 1);
    cr_assert_eq(s.calls, 4);
    cr_assert_eq(s.failed, 0);
    cr_assert_eq(s.queued, 0);
}

/* The one call `nth` of its kind fails with an ordinary status; the others run. */
static void fail_one(enum stub_call call, unsigned nth, kvs_status status, unsigned failed)
{
    task *k = make(0, 4);
    decoder_stats s;

    stub_fail(&dev, call, nth, status);
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    for (unsigned i = 0; i < 4; i++)
        cr_assert_eq(k->calls[i].status, i == failed ? status : KVS_OK, "call %u", i);
    cr_assert_eq(k->job.job.status, status);
    cr_assert(strstr(k->job.job.err.msg, "planned failure") != NULL);
    cr_assert_eq(signalled(0), 0);
    cr_assert_not(k->job.job.signalled);
    decoder_get_stats(d, &s);
    cr_assert_eq(s.failed, 1);
}

Test(decoder, goes_on_behind_a_refused_write)
{
    fail_one(STUB_WRITE, 1, KVS_E_UNSUPPORTED, 0);
}

Test(decoder, goes_on_behind_a_refused_decode)
{
    fail_one(STUB_DECODE, 1, KVS_E_INVALID, 1);
}

Test(decoder, blames_the_call_whose_wait_failed)
{
    fail_one(STUB_WAIT, 3, KVS_E_DEVICE, 2);
}

Test(decoder, keeps_the_first_text_and_the_worst_status)
{
    task *k = make(0, 4);

    stub_fail(&dev, STUB_WRITE, 1, KVS_E_INVALID);
    stub_fail(&dev, STUB_EXTEND, 1, KVS_E_DEVICE);
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_str_eq(k->job.job.err.msg, "mla_write 1: planned failure");
    cr_assert_eq(k->job.job.status, KVS_E_DEVICE);
}

Test(decoder, says_range_where_entries_were_skipped)
{
    task *k = make(0, 2);

    dev.bad = 3;
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->calls[0].status, KVS_E_RANGE);
    cr_assert_eq(k->calls[1].status, KVS_E_RANGE);
    cr_assert_eq(k->calls[0].result.bad, 3);
    cr_assert_eq(k->calls[1].result.parts, 11, "the rest of the result stands");
    cr_assert_eq(k->job.job.status, KVS_E_RANGE);
    cr_assert_eq(signalled(0), 0, "a partial result was signalled as whole");
}

static void lose(enum stub_call call)
{
    unsigned waits;

    stub_fail(&dev, call, 1, KVS_E_DEVICE_LOST);
    submit(make(0, 4));
    cr_assert(sink_run_until(&done, 1));
    for (unsigned i = call == STUB_DECODE ? 1 : 0; i < 4; i++)
        cr_assert_eq(tasks[0].calls[i].status, KVS_E_DEVICE_LOST);
    cr_assert_eq(tasks[0].job.job.status, KVS_E_DEVICE_LOST);
    waits = stub_count(&dev, STUB_WAIT);
    submit(make(1, 1));
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(tasks[1].calls[0].status, KVS_E_DEVICE_LOST);
    cr_assert(strstr(tasks[1].job.job.err.msg, "lost before") != NULL);
    cr_assert_eq(stub_count(&dev, STUB_WAIT), waits);
    cr_assert_eq(stub_count(&dev, STUB_WRITE), 1, "a lost device was called again");
}

Test(decoder, calls_nothing_after_a_device_lost_at_a_call)
{
    lose(STUB_DECODE);
}

Test(decoder, calls_nothing_after_a_device_lost_at_a_wait)
{
    lose(STUB_WAIT);
}

Test(decoder, stops_between_calls)
{
    task *k = make(0, 4);

    stub_hold(&dev, 2);
    submit(k);
    stub_await_held(&dev);
    atomic_store(&k->job.job.stop, true);
    decoder_kick(d);
    stub_release(&dev);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->calls[1].status, KVS_OK, "what was submitted is drained");
    cr_assert_eq(k->calls[2].status, KVS_E_CANCELLED);
    cr_assert_eq(k->calls[3].status, KVS_E_CANCELLED);
    cr_assert_eq(k->job.job.status, KVS_E_CANCELLED);
    cr_assert_eq(stub_count(&dev, STUB_WRITE), 1);
}

Test(decoder, hands_its_flag_to_every_call_and_takes_the_end_of_one_that_was_stopped)
{
    task *k = make(0, 4);
    decoder_stats s;

    stub_fail(&dev, STUB_EXTEND, 1, KVS_E_CANCELLED);
    submit(k);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(k->calls[2].status, KVS_OK);
    cr_assert_eq(k->calls[3].status, KVS_E_CANCELLED);
    cr_assert_eq(k->job.job.status, KVS_E_CANCELLED);
    cr_assert_eq(signalled(0), 0);
    decoder_get_stats(d, &s);
    cr_assert_eq(s.failed, 0);
    cr_assert(!*k->calls[0].args.write.stop && !*k->calls[1].args.decode.stop && !*k->calls[3].args.extend.stop);
    atomic_store(&k->job.job.stop, true);
    cr_assert(*k->calls[0].args.write.stop && *k->calls[1].args.decode.stop && *k->calls[3].args.extend.stop);
}

Test(decoder, overtakes_and_drops_a_job_whose_counter_is_late)
{
    task *late = make(0, 2);

    late->job.job.after_counter = 7;
    late->job.job.after_value = 1;
    submit(late);
    submit(make(1, 2));
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(tasks[1].place, 1);
    cr_assert(decoder_drop(d, &late->job));
    decoder_kick(d);
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(late->job.job.status, KVS_E_CANCELLED);
    cr_assert_eq(late->calls[1].status, KVS_E_CANCELLED);
    cr_assert_eq(signalled(0), 0);
}

/* A chain on the daemon's own counter: the second job runs when the first has signalled. */
Test(decoder, chains_jobs_by_the_daemons_counters)
{
    task *second = make(1, 1);

    second->job.job.after_counter = 0 | WIRE_COUNTER_DAEMON;
    second->job.job.after_value = 1;
    submit(second);
    submit(make(0, 1));
    cr_assert(sink_run_until(&done, 2));
    cr_assert_eq(tasks[0].place, 1);
    cr_assert_eq(second->place, 2);
    cr_assert_eq(signalled(1), 1);
}

Test(decoder, posts_everything_before_destroy_returns)
{
    task *late = make(0, 1);

    late->job.job.after_counter = 1;
    late->job.job.after_value = 1;
    submit(late);
    decoder_destroy(d);
    d = NULL;
    cr_assert_eq(sink_posted(&done), 1);
    cr_assert(sink_run_until(&done, 1));
    cr_assert_eq(late->job.job.status, KVS_E_CANCELLED);
}

Test(decoder, reports_a_queue_that_cannot_be_opened)
{
    kvs_err err = {0};
    decoder *other = NULL;

    stub_fail(&dev, STUB_OPEN, 2, KVS_E_DEVICE);
    cr_assert_eq(decoder_create(&other, &dev.dev, sink_face(&done), &err), KVS_E_DEVICE);
    cr_assert_null(other);
    cr_assert_str_eq(err.msg, "queue_open 2: planned failure");
}
