#include "proto/ctl/calibrate.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "kernels/busy_cuda.h"
#include "kernels/device_cuda.h"
#include "proto/ctl/clock.h"
#include "proto/ctl/ctl.h"
#include "proto/ctl/progress.h"
#include "proto/text.h"

enum {
    ROUNDS = 3,
    MAX_PIECES = 8192,   /* of one measurement */
    ENGINE_PIECES = 256, /* of one batch, as the daemon's mover makes them */
    KERNEL_PIECES = 1024,
    BATCH_BYTES = 32 << 20,
    SPEED_MS = 200, /* of the busy process, undisturbed */
};
#define CLOSE_ENOUGH 0.97 /* of the best rate: fewer thread blocks leave more to others */

static const uint64_t PIECES[] = {4608, 18432, 73728, 294912, 1179648, 4718592};
static const uint32_t BLOCKS[] = {1, 2, 4, 8, 16, 32};
enum { N_PIECES = sizeof PIECES / sizeof *PIECES, N_BLOCKS = sizeof BLOCKS / sizeof *BLOCKS };

typedef struct bench {
    const calibrate_plan *plan;
    device *d;
    device_queue *queues[2]; /* load, store */
    device_mem *mem;
    uint8_t *host, *dev;
    uint64_t bytes; /* of both */
    bool registered;
    device_copy *copies; /* [MAX_PIECES] */
    size_t n;
    busy busy;
    double full_speed; /* calls a second of the busy process */
    uint32_t done;
} bench;

/* ---- one measurement ---- */

/* Pieces in another order here and there, none beside its neighbour. */
static void lay_out(bench *b, int dir, uint64_t piece)
{
    uint64_t places = b->bytes / piece, stride = places / 2 + 1;

    while (places > 1 && (places % stride == 0 || stride % 2 == 0))
        stride++;
    b->n = places < MAX_PIECES ? places : MAX_PIECES;
    for (uint64_t i = 0; i < b->n; i++) {
        uint8_t *host = b->host + i * stride % places * piece, *dev = b->dev + (places - 1 - i) * piece;

        b->copies[i] = dir == 0 ? (device_copy){dev, host, piece} : (device_copy){host, dev, piece};
    }
}

/* All pieces once, two batches at a time. */
static kvs_status pass(bench *b, int dir, uint64_t piece, device_how how, kvs_err *err)
{
    const device_ops *ops = b->d->ops;
    size_t most = how.means == DEVICE_BY_KERNEL ? KERNEL_PIECES : ENGINE_PIECES, fit = BATCH_BYTES / piece;
    uint64_t marks[2] = {0, 0};
    kvs_status s = KVS_OK;
    int turn = 0;

    most = fit > 0 && fit < most ? fit : most;
    for (size_t at = 0; at < b->n && s == KVS_OK; at += most, turn ^= 1) {
        size_t n = b->n - at < most ? b->n - at : most;

        s = ops->wait(b->queues[dir], marks[turn], err);
        if (s == KVS_OK)
            s = ops->copy(b->queues[dir], b->copies + at, n, how, &marks[turn], err);
    }
    for (int i = 0; i < 2 && s == KVS_OK; i++)
        s = ops->wait(b->queues[dir], marks[i], err);
    return s;
}

/* GB/s, the median of some passes. */
static kvs_status alone(bench *b, int dir, uint64_t piece, device_how how, double *ret, kvs_err *err)
{
    double rates[ROUNDS];

    for (int i = -1; i < ROUNDS; i++) { /* one to warm up */
        uint64_t began = clock_ns(), ns;
        kvs_status s = pass(b, dir, piece, how, err);

        if (s != KVS_OK)
            return s;
        ns = clock_ns() - began;
        if (i >= 0)
            rates[i] = (double)(b->n * piece) / (double)(ns > 0 ? ns : 1);
    }
    *ret = clock_percentile(rates, ROUNDS, 50);
    return KVS_OK;
}

