#ifdef KVS_CUDA
/* A queue of the cuda device: a stream, a ring of events for its marks, and what kernels need beside their operands.
 *
 * Marks are numbers; mark m has event m % MARKS.  At most MARKS are open: giving out another one waits for the oldest.
 * An event that wakes a sleeper costs the copy engine 3 us, of which a batch of 16 MiB felt 1 %: queues that copy have plain
 * ones, and look at them again and again where a copy takes longer than it can.
 * Copies from another GPU go in a stream of their own, beside those from the host, which take other ways: their marks are reached
 * out of order.  Sums have one, too: they read what the copies read, and shall not wait for them.
 * A kernel call's small inputs (lengths, tables, slots) travel through one pinned buffer, so that a second call waits
 * for the first one to end. */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels/cuda_device.h"
#include "kernels/cuda_error.h"
#include "kernels/kernels_cuda.h"
#include "kernels/mla_check.h"
#include "kernels/page_copy.h"
#include "proto/layout.h"

enum {
    MARKS = 64,
    BATCH = 256,      /* copies of one driver call */
    SPIN_NS = 300000, /* then sleep: waking up costs some 40 us, which a batch of 16 MiB (300 us) would feel */
    STEP_NS = 50000,  /* of the sleep, where nobody wakes us */
    EARLY_NS = 80000, /* a timer may come that much too late */
    BYTES_A_NS = 56,  /* of a copy, at best: it is not worth looking before */
    HEAD_BYTES = 64,  /* of the buffers for small inputs: the count of bad entries */
    SCALE_BYTES = 4,  /* behind them: the scale of an mla_fp8 view */
};
#define MAX_INPUT_BYTES     (UINT64_C(64) << 20)
#define MAX_WORKSPACE_BYTES (UINT64_C(1) << 30)

typedef struct cuda_queue {
    device_queue base;
    cudaStream_t stream;
    cudaStream_t peers; /* of a queue that loads */
    cudaStream_t sums;  /* of one that stores; waited for before a call returns */
    cudaEvent_t summed;
    uint64_t *parts; /* pinned: DEVICE_SUM_PARTS */
    cudaEvent_t events[MARKS];
    bool copies;               /* else it is for kernels */
    bool of_peers[MARKS];      /* whose events these are: not of the first stream */
    uint64_t given, reached;   /* reached, and all below: of the first stream */
    uint64_t bytes[MARKS];     /* of all copies ever queued up to a mark */
    uint64_t queued_ns[MARKS]; /* when */
    uint64_t all_bytes;        /* queued */
    uint64_t reached_bytes;    /* up to `reached`, and when that was seen */
    uint64_t reached_ns;
    bool no_batches; /* the driver is too old for them */
    void *dsts[BATCH];
    const void *srcs[BATCH];
    size_t sizes[BATCH];
    kvs_page_piece pieces[KVS_PAGE_COPY_PIECES];
    uint8_t *input, *dev_input; /* pinned and device: HEAD_BYTES, then what the call brings */
    uint64_t input_bytes;
    void *workspace;
    uint64_t workspace_bytes;
    uint64_t kernel_mark; /* of the last kernel call; its results go where ret_bad points */
    uint32_t *ret_bad;
} cuda_queue;

static cuda_device *device_of(const cuda_queue *q)
{
    return (cuda_device *)q->base.dev;
}

/* --- marks -------------------------------------------------------------------------------------------------- */

static uint64_t now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void nap(uint64_t ns)
{
    (void)clock_nanosleep(CLOCK_MONOTONIC, 0, &(struct timespec){.tv_sec = 0, .tv_nsec = (long)ns}, NULL);
}

/* An event that is not reached must not be what the next launch finds when it asks for its error. */
static cudaError_t query(cudaEvent_t event)
{
    cudaError_t e = cudaEventQuery(event);

    if (e == cudaErrorNotReady)
        (void)cudaGetLastError();
    return e;
}

/* Sleep while a copy cannot be done yet, spin when it is about to be, and then leave the rest to the driver or look again
 * from time to time. */
