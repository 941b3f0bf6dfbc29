#include "tests/support/stub_device.h"

#include <stdlib.h>
#include <string.h>

#include "kernels/stop.h"

static const char *const names[STUB_CALLS] = {"queue_open", "copy", "wait", "mla_write", "mla_decode", "mla_extend"};

static stub_device *of(device_queue *q)
{
    return (stub_device *)(void *)q->dev;
}

/* Count the call; the status that the test planned for it. */
static kvs_status enter(stub_device *d, enum stub_call call, unsigned *ret_nth, kvs_err *err)
{
    kvs_status s = KVS_OK;
    unsigned nth;

    pthread_mutex_lock(&d->lock);
    nth = ++d->calls[call];
    for (unsigned i = 0; i < d->n_faults; i++)
        if (d->faults[i].call == call && d->faults[i].nth == nth)
            s = d->faults[i].status;
    pthread_mutex_unlock(&d->lock);
    if (ret_nth != NULL)
        *ret_nth = nth;
    return s == KVS_OK ? s : kvs_fail(err, s, "%s %u: planned failure", names[call], nth);
}

static kvs_status stub_queue_open(device *dev, device_dir dir, device_queue **ret, kvs_err *err)
{
    stub_device *d = (stub_device *)(void *)dev;
    kvs_status s = enter(d, STUB_OPEN, NULL, err);
    device_queue *q;

    (void)dir;
    if (s != KVS_OK)
        return s;
    q = calloc(1, sizeof *q);
    if (q == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "queue: no memory");
    q->dev = dev;
    pthread_mutex_lock(&d->lock);
    d->open_queues++;
    pthread_mutex_unlock(&d->lock);
    *ret = q;
    return KVS_OK;
}

static void stub_queue_close(device_queue *q)
{
    stub_device *d = of(q);

    pthread_mutex_lock(&d->lock);
    d->open_queues--;
    pthread_mutex_unlock(&d->lock);
    free(q);
}

static kvs_status stub_copy(device_queue *q, const device_copy *c, size_t n, device_how how, uint64_t *ret_mark,
                            kvs_err *err)
{
    unsigned nth;
    kvs_status s = enter(of(q), STUB_COPY, &nth, err);
    uint64_t bytes = 0;

    for (size_t i = 0; i < n; i++) {
        if (s == KVS_OK)
            memcpy(c[i].dst, c[i].src, c[i].bytes);
        bytes += c[i].bytes;
    }
    pthread_mutex_lock(&of(q)->lock);
    if (nth <= STUB_MAX_RECORDED) {
        of(q)->batch_bytes[nth - 1] = bytes;
        of(q)->batch_copies[nth - 1] = n;
        of(q)->batch_how[nth - 1] = how;
    }
    pthread_mutex_unlock(&of(q)->lock);
    if (s == KVS_OK)
        *ret_mark = nth;
    return s;
}

/* As the cpu device does. */
static kvs_status look(const bool *stop, kvs_status s, kvs_err *err)
{
    return s == KVS_OK && kvs_is_stopped(stop) ? kvs_fail(err, KVS_E_CANCELLED, "stopped") : s;
}

static kvs_status stub_mla_write(device_queue *q, const kvs_mla_write_args *a, uint32_t *ret_bad, uint64_t *ret_mark,
                                 kvs_err *err)
{
    kvs_status s = look(a->stop, enter(of(q), STUB_WRITE, NULL, err), err);

    if (s != KVS_OK)
        return s;
    *ret_bad = of(q)->bad;
    *ret_mark = 1;
    return KVS_OK;
}

static kvs_status stub_mla_decode(device_queue *q, const kvs_mla_decode_args *a, kvs_mla_decode_result *ret,
                                  uint64_t *ret_mark, kvs_err *err)
{
    kvs_status s = look(a->stop, enter(of(q), STUB_DECODE, NULL, err), err);

    if (s != KVS_OK)
        return s;
    *ret = (kvs_mla_decode_result){.parts = a->parts, .kernel = KVS_KERNEL_MLA_DECODE_C, .bad = of(q)->bad};
    *ret_mark = 1;
    return KVS_OK;
}

static kvs_status stub_mla_extend(device_queue *q, const kvs_mla_extend_args *a, kvs_mla_decode_result *ret,
                                  uint64_t *ret_mark, kvs_err *err)
{
    kvs_status s = look(a->stop, enter(of(q), STUB_EXTEND, NULL, err), err);

    if (s != KVS_OK)
        return s;
    *ret = (kvs_mla_decode_result){.parts = a->parts, .kernel = KVS_KERNEL_MLA_EXTEND_C, .bad = of(q)->bad};
    *ret_mark = 1;
    return KVS_OK;
}

static kvs_status stub_wait(device_queue *q, uint64_t mark, kvs_err *err)
{
    stub_device *d = of(q);
    unsigned nth;
    kvs_status s = enter(d, STUB_WAIT, &nth, err);

    (void)mark;
    pthread_mutex_lock(&d->lock);
    if (nth == d->hold_nth) {
        d->held = true;
        pthread_cond_broadcast(&d->changed);
        while (d->held)
            pthread_cond_wait(&d->changed, &d->lock);
    }
    pthread_mutex_unlock(&d->lock);
    return s;
}

void stub_init(stub_device *d)
{
    memset(d, 0, sizeof *d);
    d->ops = (device_ops){.name = "stub",
                          .queue_open = stub_queue_open,
                          .queue_close = stub_queue_close,
                          .copy = stub_copy,
                          .mla_write = stub_mla_write,
                          .mla_decode = stub_mla_decode,
                          .mla_extend = stub_mla_extend,
                          .wait = stub_wait};
    d->dev.ops = &d->ops;
    (void)pthread_mutex_init(&d->lock, NULL);
    (void)pthread_cond_init(&d->changed, NULL);
}

void stub_fini(stub_device *d)
{
    stub_release(d); /* a failed test leaves its waiters: destroying what they wait on would wait for them */
    (void)pthread_cond_destroy(&d->changed);
    (void)pthread_mutex_destroy(&d->lock);
}

void stub_fail(stub_device *d, enum stub_call call, unsigned nth, kvs_status status)
{
    pthread_mutex_lock(&d->lock);
    if (d->n_faults < STUB_MAX_FAULTS)
        d->faults[d->n_faults++] = (stub_fault){call, nth, status};
    pthread_mutex_unlock(&d->lock);
}

void stub_hold(stub_device *d, unsigned nth_wait)
{
    pthread_mutex_lock(&d->lock);
    d->hold_nth = nth_wait;
    pthread_mutex_unlock(&d->lock);
}

void stub_await_held(stub_device *d)
{
    pthread_mutex_lock(&d->lock);
    while (!d->held)
        pthread_cond_wait(&d->changed, &d->lock);
    pthread_mutex_unlock(&d->lock);
}

void stub_release(stub_device *d)
{
    pthread_mutex_lock(&d->lock);
    d->held = false;
    pthread_cond_broadcast(&d->changed);
    pthread_mutex_unlock(&d->lock);
}

unsigned stub_count(stub_device *d, enum stub_call call)
{
    unsigned n;

    pthread_mutex_lock(&d->lock);
    n = d->calls[call];
    pthread_mutex_unlock(&d->lock);
    return n;
}
