#include "daemon/worker.h"

#include <criterion/criterion.h>
#include <stdalign.h>
#include <stdlib.h>

#include "daemon/thread.h"
#include "tests/support/sink.h"

/* The worker by itself, under jobs that do nothing.  What movers and decoders make of it is in their tests. */

enum { MANY = 100000 };

static alignas(4096) uint8_t counters[WIRE_COUNTER_PAGE_BYTES];
static sink done;
static worker *w;
static job *jobs;
static uint32_t n_run;

static kvs_status on_start(void *ud, kvs_err *err)
{
    (void)ud;
    (void)err;
    return KVS_OK;
}

static bool kicks; /* each job, as if another one had been dropped meanwhile */

static bool on_run(void *ud, job *j, bool shared, uint64_t *ret_bytes)
{
    (void)ud;
    (void)shared;
    (void)j;
    *ret_bytes = 1;
    n_run++;
    if (kicks)
        worker_kick(w);
    return true;
}

static void on_stop(void *ud)
{
    (void)ud;
}

static void on_done(work *x)
{
    (void)x;
}

static const worker_ops ops = {"kvs-test", on_start, on_run, on_stop, false};

static void setup(void)
{
    kvs_err err;

    sink_init(&done);
    jobs = calloc(MANY, sizeof *jobs);
    cr_assert_not_null(jobs);
    cr_assert_eq(worker_create(&w, &ops, NULL, sink_face(&done), &err), KVS_OK);
}

static void teardown(void)
{
    worker_destroy(w);
    sink_fini(&done);
    free(jobs);
}

TestSuite(worker, .init = setup, .fini = teardown);

/* Job i waits for that value of counter 0. */
static void submit(uint32_t i, uint64_t value)
{
    job_init(&jobs[i], on_done);
    jobs[i].counters = counters;
    jobs[i].after_counter = 0;
    jobs[i].after_value = value;
    worker_submit(w, &jobs[i]);
}

static void reach(uint64_t value)
{
    atomic_store((_Atomic uint64_t *)(void *)counters, value);
}

/* Symptom: each was put in its place by walking past all the others, for seconds in which other tenants waited. */
Test(worker, takes_up_many_jobs_that_become_due_together_at_once, .timeout = 120)
{
    uint64_t began;

    for (uint32_t i = 0; i < MANY; i++)
        submit(i, 1);
    began = thread_now_us();
    reach(1);
    cr_assert(sink_run_until(&done, MANY));
    cr_assert_lt(thread_now_us() - began, 5000000);
    cr_assert_eq(n_run, MANY);
}

/* Symptom: for each that was cancelled the thread walked past all that wait, while other tenants' jobs stood still. */
Test(worker, drops_one_of_many_without_a_look_at_the_others, .timeout = 120)
{
    enum { ROUNDS = 2000 };
    job other;
    uint64_t began;

    for (uint32_t i = 0; i < MANY; i++)
        submit(i, 1);
    began = thread_now_us();
    for (uint32_t i = 0; i < ROUNDS; i++) {
        cr_assert(worker_drop(w, &jobs[(uint64_t)i * 7919 % MANY]));
        cr_assert(worker_drop(w, &jobs[(uint64_t)i * 7919 % MANY]), "once more is fine");
        job_init(&other, on_done);
        other.tenant = 1;
        worker_submit(w, &other);
        cr_assert(sink_run_until(&done, 2 * i + 2));
    }
    cr_assert_lt(thread_now_us() - began, 4000000);
    cr_assert_eq(n_run, ROUNDS);
}

/* Some of them leave again, wherever they stand in the list. */
Test(worker, takes_up_late_jobs_in_order_though_others_were_dropped, .timeout = 120)
{
    enum { N = 3000 };
    uint32_t n_dropped = 0;

    for (uint32_t i = 0; i < N; i++)
        submit(i, i % 3 == 0 ? 1 : 2);
    reach(1);
    for (uint32_t i = 0; i < N; i += 7)
        n_dropped += worker_drop(w, &jobs[i]);
    cr_assert(sink_run_until(&done, (N + 2) / 3));
    reach(2);
    for (uint32_t i = 3; i < N; i += 5)
        n_dropped += worker_drop(w, &jobs[i]);
    cr_assert(sink_run_until(&done, N));
    cr_assert_geq(n_run, N - n_dropped);
    cr_assert_gt(n_dropped, 0);
    cr_assert_lt(n_run, N);
}

/* Symptom: for each job that was dropped all others were looked at, before anybody had a turn. */
Test(worker, goes_on_while_jobs_beside_very_many_are_dropped, .timeout = 120)
{
    enum { STUCK = 60000, TURNS = 10000 };
    uint64_t began;

    kicks = true;
    for (uint32_t i = 0; i < STUCK; i++)
        submit(i, 1);
    began = thread_now_us();
    for (uint32_t i = 0; i < TURNS; i++)
        submit(STUCK + i, 0);
    cr_assert(sink_run_until(&done, TURNS));
    cr_assert_lt(thread_now_us() - began, 5000000);
    cr_assert(worker_drop(w, &jobs[7]), "and it is found all the same");
    cr_assert(sink_run_until(&done, TURNS + 1));
    cr_assert_eq(jobs[7].status, KVS_E_CANCELLED);
}
