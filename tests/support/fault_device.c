#include "tests/support/fault_device.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <xxhash.h>

typedef struct fault_device {
    device base;
    device_ops ops;
    device *inner;
    _Atomic uint64_t by_kernel;
    pthread_mutex_t lock; /* over all below */
    pthread_cond_t changed;
    fault_plan plans[FAULT_CALLS];
    bool planned[FAULT_CALLS];
    uint64_t calls[FAULT_CALLS], planned_at[FAULT_CALLS];
    uint32_t held;
    uint64_t releases;
    bool lazy;
    _Atomic bool lying;
} fault_device;

typedef struct fault_mem {
    device_mem base;
    device_mem *inner;
} fault_mem;

/* Copies that wait for wait(). */
typedef struct fault_batch {
    struct fault_batch *next;
    uint64_t mark;
    size_t n;
    device_how how;
    device_copy copies[];
} fault_batch;

typedef struct fault_queue {
    device_queue base;
    device_queue *inner;
    fault_batch *first, **last; /* belong to the queue's thread */
    uint64_t mark;
} fault_queue;

static fault_device *of(device *d)
{
    return (fault_device *)d;
}

/* --- plans
 * ------------------------------------------------------------------------------------------------------ */

void fault_device_plan(device *d, const fault_plan *p)
{
    fault_device *f = of(d);

    (void)pthread_mutex_lock(&f->lock);
    f->plans[p->call] = *p;
    f->planned[p->call] = true;
    f->planned_at[p->call] = f->calls[p->call];
    (void)pthread_mutex_unlock(&f->lock);
}

void fault_device_clear(device *d, fault_call call)
{
    fault_device *f = of(d);

    (void)pthread_mutex_lock(&f->lock);
    f->planned[call] = false;
    (void)pthread_mutex_unlock(&f->lock);
}

void fault_device_set_lazy(device *d, bool lazy)
{
    fault_device *f = of(d);

    (void)pthread_mutex_lock(&f->lock);
    f->lazy = lazy;
    (void)pthread_mutex_unlock(&f->lock);
}

void fault_device_set_lying(device *d, bool lying)
{
    atomic_store(&of(d)->lying, lying);
}

void fault_device_release(device *d)
{
    fault_device *f = of(d);

    (void)pthread_mutex_lock(&f->lock);
    for (int c = 0; c < FAULT_CALLS; c++)
        if (f->plans[c].action == FAULT_SWALLOW)
            f->planned[c] = false;
    f->releases++;
    (void)pthread_cond_broadcast(&f->changed);
    (void)pthread_mutex_unlock(&f->lock);
}

uint64_t fault_device_calls(device *d, fault_call call)
{
    fault_device *f = of(d);
    uint64_t n;

    (void)pthread_mutex_lock(&f->lock);
    n = f->calls[call];
    (void)pthread_mutex_unlock(&f->lock);
    return n;
}

void fault_device_pretend(device *d, uint32_t depth, bool copies_by_kernel)
{
    of(d)->ops.depth = depth;
    of(d)->ops.copies_by_kernel = copies_by_kernel;
}

uint64_t fault_device_by_kernel(device *d)
{
    return atomic_load(&of(d)->by_kernel);
}

uint32_t fault_device_held(device *d)
{
    fault_device *f = of(d);
    uint32_t n;

    (void)pthread_mutex_lock(&f->lock);
    n = f->held;
    (void)pthread_mutex_unlock(&f->lock);
    return n;
}

void fault_device_await_held(device *d, uint32_t n)
{
    fault_device *f = of(d);

    (void)pthread_mutex_lock(&f->lock);
    while (f->held < n)
        (void)pthread_cond_wait(&f->changed, &f->lock);
    (void)pthread_mutex_unlock(&f->lock);
}

/* Count the call and do to it what its plan says.  KVS_OK: go on to the inner device. */
static kvs_status pass(device *d, fault_call call, kvs_err *err)
{
    fault_device *f = of(d);
    fault_plan p = {.status = KVS_OK};
    uint64_t n;

    (void)pthread_mutex_lock(&f->lock);
    n = ++f->calls[call] - f->planned_at[call];
    if (f->planned[call] && n >= f->plans[call].nth &&
        (f->plans[call].count == 0 || n - f->plans[call].nth < f->plans[call].count))
        p = f->plans[call];
    if (p.action == FAULT_SWALLOW && p.nth > 0) {
        uint64_t before = f->releases;

        f->held++;
        (void)pthread_cond_broadcast(&f->changed);
        while (f->releases == before)
            (void)pthread_cond_wait(&f->changed, &f->lock);
        f->held--;
    }
    (void)pthread_mutex_unlock(&f->lock);
    if (p.action == FAULT_DELAY && p.nth > 0)
        (void)usleep(p.delay_us);
    if (p.status != KVS_OK && p.action != FAULT_DELAY)
        return kvs_fail(err, p.status, "fault device: call %llu of kind %d fails as planned", (unsigned long long)n,
                        (int)call);
    return KVS_OK;
}