/* The same beside the busy process, and what is left of that one's speed. */
static kvs_status beside(bench *b, int dir, uint64_t piece, device_how how, double *ret, double *ret_left, kvs_err *err)
{
    uint64_t began = clock_ns(), calls = busy_calls(&b->busy), bytes = 0, ns = 0;

    while (ns < b->plan->beside_ms * UINT64_C(1000000) || busy_calls(&b->busy) == calls) {
        kvs_status s = pass(b, dir, piece, how, err);

        if (s != KVS_OK)
            return s;
        bytes += b->n * piece;
        ns = clock_ns() - began;
        if (ns > UINT64_C(30000000000))
            return kvs_fail(err, KVS_E_DEADLINE, "busy process: it has done nothing for 30 s");
    }
    *ret = (double)bytes / (double)ns;
    *ret_left = (double)(busy_calls(&b->busy) - calls) / (double)ns * 1e9 / b->full_speed;
    return KVS_OK;
}

/* ---- the table ---- */

static void step(bench *b)
{
    b->done++;
    if (b->plan->on_step != NULL)
        b->plan->on_step(b->done, N_PIECES * 4);
}

static kvs_status row_alone(bench *b, int dir, copy_row *r, kvs_err *err)
{
    double rates[N_BLOCKS], best = 0;
    kvs_status s;

    lay_out(b, dir, r->piece_bytes);
    s = alone(b, dir, r->piece_bytes, (device_how){DEVICE_BY_ENGINE, 0}, &r->engine, err);
    for (size_t k = 0; k < N_BLOCKS && s == KVS_OK; k++) {
        s = alone(b, dir, r->piece_bytes, (device_how){DEVICE_BY_KERNEL, BLOCKS[k]}, &rates[k], err);
        if (s == KVS_OK && rates[k] > best)
            best = rates[k];
    }
    if (s != KVS_OK)
        return s;
    for (size_t k = N_BLOCKS; k-- > 0;)
        if (rates[k] >= best * CLOSE_ENOUGH) {
            r->kernel = rates[k];
            r->kernel_blocks = BLOCKS[k];
        }
    step(b);
    return KVS_OK;
}

static kvs_status row_beside(bench *b, int dir, copy_row *r, kvs_err *err)
{
    kvs_status s;

    lay_out(b, dir, r->piece_bytes);
    s = beside(b, dir, r->piece_bytes, (device_how){DEVICE_BY_ENGINE, 0}, &r->beside_engine, &r->left_by_engine, err);
    if (s == KVS_OK)
        s = beside(b, dir, r->piece_bytes, (device_how){DEVICE_BY_KERNEL, r->kernel_blocks}, &r->beside_kernel,
                   &r->left_by_kernel, err);
    step(b);
    return s;
}

static kvs_status fill(bench *b, copy_table *t, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (int dir = 0; dir < 2; dir++)
        for (uint32_t i = 0; i < N_PIECES && s == KVS_OK && PIECES[i] * 2 <= b->bytes; i++) {
            t->rows[dir][t->n[dir]].piece_bytes = PIECES[i];
            s = row_alone(b, dir, &t->rows[dir][t->n[dir]++], err);
        }
    if (s != KVS_OK || b->busy.pid == 0)
        return s;
    s = busy_go(&b->busy, err);
    if (s == KVS_OK)
        s = busy_speed(&b->busy, SPEED_MS, &b->full_speed, err);
    for (int dir = 0; dir < 2; dir++)
        for (uint32_t i = 0; i < t->n[dir] && s == KVS_OK; i++)
            s = row_beside(b, dir, &t->rows[dir][i], err);
    return s;
}

/* ---- from other devices ---- */

/* What stands at byte `at` of the other device's memory. */
static uint64_t word_at(uint64_t at)
{
    return (at + 1) * UINT64_C(0x9e3779b97f4a7c15);
}

/* From or to the host, all of it. */
static kvs_status move_all(device *d, device_dir dir, uint8_t *host, uint8_t *dev, uint64_t bytes, kvs_err *err)
{
    const device_copy c = dir == DEVICE_LOAD ? (device_copy){dev, host, bytes} : (device_copy){host, dev, bytes};
    device_queue *q = NULL;
    uint64_t mark = 0;
    kvs_status s = d->ops->queue_open(d, dir, &q, err);

    if (s != KVS_OK)
        return s;
    s = d->ops->copy(q, &c, 1, (device_how){DEVICE_BY_ENGINE, 0}, &mark, err);
    if (s == KVS_OK)
        s = d->ops->wait(q, mark, err);
    d->ops->queue_close(q);
    return s;
}