static cudaError_t event_wait(const cuda_queue *q, cudaEvent_t event, uint64_t earliest)
{
    cudaError_t e = query(event);
    uint64_t now = now_ns(), end;

    /* Estimates are of milliseconds; a second is a queue that is very full, and no reason to oversleep. */
    if (e == cudaErrorNotReady && earliest > now + 2 * EARLY_NS && earliest - now < 1000000000u)
        nap(earliest - now - EARLY_NS);
    for (end = now_ns() + SPIN_NS; e == cudaErrorNotReady && now_ns() < end;)
        e = query(event);
    while (e == cudaErrorNotReady && q->copies) {
        nap(STEP_NS);
        e = query(event);
    }
    return e != cudaErrorNotReady ? e : cudaEventSynchronize(event);
}

/* Whatever it is that goes wrong here: what was queued is in an unknown state. */
static kvs_status queue_broke(cuda_queue *q, kvs_err *err, const char *call, cudaError_t e)
{
    (void)cuda_failed(device_of(q), err, call, e);
    atomic_store_explicit(&device_of(q)->lost, true, memory_order_relaxed);
    if (err != NULL)
        err->status = KVS_E_DEVICE_LOST;
    return KVS_E_DEVICE_LOST;
}

/* When the copies up to a mark can be done: those behind the last one that was reached began when that was, or when they were
 * queued. */
static uint64_t not_before(const cuda_queue *q, uint64_t mark)
{
    uint64_t queued = q->queued_ns[(q->reached + 1) % MARKS];
    uint64_t began = queued > q->reached_ns ? queued : q->reached_ns;

    return began + (q->bytes[mark % MARKS] - q->reached_bytes) / BYTES_A_NS;
}

static kvs_status reach(cuda_queue *q, uint64_t mark, kvs_err *err)
{
    /* Else its event is another mark's by now: this one was reached before that was given out. */
    bool open = q->given - mark < MARKS;
    cudaError_t e;

    if (open && q->of_peers[mark % MARKS]) {
        e = event_wait(q, q->events[mark % MARKS], 0); /* a batch of 16 MiB takes 45 us: not worth a sleep */
        if (e != cudaSuccess)
            return queue_broke(q, err, "cudaEventSynchronize", e);
    } else if (open && mark > q->reached) {
        e = event_wait(q, q->events[mark % MARKS], not_before(q, mark));
        if (e != cudaSuccess)
            return queue_broke(q, err, "cudaEventSynchronize", e);
        q->reached = mark;
        q->reached_bytes = q->bytes[mark % MARKS];
        q->reached_ns = now_ns();
    }
    if (q->ret_bad != NULL && q->reached >= q->kernel_mark) {
        memcpy(q->ret_bad, q->input, sizeof *q->ret_bad);
        q->ret_bad = NULL;
    }
    return KVS_OK;
}

/* Behind all that was queued in one of its streams. */
static kvs_status give_mark(cuda_queue *q, cudaStream_t stream, uint64_t *ret, kvs_err *err)
{
    uint64_t mark = q->given + 1;
    kvs_status s = mark > MARKS ? reach(q, mark - MARKS, err) : KVS_OK;
    cudaError_t e;

    if (s != KVS_OK)
        return s;
    e = cudaEventRecord(q->events[mark % MARKS], stream);
    if (e != cudaSuccess)
        return queue_broke(q, err, "cudaEventRecord", e);
    q->bytes[mark % MARKS] = q->all_bytes;
    q->queued_ns[mark % MARKS] = now_ns();
    q->of_peers[mark % MARKS] = stream == q->peers;
    *ret = q->given = mark;
    return KVS_OK;
}

kvs_status cuda_queue_wait(device_queue *dq, uint64_t mark, kvs_err *err)
{
    cuda_queue *q = (cuda_queue *)dq;
    kvs_status s = cuda_enter(device_of(q), err);

    if (s == KVS_OK && mark > q->given)
        s = kvs_fail(err, KVS_E_INVALID, "mark: %" PRIu64 " was not given out, the last was %" PRIu64, mark, q->given);
    return s != KVS_OK ? s : reach(q, mark, err);
}

/* --- life --------------------------------------------------------------------------------------------------- */

