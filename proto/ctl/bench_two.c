/* Two GPUs at once: both links with different blocks, and the same blocks onto both, which exchange them. */
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/device_cuda.h"
#include "proto/ctl/bench_side.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/private.h"

enum { GPUS = 2, LAYERS = 61, TOKENS = 64, BLOCKS = 200, MAX_ROUNDS = 9 };
enum { STORE, LOAD, SHARED, FIGURES };
#define RAW_BYTES (UINT64_C(900) << 20)
static const bench_shape SHAPE = {BENCH_DAEMON, LAYERS, TOKENS, BLOCKS};

/* Memory to copy between without a daemon. */
typedef struct plain {
    device *d;
    device_mem *mem;
    device_queue *queues[2]; /* store, load */
    uint8_t *host, *dev;
    bool registered;
} plain;

typedef struct two {
    plain plain[GPUS];
    bench_user users[GPUS];
    double gbs[FIGURES][MAX_ROUNDS], than[FIGURES][MAX_ROUNDS]; /* than: what it is compared with */
} two;

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
    for (int way = STORE; way <= LOAD && s == KVS_OK; way++)
        s = p->d->ops->queue_open(p->d, way == LOAD ? DEVICE_LOAD : DEVICE_STORE, &p->queues[way], err);
    return s;
}

static void plain_close(plain *p)
{
    for (int way = STORE; way <= LOAD; way++)
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

/* GB/s of one copy on each GPU, both at once. */
static kvs_status plain_both(plain *p, int way, double *ret, kvs_err *err)
{
    uint64_t began = clock_ns(), marks[GPUS];
    kvs_status s = KVS_OK;

    for (int i = 0; i < GPUS && s == KVS_OK; i++) {
        device_copy c = {way == LOAD ? p[i].dev : p[i].host, way == LOAD ? p[i].host : p[i].dev, RAW_BYTES};

        s = p[i].d->ops->copy(p[i].queues[way], &c, 1, (device_how){DEVICE_BY_ENGINE, 0}, &marks[i], err);
    }
    for (int i = 0; i < GPUS && s == KVS_OK; i++)
        s = p[i].d->ops->wait(p[i].queues[way], marks[i], err);
    *ret = (double)(GPUS * RAW_BYTES) / (double)(clock_ns() - began);
    return s;
}

/* ---- through the socket ---- */

/* GB/s of all blocks of both, whose keys are `apart`. */
static kvs_status moved(bench_user *u, bool load, uint64_t apart, double *ret, kvs_err *err)
{
    bench_flight f[GPUS] = {0};
    uint64_t began;
    kvs_status s = KVS_OK, end;

    for (uint64_t i = 0; i < GPUS; i++)
        bench_user_name(&u[i], i * apart);
    began = clock_ns();
    for (int i = 0; i < GPUS && s == KVS_OK; i++)
        s = bench_user_submit(&u[i], &f[i], load, 0, u[i].n, err);
    for (int i = 0; i < GPUS; i++) {
        end = bench_user_end(&f[i], err);
        s = s != KVS_OK ? s : end;
    }
    *ret = (double)(GPUS * u[0].n * u[0].slot_bytes) / (double)(clock_ns() - began);
    return s;
}

static kvs_status one_round(two *t, double gbs[FIGURES], double than[FIGURES], kvs_err *err)
{
    kvs_status s = kvs_reset(t->users[0].client, t->users[0].ns, 0, NULL, BENCH_CALL_MS, err);

    for (int way = STORE; way <= LOAD && s == KVS_OK; way++) {
        s = plain_both(t->plain, way, &than[way], err);
        if (s == KVS_OK)
            s = moved(t->users, way == LOAD, BLOCKS, &gbs[way], err);
    }
    than[SHARED] = gbs[LOAD];
    return s == KVS_OK ? moved(t->users, true, 0, &gbs[SHARED], err) : s;
}

static void add(bench_list *l, two *t, int which, int rounds)
{
    static const struct {
        const char *name, *than;
        double target;
    } FIGURE[FIGURES] = {
        {"STORE from two GPUs at once", "two raw at once", NAN},
        {"LOAD onto two GPUs at once", "two raw at once", 0.95},
        {"LOAD of the same onto two GPUs", "two full loads", 1.6},
    };
    double ratios[MAX_ROUNDS];
    bench_figure *f = bench_add(l, "GB/s", true, FIGURE[which].target, "GPU: %s, %d x %" PRIu64 " bytes",
                                FIGURE[which].name, BLOCKS, t->users[0].slot_bytes);

    for (int r = 0; r < rounds; r++)
        ratios[r] = t->gbs[which][r] / t->than[which][r];
    f->value = clock_percentile(t->gbs[which], (size_t)rounds, 50);
    f->plain = clock_percentile(t->than[which], (size_t)rounds, 50);
    f->plain_is = FIGURE[which].than;
    bench_judge(f, ratios, (size_t)rounds);
}

static kvs_status measure(two *t, const char *socket, int rounds, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < GPUS && s == KVS_OK; i++) {
        s = plain_open(&t->plain[i], i, err);
        if (s == KVS_OK)
            s = bench_user_open_on(&t->users[i], socket, i, &SHAPE, err);
    }
    for (int r = -1; r < rounds && s == KVS_OK; r++) {
        double gbs[FIGURES] = {0}, than[FIGURES] = {0};

        s = one_round(t, gbs, than, err);
        for (int k = 0; k < FIGURES && r >= 0; k++) {
            t->gbs[k][r] = gbs[k];
            t->than[k][r] = than[k];
        }
    }
    return s;
}

kvs_status bench_two(bench_list *l, bool quick, kvs_err *err)
{
    static const char *const SETTINGS[] = {"pool.max_bytes=3GiB", "device.max_region_bytes=8GiB", "mover.exchange=on"};
    static two t;
    private_daemon d = {0};
    const int rounds = quick ? 5 : MAX_ROUNDS;
    uint32_t n = 0;
    kvs_status s = device_cuda_count(&n, err);

    if (s != KVS_OK || n < GPUS)
        return s;
    s = private_start(&d, SETTINGS, 3, err);
    if (s == KVS_OK)
        s = measure(&t, d.socket, rounds, err);
    for (int k = 0; k < FIGURES && s == KVS_OK; k++)
        add(l, &t, k, rounds);
    for (int i = 0; i < GPUS; i++) {
        bench_user_close(&t.users[i]);
        plain_close(&t.plain[i]);
    }
    private_stop(&d);
    return s;
}
