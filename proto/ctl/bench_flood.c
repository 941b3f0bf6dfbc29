#include "proto/ctl/bench_flood.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/pattern.h"

/* One of the two halves of the user's slots. */
typedef struct half {
    bench_flight flight;
    uint32_t first, n;
} half;

static void nap(void)
{
    (void)nanosleep(&(struct timespec){.tv_nsec = 500000}, NULL);
}

static kvs_status begin(bench_flood *f, half *h)
{
    bench_user *u = &f->user;

    if (!f->load) {
        for (uint32_t i = 0; i < h->n; i++)
            pattern_key(f->next_id + i, u->keys + (size_t)(h->first + i) * KVS_KEY_BYTES);
        f->next_id += h->n;
    }
    return bench_user_submit(u, &h->flight, f->load, h->first, h->n, &f->err);
}

static kvs_status end(bench_flood *f, half *h)
{
    const bool flew = h->flight.request != NULL;
    kvs_status s = bench_user_end(&h->flight, &f->err);

    if (s == KVS_OK && flew)
        bench_ends_add(&f->ends, clock_ns(), h->n * f->user.slot_bytes);
    return s;
}

static void *flood_main(void *arg)
{
    bench_flood *f = arg;
    const uint32_t n = f->user.n / 2;
    half halves[2] = {{.first = 0, .n = n}, {.first = n, .n = f->user.n - n}};
    kvs_status s = KVS_OK;

    while (!atomic_load(&f->stop) && s == KVS_OK) {
        if (!atomic_load(&f->wanted)) {
            for (int i = 0; i < 2 && s == KVS_OK; i++)
                s = end(f, &halves[i]);
            atomic_store(&f->resting, true);
            nap();
            continue;
        }
        atomic_store(&f->resting, false);
        for (int i = 0; i < 2 && s == KVS_OK; i++) {
            s = end(f, &halves[i]);
            if (s == KVS_OK)
                s = begin(f, &halves[i]);
        }
    }
    for (int i = 0; i < 2; i++) {
        kvs_status e = end(f, &halves[i]);

        s = s == KVS_OK ? e : s;
    }
    f->status = s;
    atomic_store(&f->resting, true);
    return NULL;
}

kvs_status bench_flood_start(bench_flood *f, const char *socket, const bench_shape *shape, bool load, uint64_t first_id,
                             kvs_err *err)
{
    return bench_flood_start_on(f, socket, 0, shape, load, first_id, err);
}

kvs_status bench_flood_start_on(bench_flood *f, const char *socket, uint32_t device, const bench_shape *shape,
                                bool load, uint64_t first_id, kvs_err *err)
{
    kvs_status s = bench_user_open_on(&f->user, socket, device, shape, err);

    f->load = load;
    f->next_id = first_id;
    if (s == KVS_OK && load)
        s = bench_user_store(&f->user, first_id, err);
    if (s == KVS_OK && load)
        s = kvs_pin(f->user.ns, f->user.keys, f->user.n, NULL, BENCH_CALL_MS, err);
    if (s != KVS_OK)
        return s;
    if (pthread_create(&f->thread, NULL, flood_main, f) != 0)
        return kvs_fail(err, KVS_E_SYS, "cannot start a thread");
    f->started = true;
    return KVS_OK;
}

void bench_flood_run(bench_flood *f)
{
    atomic_store(&f->resting, false);
    atomic_store(&f->wanted, true);
}

void bench_flood_rest(bench_flood *f)
{
    atomic_store(&f->wanted, false);
    while (!atomic_load(&f->resting))
        nap();
}

kvs_status bench_flood_stop(bench_flood *f, kvs_err *err)
{
    kvs_status s = KVS_OK;

    if (f->started) {
        atomic_store(&f->stop, true);
        (void)pthread_join(f->thread, NULL);
        if (f->status != KVS_OK)
            s = kvs_fail(err, f->status, "%s flood: %s", f->load ? "load" : "store", f->err.msg);
    }
    f->started = false;
    bench_user_close(&f->user);
    return s;
}