void cuda_queue_close(device_queue *dq)
{
    cuda_queue *q = (cuda_queue *)dq;

    if (q == NULL)
        return;
    /* On a lost device all of these fail, which frees nothing and harms nothing. */
    (void)cudaSetDevice(device_of(q)->ordinal);
    if (q->stream != NULL) {
        (void)cudaStreamSynchronize(q->stream);
        (void)cudaStreamDestroy(q->stream);
    }
    if (q->peers != NULL) {
        (void)cudaStreamSynchronize(q->peers);
        (void)cudaStreamDestroy(q->peers);
    }
    if (q->sums != NULL) {
        (void)cudaStreamSynchronize(q->sums);
        (void)cudaStreamDestroy(q->sums);
    }
    if (q->summed != NULL)
        (void)cudaEventDestroy(q->summed);
    for (int i = 0; i < MARKS; i++)
        if (q->events[i] != NULL)
            (void)cudaEventDestroy(q->events[i]);
    (void)cudaFreeHost(q->parts);
    (void)cudaFreeHost(q->input);
    (void)cudaFree(q->dev_input);
    (void)cudaFree(q->workspace);
    (void)cudaGetLastError();
    free(q);
}

static cudaError_t open_sums(cuda_queue *q)
{
    cudaError_t e = cudaStreamCreateWithFlags(&q->sums, cudaStreamNonBlocking);

    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&q->summed, cudaEventDisableTiming);
    return e == cudaSuccess
               ? cudaHostAlloc((void **)&q->parts, DEVICE_SUM_PARTS * sizeof *q->parts, cudaHostAllocPortable)
               : e;
}

kvs_status cuda_queue_open(device *base, device_dir dir, device_queue **ret, kvs_err *err)
{
    cuda_device *d = (cuda_device *)base;
    kvs_status s = cuda_enter(d, err);
    unsigned flags;
    cuda_queue *q;
    cudaError_t e;

    if (s != KVS_OK)
        return s;
    q = calloc(1, sizeof *q);
    if (q == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "queue_open: no memory for %zu bytes", sizeof *q);
    q->base.dev = base;
    q->copies = dir != DEVICE_COMPUTE;
    flags = cudaEventDisableTiming | (q->copies ? 0 : cudaEventBlockingSync);
    e = cudaStreamCreateWithFlags(&q->stream, cudaStreamNonBlocking);
    for (int i = 0; i < MARKS && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&q->events[i], flags);
    if (e == cudaSuccess && dir == DEVICE_LOAD)
        e = cudaStreamCreateWithFlags(&q->peers, cudaStreamNonBlocking);
    if (e == cudaSuccess && dir == DEVICE_STORE)
        e = open_sums(q);
    if (e != cudaSuccess) {
        s = cuda_failed(d, err, "queue_open", e);
        cuda_queue_close(&q->base);
        return s;
    }
    *ret = &q->base;
    return KVS_OK;
}

/* --- copies ------------------------------------------------------------------------------------------------- */

static cudaError_t copy_one_by_one(cuda_queue *q, size_t n, cudaStream_t stream)
{
    cudaError_t e = cudaSuccess;

    for (size_t i = 0; i < n && e == cudaSuccess; i++)
        e = cudaMemcpyAsync(q->dsts[i], q->srcs[i], q->sizes[i], cudaMemcpyDefault, stream);
    return e;
}

/* Sources are read in stream order: what an engine wrote before its counter must be seen, and "any order" would
 * allow a device source to be read before that. */
static cudaError_t copy_batch(cuda_queue *q, size_t n, cudaStream_t stream)
{
#if CUDART_VERSION >= 12080
    struct cudaMemcpyAttributes attributes = {.srcAccessOrder = cudaMemcpySrcAccessOrderStream};
    size_t first = 0;
    cudaError_t e;

    if (q->no_batches || n < 2)
        return copy_one_by_one(q, n, stream);
#if CUDART_VERSION >= 13000
    e = cudaMemcpyBatchAsync(q->dsts, q->srcs, q->sizes, n, &attributes, &first, 1, stream);
#else
    {
        size_t failed = 0;

        e = cudaMemcpyBatchAsync(q->dsts, (void **)q->srcs, q->sizes, n, &attributes, &first, 1, &failed, stream);
    }
#endif
    if (e != cudaErrorNotSupported && e != cudaErrorCallRequiresNewerDriver && e != cudaErrorSymbolNotFound)
        return e;
    (void)cudaGetLastError();
    q->no_batches = true;
#endif
    return copy_one_by_one(q, n, stream);
}

