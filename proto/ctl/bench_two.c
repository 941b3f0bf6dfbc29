/* Two GPUs at once: both links with different blocks, and the same blocks onto both, which exchange them. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "kernels/device_cuda.h"
#include "proto/ctl/bench_flood.h"
#include "proto/ctl/bench_side.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/private.h"

enum { GPUS = 2, LAYERS = 61, TOKENS = 64, BLOCKS = 200, MAX_ROUNDS = 9, SETTLE_MS = 30, WINDOW_MS = 250 };
enum { STORE, LOAD, WAYS };
#define RAW_BYTES (UINT64_C(900) << 20)
static const bench_shape SHAPE = {BENCH_DAEMON, LAYERS, TOKENS, BLOCKS};
static const char *const WAY_NAMES[WAYS] = {"STORE from", "LOAD onto"};

/* Memory to copy between without a daemon. */
typedef struct plain {
    device *d;
    device_mem *mem;
    device_queue *queues[WAYS];
    uint8_t *host, *dev;
    bool registered;
} plain;

/* GB/s of the rounds, and both as fractions of `sum`. */
typedef struct rates {
    double gbs[MAX_ROUNDS], sum[MAX_ROUNDS], together[MAX_ROUNDS]; /* raw copies: one by one in sum, and at once */
    double of_sum[MAX_ROUNDS], together_of_sum[MAX_ROUNDS];
} rates;

/* ---- raw copies ---- */