/* --- memory
 * ----------------------------------------------------------------------------------------------------- */

static kvs_status fault_host_register(device *d, void *p, uint64_t bytes, kvs_err *err)
{
    kvs_status s = pass(d, FAULT_HOST_REGISTER, err);

    return s != KVS_OK ? s : of(d)->inner->ops->host_register(of(d)->inner, p, bytes, err);
}

static void fault_host_unregister(device *d, void *p, uint64_t bytes)
{
    of(d)->inner->ops->host_unregister(of(d)->inner, p, bytes);
}

static kvs_status mem_wrap(device *d, kvs_status s, fault_mem *m, device_mem **ret)
{
    if (s != KVS_OK) {
        free(m);
        return s;
    }
    m->base.dev = d;
    *ret = &m->base;
    return KVS_OK;
}

static kvs_status fault_mem_create(device *d, uint64_t bytes, device_mem **ret, kvs_err *err)
{
    kvs_status s = pass(d, FAULT_MEM_CREATE, err);
    fault_mem *m = calloc(1, sizeof *m);

    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "fault device: no memory");
    if (s == KVS_OK)
        s = of(d)->inner->ops->mem_create(of(d)->inner, bytes, &m->inner, err);
    return mem_wrap(d, s, m, ret);
}

static kvs_status fault_mem_import(device *d, const device_import *in, device_mem **ret, kvs_err *err)
{
    kvs_status s = pass(d, FAULT_MEM_IMPORT, err);
    fault_mem *m = calloc(1, sizeof *m);

    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "fault device: no memory");
    if (s == KVS_OK)
        s = of(d)->inner->ops->mem_import(of(d)->inner, in, &m->inner, err);
    return mem_wrap(d, s, m, ret);
}

static void fault_mem_close(device_mem *dm)
{
    fault_mem *m = (fault_mem *)dm;

    if (m == NULL)
        return;
    (void)pass(m->base.dev, FAULT_MEM_CLOSE, NULL);
    m->inner->dev->ops->mem_close(m->inner);
    free(m);
}

static uint32_t fault_mem_pieces(const device_mem *dm)
{
    const fault_mem *m = (const fault_mem *)dm;

    return m->inner->dev->ops->mem_pieces(m->inner);
}

static uint8_t *fault_mem_base(const device_mem *dm, uint32_t piece, uint64_t *ret_bytes)
{
    const fault_mem *m = (const fault_mem *)dm;

    return m->inner->dev->ops->mem_base(m->inner, piece, ret_bytes);
}

static int fault_mem_fd(const device_mem *dm, uint32_t piece)
{
    const fault_mem *m = (const fault_mem *)dm;

    return m->inner->dev->ops->mem_fd(m->inner, piece);
}

/* Others like it.  Their tables differ, so that they are known by a function. */
static bool fault_reaches(device *d, device *other)
{
    return other->ops->reaches == fault_reaches && of(d)->inner->ops->reaches(of(d)->inner, of(other)->inner);
}

static bool fault_mem_reached(const device_mem *dm, const device_mem *to)
{
    const fault_mem *m = (const fault_mem *)dm;

    return to->dev->ops->reaches == fault_reaches &&
           m->inner->dev->ops->mem_reached(m->inner, ((const fault_mem *)to)->inner);
}

/* --- queues
 * ----------------------------------------------------------------------------------------------------- */

static kvs_status fault_queue_open(device *d, device_dir dir, device_queue **ret, kvs_err *err)
{
    kvs_status s = pass(d, FAULT_QUEUE_OPEN, err);
    fault_queue *q = calloc(1, sizeof *q);

    if (q == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "fault device: no memory");
    if (s == KVS_OK)
        s = of(d)->inner->ops->queue_open(of(d)->inner, dir, &q->inner, err);
    if (s != KVS_OK) {
        free(q);
        return s;
    }
    q->base.dev = d;
    q->last = &q->first;
    *ret = &q->base;
    return KVS_OK;
}