/* The next copies that have bytes; *at moves behind them. */
static size_t fill_batch(cuda_queue *q, const device_copy *c, size_t n, size_t *at)
{
    size_t k = 0;

    for (; *at < n && k < BATCH; (*at)++)
        if (c[*at].bytes > 0) {
            q->dsts[k] = c[*at].dst;
            q->srcs[k] = c[*at].src;
            q->sizes[k++] = c[*at].bytes;
        }
    return k;
}

static kvs_status copy_by_engine(cuda_queue *q, const device_copy *c, size_t n, cudaStream_t stream, kvs_err *err)
{
    cudaError_t e = cudaSuccess;

    for (size_t at = 0; e == cudaSuccess && at < n;) {
        size_t k = fill_batch(q, c, n, &at);

        if (k > 0)
            e = copy_batch(q, k, stream);
    }
    return e == cudaSuccess ? KVS_OK : cuda_failed(device_of(q), err, "cudaMemcpyBatchAsync", e);
}

/* Nothing of this queue is on its way any more. */
static cudaError_t finish_copies(cuda_queue *q)
{
    cudaError_t e = q->peers != NULL ? cudaStreamSynchronize(q->peers) : cudaSuccess;

    return e == cudaSuccess ? cudaStreamSynchronize(q->stream) : e;
}

static bool fits_kernel(const cuda_queue *q, const device_copy *c, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((((uintptr_t)c[i].dst | (uintptr_t)c[i].src | c[i].bytes) & 15) != 0 ||
            c[i].bytes > KVS_PAGE_COPY_MAX_BYTES)
            return false;
    return q->copies;
}

static kvs_status launch_pieces(cuda_queue *q, const device_copy *c, uint32_t n, uint32_t n_blocks, kvs_err *err)
{
    uint32_t n_tiles;

    for (uint32_t i = 0; i < n; i++)
        q->pieces[i] = (kvs_page_piece){.dst = c[i].dst, .src = c[i].src, .bytes = (uint32_t)c[i].bytes};
    n_tiles = kvs_page_copy_plan(q->pieces, n);
    return n_tiles == 0 ? KVS_OK /* no bytes at all: all else has been looked at */
                        : kvs_page_copy_cuda(q->pieces, n, n_tiles, n_blocks, q->stream, err);
}

static kvs_status copy_by_kernel(cuda_queue *q, const device_copy *c, size_t n, uint32_t n_blocks, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (size_t at = 0; s == KVS_OK && at < n; at += KVS_PAGE_COPY_PIECES) {
        size_t left = n - at;

        s = launch_pieces(q, c + at, left < KVS_PAGE_COPY_PIECES ? (uint32_t)left : (uint32_t)KVS_PAGE_COPY_PIECES,
                          n_blocks, err);
    }
    if (s == KVS_E_DEVICE_LOST)
        atomic_store_explicit(&device_of(q)->lost, true, memory_order_relaxed);
    return s;
}

kvs_status cuda_queue_copy(device_queue *dq, const device_copy *c, size_t n, device_how how, uint64_t *ret_mark,
                           kvs_err *err)
{
    cuda_queue *q = (cuda_queue *)dq;
    kvs_status s = cuda_enter(device_of(q), err);
    bool peers = how.means == DEVICE_FROM_PEER && q->peers != NULL;
    cudaError_t end;

    if (s != KVS_OK)
        return s;
    if (peers)
        s = copy_by_engine(q, c, n, q->peers, err);
    else if (how.means == DEVICE_BY_KERNEL && fits_kernel(q, c, n))
        s = copy_by_kernel(q, c, n, how.n_blocks, err);
    else
        s = copy_by_engine(q, c, n, q->stream, err);
    if (s != KVS_OK && s != KVS_E_DEVICE_LOST) {
        /* Earlier copies may be on their way; the caller is promised that none is. */
        end = finish_copies(q);
        if (end != cudaSuccess)
            s = queue_broke(q, err, "cudaStreamSynchronize", end);
    }
    if (s != KVS_OK)
        return s;
    for (size_t i = 0; i < n; i++)
        q->all_bytes += peers ? 0 : c[i].bytes;
    return give_mark(q, peers ? q->peers : q->stream, ret_mark, err);
}