static kvs_status plain_open(plain *p, uint32_t ordinal, kvs_err *err)
{
    kvs_status s = device_cuda_open(&p->d, ordinal, err);
    uint64_t had;
    void *host;

    if (s != KVS_OK)
        return s;
    host = mmap(NULL, RAW_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (host == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, "mmap: %s", strerror(errno));
    p->host = host;
    s = p->d->ops->host_register(p->d, p->host, RAW_BYTES, err);
    p->registered = s == KVS_OK;
    if (s == KVS_OK)
        s = p->d->ops->mem_create(p->d, RAW_BYTES, &p->mem, err);
    if (s == KVS_OK)
        p->dev = p->d->ops->mem_base(p->mem, 0, &had);
    for (int way = STORE; way < WAYS && s == KVS_OK; way++)
        s = p->d->ops->queue_open(p->d, way == LOAD ? DEVICE_LOAD : DEVICE_STORE, &p->queues[way], err);
    return s;
}

static void plain_close(plain *p)
{
    for (int way = STORE; way < WAYS; way++)
        if (p->queues[way] != NULL)
            p->d->ops->queue_close(p->queues[way]);
    if (p->mem != NULL)
        p->d->ops->mem_close(p->mem);
    if (p->registered)
        p->d->ops->host_unregister(p->d, p->host, RAW_BYTES);
    if (p->host != NULL)
        (void)munmap(p->host, RAW_BYTES);
    if (p->d != NULL)
        p->d->ops->close(p->d);
}

/* GB/s of one copy on each of the n GPUs, all at once. */
static kvs_status plain_copies(plain *p, int n, int way, double *ret, kvs_err *err)
{
    uint64_t began = clock_ns(), marks[GPUS];
    kvs_status s = KVS_OK;

    for (int i = 0; i < n && s == KVS_OK; i++) {
        device_copy c = {way == LOAD ? p[i].dev : p[i].host, way == LOAD ? p[i].host : p[i].dev, RAW_BYTES};

        s = p[i].d->ops->copy(p[i].queues[way], &c, 1, (device_how){DEVICE_BY_ENGINE, 0}, &marks[i], err);
    }
    for (int i = 0; i < n && s == KVS_OK; i++)
        s = p[i].d->ops->wait(p[i].queues[way], marks[i], err);
    *ret = (double)((uint64_t)n * RAW_BYTES) / (double)(clock_ns() - began);
    return s;
}

static kvs_status plain_rates(plain p[GPUS], int way, double *ret_sum, double *ret_together, kvs_err *err)
{
    double one = 0;
    kvs_status s = plain_copies(p, GPUS, way, ret_together, err);

    *ret_sum = 0;
    for (int i = 0; i < GPUS && s == KVS_OK; i++) {
        s = plain_copies(&p[i], 1, way, &one, err);
        *ret_sum += one;
    }
    return s;
}

/* ---- different blocks, both links at once ---- */

static void nap_ms(long ms)
{
    (void)nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

/* GB/s of both, each with requests of half its blocks one behind the other, in a stretch of WINDOW_MS. */
static void flow(bench_flood f[GPUS], double *ret)
{
    uint64_t from;

    for (int i = 0; i < GPUS; i++)
        bench_flood_run(&f[i]);
    nap_ms(SETTLE_MS);
    from = clock_ns();
    nap_ms(WINDOW_MS);
    *ret = 0;
    for (int i = 0; i < GPUS; i++) {
        double gbs;

        (void)bench_ends_gbs(&f[i].ends, from, from + WINDOW_MS * UINT64_C(1000000), &gbs);
        *ret += gbs;
    }
    for (int i = 0; i < GPUS; i++)
        bench_flood_rest(&f[i]);
}

static void add_way(bench_list *l, int way, const char *checksum, rates *x, int rounds)
{
    bench_figure *f =
        bench_add(l, "GB/s", true, 0.95, "GPU: %s two GPUs at once, checksum %s", WAY_NAMES[way], checksum);

    f->value = clock_percentile(x->gbs, (size_t)rounds, 50);
    f->plain = clock_percentile(x->sum, (size_t)rounds, 50);
    f->plain_is = "raw copies one by one, in sum";
    f->value_is =
        "bytes of the requests that ended within 250 ms but the first, over the time from its end to the last one's";
    bench_judge(f, x->of_sum, (size_t)rounds);
}

/* What the host makes of both at once, without us. */
static void add_plain(bench_list *l, int way, rates *x, int rounds)
{
    bench_figure *f =
        bench_add(l, "GB/s", true, NAN, "GPU: raw copies %s two GPUs at once", way == STORE ? "from" : "onto");

    f->value = clock_percentile(x->together, (size_t)rounds, 50);
    f->plain = clock_percentile(x->sum, (size_t)rounds, 50);
    f->plain_is = "one by one, in sum";
    bench_judge(f, x->together_of_sum, (size_t)rounds);
}

static kvs_status one_way(bench_list *l, plain p[GPUS], const char *socket, int way, const char *checksum, bool add_raw,
                          int rounds, kvs_err *err)
{
    static bench_flood floods[GPUS];
    static rates x;
    kvs_status s = KVS_OK;

    memset(floods, 0, sizeof floods);
    for (uint32_t i = 0; i < GPUS && s == KVS_OK; i++)
        s = bench_flood_start_on(&floods[i], socket, i, &SHAPE, way == LOAD, (uint64_t)(i + 1) << 40, err);
    for (int r = -1; r < rounds && s == KVS_OK; r++) { /* the first is to warm up */
        const int at = r < 0 ? 0 : r;

        s = plain_rates(p, way, &x.sum[at], &x.together[at], err);
        if (s == KVS_OK)
            flow(floods, &x.gbs[at]);
        x.of_sum[at] = x.gbs[at] / x.sum[at];
        x.together_of_sum[at] = x.together[at] / x.sum[at];
    }
    for (int i = 0; i < GPUS; i++) {
        kvs_err late = {.msg = ""};
        kvs_status end = bench_flood_stop(&floods[i], &late);

        s = s == KVS_OK && end != KVS_OK ? kvs_fail(err, end, "%s", late.msg) : s;
    }
    if (s == KVS_OK && add_raw)
        add_plain(l, way, &x, rounds);
    if (s == KVS_OK)
        add_way(l, way, checksum, &x, rounds);
    return s;
}

/* ---- the same blocks onto both ---- */

/* GB/s of loading all blocks of both, whose keys are `apart`. */
static kvs_status loaded(bench_user *u, uint64_t apart, double *ret, kvs_err *err)
{
    bench_flight f[GPUS] = {0};
    uint64_t began;
    kvs_status s = KVS_OK, end;

    for (uint64_t i = 0; i < GPUS; i++)
        bench_user_name(&u[i], i * apart);
    began = clock_ns();
    for (int i = 0; i < GPUS && s == KVS_OK; i++)
        s = bench_user_submit(&u[i], &f[i], true, 0, u[i].n, err);
    for (int i = 0; i < GPUS; i++) {
        end = bench_user_end(&f[i], err);
        s = s != KVS_OK ? s : end;
    }
    *ret = (double)(GPUS * u[0].n * u[0].slot_bytes) / (double)(clock_ns() - began);
    return s;
}

static kvs_status shared(bench_list *l, const char *socket, int rounds, kvs_err *err)
{
    bench_user u[GPUS] = {0};
    double gbs[MAX_ROUNDS] = {0}, full[MAX_ROUNDS] = {0}, ratios[MAX_ROUNDS] = {0};
    kvs_status s = KVS_OK;
    bench_figure *f;

    for (uint32_t i = 0; i < GPUS && s == KVS_OK; i++)
        s = bench_user_open_on(&u[i], socket, i, &SHAPE, err);
    for (uint32_t i = 0; i < GPUS && s == KVS_OK; i++)
        s = bench_user_store(&u[i], i * BLOCKS, err);
    for (int r = -1; r < rounds && s == KVS_OK; r++) {
        const int at = r < 0 ? 0 : r;

        s = loaded(u, BLOCKS, &full[at], err);
        if (s == KVS_OK)
            s = loaded(u, 0, &gbs[at], err);
        if (s == KVS_OK)
            ratios[at] = gbs[at] / full[at];
    }
    if (s == KVS_OK) {
        f = bench_add(l, "GB/s", true, 1.6, "GPU: LOAD of the same onto two GPUs, %d x %" PRIu64 " bytes", BLOCKS,
                      u[0].slot_bytes);
        f->value = clock_percentile(gbs, (size_t)rounds, 50);
        f->plain = clock_percentile(full, (size_t)rounds, 50);
        f->plain_is = "two full loads";
        bench_judge(f, ratios, (size_t)rounds);
    }
    for (int i = 0; i < GPUS; i++)
        bench_user_close(&u[i]);
    return s;
}

/* ---- all of it ---- */

kvs_status bench_two(bench_list *l, bool quick, kvs_err *err)
{
    static const char *const CHECKSUMS[] = {"on", "off"};
    const char *settings[] = {"pool.max_bytes=4GiB", "device.max_region_bytes=8GiB", "mover.exchange=on", NULL};
    plain p[GPUS] = {0};
    private_daemon d = {0};
    const int rounds = quick ? 5 : MAX_ROUNDS;
    uint32_t n = 0;
    kvs_status s = device_cuda_count(&n, err);

    if (s != KVS_OK || n < GPUS)
        return s;
    for (uint32_t i = 0; i < GPUS && s == KVS_OK; i++)
        s = plain_open(&p[i], i, err);
    for (int c = 0; c < 2 && s == KVS_OK; c++) {
        settings[3] = c == 0 ? "pool.checksum=true" : "pool.checksum=false";
        s = private_start(&d, settings, 4, err);
        for (int way = STORE; way < WAYS && s == KVS_OK; way++)
            s = one_way(l, p, d.socket, way, CHECKSUMS[c], c == 0, rounds, err);
        if (s == KVS_OK && c == 0)
            s = shared(l, d.socket, rounds, err);
        private_stop(&d);
    }
    for (int i = 0; i < GPUS; i++)
        plain_close(&p[i]);
    return s;
}
