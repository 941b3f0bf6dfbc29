#include "daemon/decoder.h"

#include <inttypes.h>
#include <stdlib.h>

#include "daemon/beat.h"
#include "daemon/worker.h"

struct decoder {
    worker *worker;
    device *dev;
    device_queue *queue;
    bool lost; /* the thread's: the device has said so once */
    _Atomic uint64_t calls;
};

static kvs_status run_call(decoder *d, decoder_call *c, const bool *stop, kvs_err *err)
{
    const device_ops *ops = d->dev->ops;
    uint64_t mark;
    kvs_status s;

    beat_mark(BEAT_IN_CALL);
    switch (c->kind) {
    case DECODER_WRITE:
        c->args.write.stop = stop;
        s = ops->mla_write(d->queue, &c->args.write, &c->result.bad, &mark, err);
        break;
    case DECODER_DECODE:
        c->args.decode.stop = stop;
        s = ops->mla_decode(d->queue, &c->args.decode, &c->result, &mark, err);
        break;
    case DECODER_EXTEND:
        c->args.extend.stop = stop;
        s = ops->mla_extend(d->queue, &c->args.extend, &c->result, &mark, err);
        break;
    default:
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "call of kind %d", (int)c->kind);
        break;
    }
    if (s == KVS_OK)
        s = ops->wait(d->queue, mark, err);
    beat_mark(BEAT_RUNNING);
    return s;
}

static void fail_from(decoder *d, decoder_job *j, uint32_t first, const kvs_err *err)
{
    d->lost = true;
    for (uint32_t i = first; i < j->n_calls; i++)
        j->calls[i].status = KVS_E_DEVICE_LOST;
    job_note(&j->job, KVS_E_DEVICE_LOST, err);
}

static void decoder_run(void *ud, job *base)
{
    decoder *d = ud;
    decoder_job *j = (decoder_job *)(void *)base;
    kvs_err err = {.status = KVS_OK};

    if (d->lost)
        (void)kvs_fail(&err, KVS_E_DEVICE_LOST, "device %s was lost before", d->dev->ops->name);
    for (uint32_t i = 0; i < j->n_calls; i++) {
        decoder_call *c = &j->calls[i];

        if (atomic_load_explicit(&base->stop, memory_order_relaxed)) {
            job_note(base, kvs_fail(&err, KVS_E_CANCELLED, "stopped at call %" PRIu32 " of %" PRIu32, i, j->n_calls),
                     &err);
            return;
        }
        c->status = d->lost ? KVS_E_DEVICE_LOST : run_call(d, c, job_stop_flag(base), &err);
        if (c->status == KVS_E_DEVICE_LOST) {
            fail_from(d, j, i, &err);
            return;
        }
        (void)atomic_fetch_add_explicit(&d->calls, 1, memory_order_relaxed);
        /* The counter must not say that a result is whole when tokens of it were left out. */
        if (c->status == KVS_OK && c->result.bad > 0)
            c->status = kvs_fail(&err, KVS_E_RANGE, "call %" PRIu32 ": %" PRIu32 " ids or lengths were out of range", i,
                                 c->result.bad);
        job_note(base, c->status, &err);
    }
}

static kvs_status decoder_start(void *ud, kvs_err *err)
{
    decoder *d = ud;

    return d->dev->ops->queue_open(d->dev, DEVICE_COMPUTE, &d->queue, err);
}

static void decoder_stop(void *ud)
{
    decoder *d = ud;

    d->dev->ops->queue_close(d->queue);
}

/* A whole job a turn: its calls are one message, and short. */
static bool decoder_turn(void *ud, job *j, bool shared, uint64_t *ret_bytes)
{
    (void)shared;
    *ret_bytes = 0;
    decoder_run(ud, j);
    return true;
}

static const worker_ops ops = {"kvs-decode", decoder_start, decoder_turn, decoder_stop, false};

kvs_status decoder_create(decoder **ret, device *dev, work_sink sink, kvs_err *err)
{
    decoder *d = calloc(1, sizeof *d);
    kvs_status s;

    if (d == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "decoder: no memory");
    d->dev = dev;
    s = worker_create(&d->worker, &ops, d, sink, err);
    if (s != KVS_OK) {
        free(d);
        return s;
    }
    *ret = d;
    return KVS_OK;
}

void decoder_submit(decoder *d, decoder_job *j)
{
    /* What is never reached, of a dropped or a stopped job, stays like this. */
    for (uint32_t i = 0; i < j->n_calls; i++) {
        j->calls[i].status = KVS_E_CANCELLED;
        j->calls[i].result = (kvs_mla_decode_result){0};
    }
    worker_submit(d->worker, &j->job);
}

bool decoder_drop(decoder *d, decoder_job *j)
{
    return worker_drop(d->worker, &j->job);
}

void decoder_kick(decoder *d)
{
    worker_kick(d->worker);
}

void decoder_share(decoder *d, uint32_t tenant, uint32_t share)
{
    worker_share(d->worker, tenant, share);
}

void decoder_destroy(decoder *d)
{
    if (d == NULL)
        return;
    worker_destroy(d->worker);
    free(d);
}

void decoder_get_stats(const decoder *d, decoder_stats *ret)
{
    worker_stats w;

    worker_get_stats(d->worker, &w);
    *ret = (decoder_stats){.jobs = w.jobs,
                           .calls = atomic_load_explicit(&d->calls, memory_order_relaxed),
                           .busy_us = w.busy_us,
                           .failed = w.failed,
                           .queued = w.queued,
                           .oldest_us = w.oldest_us};
}