/* --- sums --------------------------------------------------------------------------------------------------- */

static kvs_status check_sums(const cuda_queue *q, const device_sums *s, kvs_err *err)
{
    if (q->sums == NULL)
        return kvs_fail(err, KVS_E_INVALID, "sum: this queue does not store");
    if (s->part_bytes == 0 || s->n > DEVICE_SUM_PARTS ||
        s->n * kvs_part_sum_parts(s->bytes, s->part_bytes) > DEVICE_SUM_PARTS)
        return kvs_fail(err, KVS_E_LIMIT, "sum: parts of %" PRIu32 " blocks are more than %d", s->n, DEVICE_SUM_PARTS);
    return KVS_OK;
}

kvs_status cuda_queue_sum(device_queue *dq, const device_sums *s, kvs_err *err)
{
    cuda_queue *q = (cuda_queue *)dq;
    kvs_status st = cuda_enter(device_of(q), err);
    cudaError_t e;

    if (st == KVS_OK)
        st = check_sums(q, s, err);
    if (st == KVS_OK)
        st = kvs_part_sum_cuda(s->blocks, s->n, s->bytes, s->part_bytes, q->parts, q->sums, err);
    if (st == KVS_E_DEVICE_LOST)
        atomic_store_explicit(&device_of(q)->lost, true, memory_order_relaxed);
    if (st != KVS_OK)
        return st;
    e = cudaEventRecord(q->summed, q->sums);
    if (e != cudaSuccess)
        return queue_broke(q, err, "cudaEventRecord", e);
    e = event_wait(q, q->summed, 0);
    if (e != cudaSuccess)
        return queue_broke(q, err, "cudaEventSynchronize", e);
    memcpy(s->parts, q->parts, s->n * kvs_part_sum_parts(s->bytes, s->part_bytes) * sizeof *s->parts);
    return KVS_OK;
}

/* --- kernels ------------------------------------------------------------------------------------------------ */

static kvs_status want_input(cuda_queue *q, uint64_t bytes, kvs_err *err)
{
    cudaError_t e;

    bytes += HEAD_BYTES;
    if (bytes > MAX_INPUT_BYTES)
        return kvs_fail(err, KVS_E_LIMIT, "tables and lengths: %" PRIu64 " bytes are more than %" PRIu64, bytes,
                        MAX_INPUT_BYTES);
    if (bytes <= q->input_bytes)
        return KVS_OK;
    bytes = bytes < 4096 ? 4096 : bytes + bytes / 2;
    (void)cudaFreeHost(q->input);
    (void)cudaFree(q->dev_input);
    q->input = q->dev_input = NULL;
    q->input_bytes = 0;
    e = cudaHostAlloc((void **)&q->input, bytes, cudaHostAllocPortable);
    if (e == cudaSuccess)
        e = cudaMalloc((void **)&q->dev_input, bytes);
    if (e != cudaSuccess)
        return cuda_failed_bytes(device_of(q), err, "tables and lengths", bytes, e);
    q->input_bytes = bytes;
    return KVS_OK;
}

static kvs_status want_workspace(cuda_queue *q, uint64_t bytes, kvs_err *err)
{
    cudaError_t e;

    if (bytes > MAX_WORKSPACE_BYTES)
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes are more than %" PRIu64 "; ask for fewer parts",
                        bytes, MAX_WORKSPACE_BYTES);
    if (bytes <= q->workspace_bytes)
        return KVS_OK;
    (void)cudaFree(q->workspace);
    q->workspace = NULL;
    q->workspace_bytes = 0;
    e = cudaMalloc(&q->workspace, bytes);
    if (e != cudaSuccess)
        return cuda_failed_bytes(device_of(q), err, "workspace", bytes, e);
    q->workspace_bytes = bytes;
    return KVS_OK;
}