static fault_batch *batch_pop(fault_queue *q)
{
    fault_batch *b = q->first;

    q->first = b->next;
    if (q->first == NULL)
        q->last = &q->first;
    return b;
}

static void fault_queue_close(device_queue *dq)
{
    fault_queue *q = (fault_queue *)dq;

    if (q == NULL)
        return;
    while (q->first != NULL)
        free(batch_pop(q));
    q->inner->dev->ops->queue_close(q->inner);
    free(q);
}

static void lie(const fault_batch *b)
{
    if (b->how.means == DEVICE_FROM_PEER && b->n > 0)
        ((uint8_t *)b->copies[b->n - 1].dst)[b->copies[b->n - 1].bytes - 1] ^= 1;
}

/* Run what was put off, up to a mark of ours. */
static kvs_status run_until(fault_queue *q, uint64_t mark, kvs_err *err)
{
    const device_ops *ops = q->inner->dev->ops;

    while (q->first != NULL && q->first->mark <= mark) {
        fault_batch *b = batch_pop(q);
        uint64_t inner_mark;
        kvs_status s = ops->copy(q->inner, b->copies, b->n, b->how, &inner_mark, err);

        if (s == KVS_OK)
            s = ops->wait(q->inner, inner_mark, err);
        if (s == KVS_OK && atomic_load(&of(q->base.dev)->lying))
            lie(b);
        free(b);
        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

/* Inner marks stay inside: everything of a batch is waited for in one go, so ours can be plain numbers. */
static kvs_status fault_copy(device_queue *dq, const device_copy *c, size_t n, device_how how, uint64_t *ret_mark,
                             kvs_err *err)
{
    fault_queue *q = (fault_queue *)dq;
    fault_device *f = of(q->base.dev);
    kvs_status s = pass(q->base.dev, FAULT_COPY, err);
    fault_batch *b;
    bool lazy;

    if (how.means == DEVICE_BY_KERNEL)
        (void)atomic_fetch_add(&f->by_kernel, 1);
    if (s != KVS_OK)
        return s;
    b = malloc(sizeof *b + n * sizeof *c);
    if (b == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "fault device: no memory");
    *b = (fault_batch){.mark = q->mark + 1, .n = n, .how = how};
    if (n > 0)
        memcpy(b->copies, c, n * sizeof *c);
    *q->last = b;
    q->last = &b->next;
    (void)pthread_mutex_lock(&f->lock);
    lazy = f->lazy;
    (void)pthread_mutex_unlock(&f->lock);
    if (!lazy)
        s = run_until(q, b->mark, err);
    if (s == KVS_OK)
        *ret_mark = ++q->mark;
    return s;
}

/* Work that failed is over: it does not land later.  What was queued before it, and has not been waited for, does. */
static void forget(fault_queue *q, uint64_t mark)
{
    for (fault_batch **at = &q->first; *at != NULL; at = &(*at)->next)
        if ((*at)->mark == mark) {
            fault_batch *b = *at;

            *at = b->next;
            if (*at == NULL)
                q->last = at;
            free(b);
            return;
        }
}

static kvs_status fault_wait(device_queue *dq, uint64_t mark, kvs_err *err)
{
    fault_queue *q = (fault_queue *)dq;
    kvs_status s = pass(q->base.dev, FAULT_WAIT, err);

    if (s == KVS_E_DEVICE)
        forget(q, mark);
    if (s == KVS_OK && mark > q->mark)
        s = kvs_fail(err, KVS_E_INVALID, "mark: %llu was not given out", (unsigned long long)mark);
    return s != KVS_OK ? s : run_until(q, mark, err);
}

/* Kernels run behind the copies that were queued before them, and are waited for at once. */
static kvs_status kernel_done(fault_queue *q, kvs_status s, uint64_t inner_mark, uint64_t *ret_mark, kvs_err *err)
{
    if (s == KVS_OK)
        s = q->inner->dev->ops->wait(q->inner, inner_mark, err);
    if (s == KVS_OK)
        *ret_mark = ++q->mark;
    return s;
}

static kvs_status fault_mla_write(device_queue *dq, const kvs_mla_write_args *a, uint32_t *ret_bad, uint64_t *ret_mark,
                                  kvs_err *err)
{
    fault_queue *q = (fault_queue *)dq;
    kvs_status s = pass(q->base.dev, FAULT_MLA_WRITE, err);
    uint64_t inner_mark = 0;

    if (s == KVS_OK)
        s = run_until(q, q->mark, err);
    if (s == KVS_OK)
        s = q->inner->dev->ops->mla_write(q->inner, a, ret_bad, &inner_mark, err);
    return kernel_done(q, s, inner_mark, ret_mark, err);
}

static kvs_status fault_mla_decode(device_queue *dq, const kvs_mla_decode_args *a, kvs_mla_decode_result *ret,
                                   uint64_t *ret_mark, kvs_err *err)
{
    fault_queue *q = (fault_queue *)dq;
    kvs_status s = pass(q->base.dev, FAULT_MLA_DECODE, err);
    uint64_t inner_mark = 0;

    if (s == KVS_OK)
        s = run_until(q, q->mark, err);
    if (s == KVS_OK)
        s = q->inner->dev->ops->mla_decode(q->inner, a, ret, &inner_mark, err);
    return kernel_done(q, s, inner_mark, ret_mark, err);
}

static kvs_status fault_mla_extend(device_queue *dq, const kvs_mla_extend_args *a, kvs_mla_decode_result *ret,
                                   uint64_t *ret_mark, kvs_err *err)
{
    fault_queue *q = (fault_queue *)dq;
    kvs_status s = pass(q->base.dev, FAULT_MLA_EXTEND, err);
    uint64_t inner_mark = 0;

    if (s == KVS_OK)
        s = run_until(q, q->mark, err);
    if (s == KVS_OK)
        s = q->inner->dev->ops->mla_extend(q->inner, a, ret, &inner_mark, err);
    return kernel_done(q, s, inner_mark, ret_mark, err);
}

static kvs_status fault_sum(device_queue *dq, const device_sums *s, kvs_err *err)
{
    const uint64_t n_parts = kvs_part_sum_parts(s->bytes, s->part_bytes);
    kvs_status st = pass(dq->dev, FAULT_SUM, err);

    if (st != KVS_OK)
        return st;
    if (s->n == 0 || s->n > DEVICE_SUM_BLOCKS || s->n * n_parts > DEVICE_SUM_PARTS ||
        !kvs_part_sum_fits(s->bytes, s->part_bytes))
        return kvs_fail(err, KVS_E_INVALID, "sum: %u blocks of %llu bytes", (unsigned)s->n,
                        (unsigned long long)s->bytes);
    for (uint64_t i = 0; i < s->n * n_parts; i++) {
        const uint64_t at = i % n_parts * s->part_bytes, left = s->bytes - at;

        s->parts[i] =
            XXH3_64bits((const uint8_t *)s->blocks[i / n_parts] + at, left < s->part_bytes ? left : s->part_bytes);
    }
    return KVS_OK;
}

void fault_device_pretend_sums(device *d)
{
    of(d)->ops.sum = fault_sum;
}

/* --- the device
 * ------------------------------------------------------------------------------------------------- */

static void fault_close(device *d)
{
    fault_device *f = of(d);

    f->inner->ops->close(f->inner);
    (void)pthread_cond_destroy(&f->changed);
    (void)pthread_mutex_destroy(&f->lock);
    free(f);
}

static const device_ops fault_ops = {
    .name = "fault",
    .close = fault_close,
    .host_register = fault_host_register,
    .host_unregister = fault_host_unregister,
    .mem_create = fault_mem_create,
    .mem_import = fault_mem_import,
    .mem_close = fault_mem_close,
    .mem_pieces = fault_mem_pieces,
    .mem_base = fault_mem_base,
    .mem_fd = fault_mem_fd,
    .reaches = fault_reaches,
    .mem_reached = fault_mem_reached,
    .queue_open = fault_queue_open,
    .queue_close = fault_queue_close,
    .copy = fault_copy,
    .mla_write = fault_mla_write,
    .mla_decode = fault_mla_decode,
    .mla_extend = fault_mla_extend,
    .wait = fault_wait,
};

kvs_status fault_device_open(device *inner, device **ret, kvs_err *err)
{
    fault_device *f = calloc(1, sizeof *f);

    if (f == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "fault device: no memory");
    f->ops = fault_ops;
    f->base.ops = &f->ops;
    f->inner = inner;
    (void)pthread_mutex_init(&f->lock, NULL);
    (void)pthread_cond_init(&f->changed, NULL);
    *ret = &f->base;
    return KVS_OK;
}