static kvs_status fill_other(bench *b, device *other, uint8_t *from, kvs_err *err)
{
    for (uint64_t at = 0; at + 8 <= b->bytes; at += 8)
        memcpy(b->host + at, &(uint64_t){word_at(at)}, 8);
    return move_all(other, DEVICE_LOAD, b->host, from, b->bytes, err);
}

/* Did the copies bring what they should?  There are machines where such copies are fast and wrong: the I/O memory management
 * stands between the cards. */
static kvs_status check_bytes(bench *b, const uint8_t *from, bool *ret, kvs_err *err)
{
    kvs_status s = move_all(b->d, DEVICE_STORE, b->host, b->dev, b->bytes, err);

    *ret = s == KVS_OK;
    for (size_t i = 0; i < b->n && *ret; i++) {
        const device_copy *c = &b->copies[i];
        const uint8_t *got = b->host + ((const uint8_t *)c->dst - b->dev);

        for (uint64_t at = 0; at + 8 <= c->bytes && *ret; at += 8)
            *ret = memcmp(got + at, &(uint64_t){word_at((uint64_t)((const uint8_t *)c->src - from) + at)}, 8) == 0;
    }
    return s;
}

/* *ret: 0, what came was not what was there. */
static kvs_status measure_peer(bench *b, device *other, device_mem *mem, double *ret, kvs_err *err)
{
    const uint64_t piece = PIECES[N_PIECES - 1];
    uint64_t had;
    uint8_t *from = other->ops->mem_base(mem, 0, &had);
    kvs_status s = fill_other(b, other, from, err);
    bool right = false;

    if (s != KVS_OK)
        return s;
    lay_out(b, 0, piece < b->bytes ? piece : b->bytes);
    for (size_t i = 0; i < b->n; i++)
        b->copies[i].src = from + ((const uint8_t *)b->copies[i].src - b->host);
    s = alone(b, 0, b->copies[0].bytes, (device_how){DEVICE_FROM_PEER, 0}, ret, err);
    if (s == KVS_OK)
        s = check_bytes(b, from, &right, err);
    *ret = right ? *ret : 0;
    return s;
}

/* One whose memory is out of reach, or comes over wrong, has no row. */
static kvs_status row_peer(bench *b, device *other, copy_table *t, kvs_err *err)
{
    copy_peer *p = &t->peers[t->n_peers];
    device_about about = {0};
    device_mem *mem = NULL;
    kvs_status s;

    if (b->d->ops->reaches == NULL || !b->d->ops->reaches(b->d, other))
        return KVS_OK;
    s = other->ops->mem_create(other, b->bytes, &mem, err);
    if (s != KVS_OK)
        return s;
    if (other->ops->about != NULL)
        other->ops->about(other, &about);
    if (other->ops->mem_reached(mem, b->mem)) {
        s = measure_peer(b, other, mem, &p->gbs, err);
        if (s == KVS_OK && p->gbs <= 0 && b->plan->on_wrong != NULL)
            b->plan->on_wrong(about.uuid);
    }
    if (s == KVS_OK && p->gbs > 0) {
        memcpy(p->uuid, about.uuid, sizeof p->uuid);
        t->n_peers++;
    }
    other->ops->mem_close(mem);
    return s;
}

/* One that cannot be opened, or has no memory left, has no row either. */
static kvs_status fill_peers(bench *b, copy_table *t, kvs_err *err)
{
    for (uint32_t i = 0; b->plan->open_peer != NULL && i < COPY_TABLE_PEERS; i++) {
        device *other = NULL;
        kvs_status s = b->plan->open_peer(b->plan->ud, i, &other, err);

        if (s == KVS_E_NOT_FOUND)
            return KVS_OK;
        if (s == KVS_OK) {
            s = row_peer(b, other, t, err);
            other->ops->close(other);
        }
        if (s == KVS_E_DEVICE_LOST)
            return s;
    }
    return KVS_OK;
}