/* The buffers are free again, and large enough. */
static kvs_status kernel_begin(cuda_queue *q, uint64_t input_bytes, uint64_t workspace_bytes, kvs_err *err)
{
    kvs_status s = cuda_enter(device_of(q), err);

    if (s == KVS_OK)
        s = reach(q, q->kernel_mark, err);
    if (s == KVS_OK)
        s = want_input(q, input_bytes, err);
    return s == KVS_OK ? want_workspace(q, workspace_bytes, err) : s;
}

static kvs_status send_input(cuda_queue *q, uint64_t bytes, kvs_err *err)
{
    cudaError_t e =
        cudaMemcpyAsync(q->dev_input + HEAD_BYTES, q->input + HEAD_BYTES, bytes, cudaMemcpyHostToDevice, q->stream);

    return e == cudaSuccess ? KVS_OK : cuda_failed(device_of(q), err, "cudaMemcpyAsync", e);
}

static kvs_status kernel_end(cuda_queue *q, uint32_t *ret_bad, uint64_t *ret_mark, kvs_err *err)
{
    cudaError_t e = cudaMemcpyAsync(q->input, q->dev_input, sizeof *ret_bad, cudaMemcpyDeviceToHost, q->stream);
    kvs_status s =
        e == cudaSuccess ? give_mark(q, q->stream, ret_mark, err) : queue_broke(q, err, "cudaMemcpyAsync", e);

    if (s == KVS_OK) {
        q->kernel_mark = *ret_mark;
        q->ret_bad = ret_bad;
    }
    return s;
}

/* The launch was refused, or failed: `s` says which.  Its input may still be on its way. */
static kvs_status kernel_failed(cuda_queue *q, kvs_status s, kvs_err *err)
{
    cudaError_t e;

    if (s == KVS_E_DEVICE_LOST)
        atomic_store_explicit(&device_of(q)->lost, true, memory_order_relaxed);
    e = cudaStreamSynchronize(q->stream);
    return e == cudaSuccess || s == KVS_E_DEVICE_LOST ? s : queue_broke(q, err, "cudaStreamSynchronize", e);
}

/* Slots into the pinned buffer.  Of tokens with one slot only the last keeps it: on a GPU they would be written at
 * once.  Bad slots stay, to be counted.  `seen`: a table of 2^k > n slots for open addressing, all -1. */
static void take_slots(int64_t *dst, const int64_t *src, uint32_t n, uint64_t n_slots, int64_t *seen, uint64_t mask)
{
    for (uint32_t t = n; t-- > 0;) {
        uint64_t at = (uint64_t)src[t] * UINT64_C(0x9E3779B97F4A7C15) >> 20 & mask;

        dst[t] = src[t];
        if (src[t] < 0 || (uint64_t)src[t] >= n_slots)
            continue;
        while (seen[at] != -1 && seen[at] != src[t])
            at = (at + 1) & mask;
        if (seen[at] == src[t])
            dst[t] = -1;
        seen[at] = src[t];
    }
}

static kvs_status stage_slots(cuda_queue *q, const kvs_mla_write_args *a, kvs_err *err)
{
    uint64_t size = 16;
    int64_t *seen;

    while (size < (uint64_t)a->n_tokens * 2)
        size *= 2;
    seen = malloc(size * sizeof *seen);
    if (seen == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "slot_mapping: no memory for %" PRIu64 " slots", size);
    memset(seen, 0xFF, size * sizeof *seen);
    take_slots((int64_t *)(void *)(q->input + HEAD_BYTES), a->slot_mapping, a->n_tokens,
               (uint64_t)a->view.n_blocks * a->view.tokens_per_block, seen, size - 1);
    free(seen);
    return KVS_OK;
}

/* The scale of the one format that has one; the kernels look at no other. */
static void stage_scale(cuda_queue *q, uint32_t format, const float *scale, uint64_t at)
{
    if (format == KVS_FORMAT_mla_fp8)
        memcpy(q->input + HEAD_BYTES + at, scale, sizeof *scale);
}

