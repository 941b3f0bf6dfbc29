/* Decoder under TSan: jobs that chain through the daemon's counters, dropped and stopped while they run. */
#include <stdalign.h>
#include <stdio.h>
#include <stdlib.h>

#include "daemon/decoder.h"
#include "tests/support/sink.h"
#include "tests/support/stub_device.h"

enum { ROUNDS = 100, JOBS = 48, CALLS = 3 };

typedef struct task {
    decoder_job job; /* first */
    decoder_call calls[CALLS];
    unsigned done;
} task;

static alignas(4096) uint8_t counters[WIRE_COUNTER_PAGE_BYTES];
static task tasks[JOBS];

/* The loop signals what the worker did not: failed and dropped jobs release those behind them. */
static void on_done(work *w)
{
    task *k = (task *)(void *)w;

    k->done++;
    job_signal(&k->job.job, k->job.job.status);
}

static void prepare(unsigned t, uint64_t base)
{
    task *k = &tasks[t];

    *k = (task){.job = {.calls = k->calls, .n_calls = CALLS}};
    job_init(&k->job.job, on_done);
    k->job.job.counters = counters;
    k->job.job.signal_by_worker = true;
    k->job.job.signal_counter = 0;
    k->job.job.signal_value = base + t + 1;
    if (t > 0) {
        k->job.job.after_counter = 0 | WIRE_COUNTER_DAEMON;
        k->job.job.after_value = base + t;
    }
    for (unsigned i = 0; i < CALLS; i++)
        k->calls[i].kind = i == 0 ? DECODER_WRITE : DECODER_DECODE;
}

/* Two decoders pass the baton; a random job is dropped or stopped now and then. */
static unsigned one_round(stub_device *dev, uint64_t base)
{
    decoder *d[2];
    sink done;
    kvs_err err;
    unsigned wrong = 0;

    sink_init(&done);
    for (int i = 0; i < 2; i++)
        if (decoder_create(&d[i], &dev->dev, sink_face(&done), &err) != KVS_OK)
            abort();
    for (unsigned t = JOBS; t-- > 0;) {
        prepare(t, base);
        decoder_submit(d[t % 2], &tasks[t].job);
    }
    for (unsigned n = 0; n < JOBS / 8; n++) {
        unsigned t = (unsigned)rand() % JOBS;
        decoder_stats s;

        if (!decoder_drop(d[t % 2], &tasks[t].job))
            atomic_store(&tasks[t].job.job.stop, true);
        decoder_kick(d[t % 2]);
        decoder_get_stats(d[t % 2], &s);
        wrong += !sink_run_until(&done, n);
    }
    wrong += !sink_run_until(&done, JOBS);
    for (int i = 0; i < 2; i++)
        decoder_destroy(d[i]);
    for (unsigned t = 0; t < JOBS; t++)
        wrong += tasks[t].done != 1;
    sink_fini(&done);
    return wrong;
}

int main(void)
{
    static stub_device dev;
    unsigned passed = 0, failed = 0;

    stub_init(&dev);
    for (uint64_t r = 0; r < ROUNDS; r++) {
        unsigned wrong = one_round(&dev, r * (JOBS + 1));

        passed += wrong == 0;
        failed += wrong != 0;
    }
    failed += dev.open_queues != 0;
    stub_fini(&dev);
    printf("%u passed, %u failed\n", passed, failed);
    return failed != 0;
}