/* ---- life ---- */

static kvs_status open_all(bench *b, kvs_err *err)
{
    device *d = NULL;
    kvs_status s = b->plan->open(b->plan->ud, &d, err);
    uint64_t had;
    void *p;

    if (s != KVS_OK)
        return s;
    b->d = d;
    b->copies = calloc(MAX_PIECES, sizeof *b->copies);
    p = mmap(NULL, b->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (b->copies == NULL || p == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %llu bytes", (unsigned long long)b->bytes);
    b->host = p;
    s = b->d->ops->host_register(b->d, b->host, b->bytes, err);
    b->registered = s == KVS_OK;
    if (s == KVS_OK)
        s = b->d->ops->mem_create(b->d, b->bytes, &b->mem, err);
    for (int dir = 0; dir < 2 && s == KVS_OK; dir++)
        s = b->d->ops->queue_open(b->d, dir == 0 ? DEVICE_LOAD : DEVICE_STORE, &b->queues[dir], err);
    if (s == KVS_OK)
        b->dev = b->d->ops->mem_base(b->mem, 0, &had);
    return s;
}

static void close_all(bench *b)
{
    for (int dir = 0; dir < 2; dir++)
        if (b->queues[dir] != NULL)
            b->d->ops->queue_close(b->queues[dir]);
    if (b->mem != NULL)
        b->d->ops->mem_close(b->mem);
    if (b->registered)
        b->d->ops->host_unregister(b->d, b->host, b->bytes);
    if (b->host != NULL)
        (void)munmap(b->host, b->bytes);
    if (b->d != NULL)
        b->d->ops->close(b->d);
    free(b->copies);
}

kvs_status calibrate_measure(const calibrate_plan *p, copy_table *ret, kvs_err *err)
{
    bench b = {.plan = p, .bytes = p->bytes};
    copy_table t = {.date = ""};
    device_about about = {0};
    kvs_status s = p->busy != NULL ? busy_start(&b.busy, p->busy, p->ud, err) : KVS_OK;

    if (s == KVS_OK)
        s = open_all(&b, err);
    if (s == KVS_OK)
        s = fill(&b, &t, err);
    busy_stop(&b.busy);
    if (s == KVS_OK)
        s = fill_peers(&b, &t, err);
    if (s == KVS_OK) {
        if (b.d->ops->about != NULL)
            b.d->ops->about(b.d, &about);
        (void)snprintf(t.card, sizeof t.card, "%s", about.name);
        memcpy(t.uuid, about.uuid, sizeof t.uuid);
        t.driver_version = about.driver_version;
        *ret = t;
    }
    close_all(&b);
    return s;
}

/* ---- the command ---- */

#define DEFAULT_FOLDER "/var/lib/kvstrided"

static const char *folder_of(const ctl *c)
{
    return c->folder != NULL ? c->folder : DEFAULT_FOLDER;
}

/* Where the table cannot be kept, nothing is measured. */
static kvs_status open_gpu(void *ud, device **ret, kvs_err *err)
{
    const ctl *c = ud;
    device *d = NULL;
    kvs_status s = device_cuda_open(&d, (uint32_t)c->gpu, err);

    if (s == KVS_OK && access(folder_of(c), W_OK | X_OK) != 0) {
        s = kvs_fail(err, KVS_E_CONFIG, "folder %.100s: %s", folder_of(c), strerror(errno));
        d->ops->close(d);
    }
    if (s == KVS_OK)
        *ret = d;
    if (s == KVS_OK && !c->json && !c->quiet)
        (void)fprintf(stderr,
                      "calibrate: for some seconds GPU and link are busy with this; what a daemon copies meanwhile "
                      "is slower, and falsifies the figures\n");
    return s;
}

static kvs_status open_other(void *ud, uint32_t i, device **ret, kvs_err *err)
{
    const ctl *c = ud;
    uint32_t n = 0, ordinal = i < (uint32_t)c->gpu ? i : i + 1;
    kvs_status s = device_cuda_count(&n, err);

    if (s == KVS_OK && ordinal >= n)
        s = kvs_fail(err, KVS_E_NOT_FOUND, "GPU %u: there are %u", (unsigned)ordinal, (unsigned)n);
    return s == KVS_OK ? device_cuda_open(ret, ordinal, err) : s;
}

static kvs_status attend(void *ud, bool (*on_call)(void *call_ud), void *call_ud, kvs_err *err)
{
    static const busy_cuda_shape SHAPE = {128, 128, 1024, 64};
    const ctl *c = ud;

    return busy_cuda_run((uint32_t)c->gpu, &SHAPE, on_call, call_ud, err);
}

static void on_step(uint32_t done, uint32_t of)
{
    progress_show("calibrate", done, of);
}

static void on_wrong(const uint8_t uuid[16])
{
    (void)fprintf(
        stderr,
        "kvstridectl: calibrate: what is copied from the GPU whose UUID begins with %02x%02x%02x%02x is not what is "
        "there: no LOADs together with that one (IOMMU? ACS?)\n",
        uuid[0], uuid[1], uuid[2], uuid[3]);
}

static void print_table(const copy_table *t)
{
    (void)printf("%-6s %9s   %15s %18s   %23s %23s\n", "", "", "alone, GB/s", "", "beside a busy process,",
                 "GB/s (its speed)");
    (void)printf("%-6s %9s   %15s %18s   %23s %23s\n", "", "piece", "copy engines", "kernel (blocks)", "copy engines",
                 "kernel");
    for (int d = 0; d < 2; d++)
        for (uint32_t i = 0; i < t->n[d]; i++) {
            const copy_row *r = &t->rows[d][i];

            (void)printf("%-6s %9llu   %15.1f %12.1f (%3u)   %16.1f (%.2f) %16.1f (%.2f)\n", d == 0 ? "load" : "store",
                         (unsigned long long)r->piece_bytes, r->engine, r->kernel, (unsigned)r->kernel_blocks,
                         r->beside_engine, r->left_by_engine, r->beside_kernel, r->left_by_kernel);
        }
    for (uint32_t i = 0; i < t->n_peers; i++)
        (void)printf("from the GPU whose UUID begins with %02x%02x%02x%02x: %.1f GB/s\n", t->peers[i].uuid[0],
                     t->peers[i].uuid[1], t->peers[i].uuid[2], t->peers[i].uuid[3], t->peers[i].gbs);
}

static int put_table(const copy_table *t)
{
    json_writer *w = json_writer_create();

    json_begin_object(w, NULL);
    copy_table_put(t, w);
    json_end(w);
    return ctl_put(w, CTL_OK);
}

int ctl_calibrate(const ctl *c)
{
    ctl own = *c;
    calibrate_plan p = {.open = open_gpu,
                        .open_peer = open_other,
                        .busy = attend,
                        .ud = &own,
                        .bytes = UINT64_C(256) << 20,
                        .beside_ms = 100,
                        .on_step = progress_wanted(c->quiet) ? on_step : NULL,
                        .on_wrong = on_wrong};
    time_t now = time(NULL);
    struct tm day;
    char folder[PATH_MAX];
    copy_table t;
    kvs_err err = {0};
    kvs_status s;

    s = calibrate_measure(&p, &t, &err);
    if (p.on_step != NULL)
        progress_end();
    if (s == KVS_OK) {
        (void)strftime(t.date, sizeof t.date, "%Y-%m-%d", gmtime_r(&now, &day));
        s = copy_table_write(folder_of(c), &t, &err);
    }
    if (s != KVS_OK)
        return ctl_fail_as(c, "calibrate", s, &err, s == KVS_E_CONFIG ? CTL_USAGE : CTL_UNABLE);
    if (c->json)
        return put_table(&t);
    print_table(&t);
    (void)snprintf(folder, sizeof folder, "%s", folder_of(c));
    text_tame(folder);
    (void)printf("kept in %s; a daemon goes by it after 'kvstridectl reload' or a restart%s\n", folder,
                 t.n_peers > 0 ? " (to load together with another GPU: a restart)" : "");
    return CTL_OK;
}