kvs_status cuda_queue_mla_write(device_queue *dq, const kvs_mla_write_args *a, uint32_t *ret_bad, uint64_t *ret_mark,
                                kvs_err *err)
{
    cuda_queue *q = (cuda_queue *)dq;
    uint64_t scale_at = (uint64_t)a->n_tokens * sizeof(int64_t), bytes = scale_at + SCALE_BYTES;
    kvs_mla_write_args on_device = *a;
    uint32_t type;
    kvs_status s = kvs_mla_write_check(a, &type, err);

    if (s == KVS_OK)
        s = kernel_begin(q, bytes, 0, err);
    if (s == KVS_OK)
        s = stage_slots(q, a, err);
    if (s == KVS_OK) {
        stage_scale(q, a->view.format, a->scale, scale_at);
        s = send_input(q, bytes, err);
    }
    if (s != KVS_OK)
        return s;
    on_device.slot_mapping = (const int64_t *)(const void *)(q->dev_input + HEAD_BYTES);
    on_device.scale = (const float *)(const void *)(q->dev_input + HEAD_BYTES + scale_at);
    s = kvs_mla_write_cuda(&on_device, (uint32_t *)(void *)q->dev_input, q->stream, err);
    return s == KVS_OK ? kernel_end(q, ret_bad, ret_mark, err) : kernel_failed(q, s, err);
}

/* Columns of the table that the longest sequence needs.  Parts are chosen from these and not from the table's width, which
 * may be far more. */
static uint32_t used_width(const int32_t *seq_len, uint32_t n_seqs, uint32_t table_width, uint32_t tokens)
{
    uint64_t longest = 0;

    for (uint32_t i = 0; i < n_seqs; i++)
        if (seq_len[i] > 0 && (uint64_t)seq_len[i] <= (uint64_t)table_width * tokens && (uint64_t)seq_len[i] > longest)
            longest = (uint64_t)seq_len[i];
    return (uint32_t)((longest + tokens - 1) / tokens);
}

/* Lengths, bounds of the queries (or NULL), the table and a scale: host memory. */
typedef struct tables {
    const kvs_view *view;
    const int32_t *seq_len, *q_start, *block_table;
    const float *scale;
    uint64_t table_stride;
    uint32_t n_seqs, table_width;
    uint64_t start_at, table_at, scale_at; /* places behind the head */
} tables;

static kvs_status tables_place(tables *t, kvs_err *err)
{
    const uint64_t lens = ((uint64_t)t->n_seqs * sizeof *t->seq_len + 15) / 16 * 16;
    const uint64_t starts = t->q_start != NULL ? ((t->n_seqs + UINT64_C(1)) * sizeof *t->q_start + 15) / 16 * 16 : 0;

    if (t->n_seqs > 0 && t->table_width > MAX_INPUT_BYTES / t->n_seqs)
        return kvs_fail(err, KVS_E_LIMIT,
                        "block_table: %" PRIu32 " x %" PRIu32 " entries are more than %" PRIu64 " bytes", t->n_seqs,
                        t->table_width, MAX_INPUT_BYTES);
    t->start_at = lens;
    t->table_at = lens + starts;
    t->scale_at = t->table_at + (uint64_t)t->n_seqs * t->table_width * sizeof *t->block_table;
    return KVS_OK;
}

/* The table without the gaps between its rows. */
static void tables_stage(cuda_queue *q, const tables *t)
{
    uint8_t *at = q->input + HEAD_BYTES;

    stage_scale(q, t->view->format, t->scale, t->scale_at);
    if (t->n_seqs == 0)
        return;
    memcpy(at, t->seq_len, t->n_seqs * sizeof *t->seq_len);
    if (t->q_start != NULL)
        memcpy(at + t->start_at, t->q_start, (t->n_seqs + UINT64_C(1)) * sizeof *t->q_start);
    for (uint64_t i = 0; i < t->n_seqs && t->table_width > 0; i++)
        memcpy(at + t->table_at + i * t->table_width * sizeof *t->block_table, t->block_table + i * t->table_stride,
               t->table_width * sizeof *t->block_table);
}

static const void *on_device_at(const cuda_queue *q, uint64_t at)
{
    return q->dev_input + HEAD_BYTES + at;
}

static kvs_status tables_send(cuda_queue *q, tables *t, uint64_t workspace_bytes, kvs_err *err)
{
    kvs_status s = tables_place(t, err);

    if (s == KVS_OK)
        s = kernel_begin(q, t->scale_at + SCALE_BYTES, workspace_bytes, err);
    if (s != KVS_OK)
        return s;
    tables_stage(q, t);
    return send_input(q, t->scale_at + SCALE_BYTES, err);
}

kvs_status cuda_queue_mla_decode(device_queue *dq, const kvs_mla_decode_args *a, kvs_mla_decode_result *ret,
                                 uint64_t *ret_mark, kvs_err *err)
{
    cuda_queue *q = (cuda_queue *)dq;
    kvs_mla_decode_args on_device = *a;
    kvs_mla_decode_result result;
    tables t = {.view = &a->view,
                .seq_len = a->seq_len,
                .block_table = a->block_table,
                .scale = a->kv_scale,
                .table_stride = a->table_stride,
                .n_seqs = a->n_seqs,
                .table_width = a->table_width};
    kvs_status s = kvs_mla_decode_check(a, err);

    if (s != KVS_OK)
        return s;
    if (!a->fixed_split)
        on_device.table_width = used_width(a->seq_len, a->n_seqs, a->table_width, a->view.tokens_per_block);
    on_device.parts = kvs_mla_decode_cuda_parts(&on_device);
    on_device.table_width = a->table_width;
    s = tables_send(q, &t, kvs_mla_decode_cuda_workspace(&on_device), err);
    if (s != KVS_OK)
        return s;
    on_device.seq_len = on_device_at(q, 0);
    on_device.block_table = on_device_at(q, t.table_at);
    on_device.table_stride = a->table_width;
    on_device.kv_scale = on_device_at(q, t.scale_at);
    s = kvs_mla_decode_cuda(&on_device, q->workspace, q->workspace_bytes, (uint32_t *)(void *)q->dev_input, &result,
                            q->stream, err);
    if (s != KVS_OK)
        return kernel_failed(q, s, err);
    *ret = result;
    return kernel_end(q, &ret->bad, ret_mark, err);
}

kvs_status cuda_queue_mla_extend(device_queue *dq, const kvs_mla_extend_args *a, kvs_mla_decode_result *ret,
                                 uint64_t *ret_mark, kvs_err *err)
{
    cuda_queue *q = (cuda_queue *)dq;
    kvs_mla_extend_args on_device = *a;
    kvs_mla_decode_result result;
    tables t = {.view = &a->view,
                .seq_len = a->seq_len,
                .q_start = a->q_start,
                .block_table = a->block_table,
                .scale = a->kv_scale,
                .table_stride = a->table_stride,
                .n_seqs = a->n_seqs,
                .table_width = a->table_width};
    kvs_status s = kvs_mla_extend_check(a, err);

    if (s != KVS_OK)
        return s;
    if (!a->fixed_split)
        on_device.table_width = used_width(a->seq_len, a->n_seqs, a->table_width, a->view.tokens_per_block);
    on_device.parts = kvs_mla_extend_cuda_parts(&on_device);
    on_device.table_width = a->table_width;
    s = tables_send(q, &t, kvs_mla_extend_cuda_workspace(&on_device), err);
    if (s != KVS_OK)
        return s;
    on_device.seq_len = on_device_at(q, 0);
    on_device.q_start = on_device_at(q, t.start_at);
    on_device.block_table = on_device_at(q, t.table_at);
    on_device.table_stride = a->table_width;
    on_device.kv_scale = on_device_at(q, t.scale_at);
    s = kvs_mla_extend_cuda(&on_device, q->workspace, q->workspace_bytes, (uint32_t *)(void *)q->dev_input, &result,
                            q->stream, err);
    if (s != KVS_OK)
        return kernel_failed(q, s, err);
    *ret = result;
    return kernel_end(q, &ret->bad, ret_mark, err);
}
#else
typedef int kvs_no_cuda_queue; /* a translation unit holds a declaration */
#endif
