/* What the device makes of the card: batched copies beside one large raw copy of the same run, and decode beside the
 * floor that bytes and operations set.  Medians; decode by graph replays over layers in turn, so that no input stays in
 * the cache. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <cuda_runtime_api.h>

#include "kernels/kernels_cuda.h"
#include "proto/layout.h"
#include "tests/gpu/fill_cuda.h"
#include "tests/support/random.h"

enum { BLOCK = 61 * 73728, BLOCKS = 200, POOL = 400, ROUNDS = 9, LAYERS = 4, PAGE_TOKENS = 64, ROW = 1152 };
#define GB    1e9
#define TOTAL ((uint64_t)BLOCK * BLOCKS)

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

/* --- copies ------------------------------------------------------------------------------------------------------- */

static const device_how BY_ENGINE = {DEVICE_BY_ENGINE, 0};

typedef struct mover {
    device_queue *q;
    device_copy copies[BLOCKS];
    size_t a_call; /* copies of one call; each is waited for before the next but one is queued */
    size_t n;
    bool failed;
} mover;

static void *move(void *arg)
{
    mover *m = arg;
    const device_ops *ops = m->q->dev->ops;
    uint64_t marks[2] = {0, 0};
    kvs_err err;
    int turn = 0;

    for (size_t i = 0; i < m->n; i += m->a_call, turn ^= 1) {
        size_t n = m->n - i < m->a_call ? m->n - i : m->a_call;

        m->failed |= ops->wait(m->q, marks[turn], &err) != KVS_OK ||
                     ops->copy(m->q, m->copies + i, n, BY_ENGINE, &marks[turn], &err) != KVS_OK;
    }
    m->failed |= ops->wait(m->q, marks[0], &err) != KVS_OK || ops->wait(m->q, marks[1], &err) != KVS_OK;
    return NULL;
}

static double rate(mover *load, mover *store)
{
    double seconds[ROUNDS];

    for (int i = 0; i < ROUNDS; i++) {
        double start = gpu_seconds();
        pthread_t thread;

        if (load != NULL && store != NULL) {
            if (pthread_create(&thread, NULL, move, store) != 0)
                return 0;
            (void)move(load);
            (void)pthread_join(thread, NULL);
        } else
            (void)move(load != NULL ? load : store);
        seconds[i] = gpu_seconds() - start;
    }
    return (double)TOTAL * (load != NULL && store != NULL ? 2 : 1) / median(seconds, ROUNDS) / GB;
}

static void set_raw(mover *m, uint8_t *host, uint8_t *dev, bool load)
{
    m->copies[0] = load ? (device_copy){dev, host, TOTAL} : (device_copy){host, dev, TOTAL};
    m->n = m->a_call = 1;
}

static void set_blocks(mover *m, uint8_t *host, uint8_t *dev, bool load, size_t a_call, rnd *r)
{
    static uint32_t order[2][POOL];

    for (int k = 0; k < 2; k++)
        for (uint32_t i = 0; i < POOL; i++) {
            uint32_t at = (uint32_t)rnd_below(r, i + 1);

            order[k][i] = order[k][at];
            order[k][at] = i;
        }
    for (uint32_t i = 0; i < BLOCKS; i++) {
        uint8_t *h = host + (uint64_t)order[0][i] * BLOCK, *d = dev + (uint64_t)order[1][i] * BLOCK;

        m->copies[i] = load ? (device_copy){d, h, BLOCK} : (device_copy){h, d, BLOCK};
    }
    m->n = BLOCKS;
    m->a_call = a_call;
}

static bool copies_of_whole_blocks(device *d)
{
    uint64_t pool = (uint64_t)BLOCK * POOL;
    uint8_t *host = mmap(NULL, pool * 2, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0), *dev;
    static mover load, store;
    device_mem *m = NULL;
    kvs_err err = {.msg = ""};
    double raw[3], start = gpu_seconds();
    uint64_t bytes;
    rnd r = {1};

    if (host == MAP_FAILED || d->ops->host_register(d, host, pool * 2, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    (void)printf("      %.2f GB touched and pinned in %.2f s\n", (double)pool * 2 / GB, gpu_seconds() - start);
    if (d->ops->mem_create(d, pool * 2, &m, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_LOAD, &load.q, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_STORE, &store.q, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    dev = d->ops->mem_base(m, 0, &bytes);
    set_raw(&load, host, dev, true);
    set_raw(&store, host + pool, dev + pool, false);
    (void)rate(&load, &store);
    raw[0] = rate(&load, NULL);
    raw[1] = rate(NULL, &store);
    raw[2] = rate(&load, &store);
    (void)printf("      one raw copy of %.2f GB: load %.1f, store %.1f, both %.1f GB/s\n", (double)TOTAL / GB, raw[0],
                 raw[1], raw[2]);
    for (size_t a_call = BLOCKS; a_call > 0; a_call = a_call == BLOCKS ? 4 : a_call == 4 ? 1 : 0) {
        double got[3];

        set_blocks(&load, host, dev, true, a_call, &r);
        set_blocks(&store, host + pool, dev + pool, false, a_call, &r);
        got[0] = rate(&load, NULL);
        got[1] = rate(NULL, &store);
        got[2] = rate(&load, &store);
        (void)printf("      %d x %d bytes, %3zu a call: load %.1f (%.3f), store %.1f (%.3f), both %.1f (%.3f) GB/s\n",
                     BLOCKS, BLOCK, a_call, got[0], got[0] / raw[0], got[1], got[1] / raw[1], got[2], got[2] / raw[2]);
    }
    d->ops->queue_close(load.q);
    d->ops->queue_close(store.q);
    d->ops->mem_close(m);
    d->ops->host_unregister(d, host, pool * 2);
    (void)munmap(host, pool * 2);
    return !load.failed && !store.failed;
}

static bool latency_of_one_block(device *d)
{
    uint8_t *host = mmap(NULL, BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    enum { TIMES = 101 };
    double queue[TIMES], raw[TIMES];
    device_queue *q = NULL;
    device_mem *m = NULL;
    cudaStream_t stream = NULL;
    kvs_err err = {.msg = ""};
    uint64_t bytes, mark = 0;
    device_copy c;
    bool good = host != MAP_FAILED && d->ops->host_register(d, host, BLOCK, &err) == KVS_OK &&
                d->ops->mem_create(d, BLOCK, &m, &err) == KVS_OK &&
                d->ops->queue_open(d, DEVICE_LOAD, &q, &err) == KVS_OK &&
                cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;

    if (!good)
        return GPU_FAIL("%s", err.msg);
    c = (device_copy){d->ops->mem_base(m, 0, &bytes), host, BLOCK};
    for (int i = 0; i < TIMES; i++) {
        double start = gpu_seconds();

        good =
            good && d->ops->copy(q, &c, 1, BY_ENGINE, &mark, &err) == KVS_OK && d->ops->wait(q, mark, &err) == KVS_OK;
        queue[i] = gpu_seconds() - start;
        start = gpu_seconds();
        good = good && cudaMemcpyAsync(c.dst, c.src, BLOCK, cudaMemcpyDefault, stream) == cudaSuccess &&
               cudaStreamSynchronize(stream) == cudaSuccess;
        raw[i] = gpu_seconds() - start;
    }
    (void)printf("      one block: %.1f us through the queue, %.1f us by a copy and a synchronise\n",
                 median(queue, TIMES) * 1e6, median(raw, TIMES) * 1e6);
    (void)cudaStreamDestroy(stream);
    d->ops->queue_close(q);
    d->ops->mem_close(m);
    d->ops->host_unregister(d, host, BLOCK);
    (void)munmap(host, BLOCK);
    return good;
}

/* --- decode ------------------------------------------------------------------------------------------------------- */

typedef struct decode_bench {
    kvs_mla_decode_args a;
    uint8_t *pool, *q, *out, *lse, *workspace;
    int32_t *lens, *table;
    uint64_t pool_bytes, workspace_bytes;
    uint64_t slot;
} decode_bench;

static bool tables(decode_bench *b, uint32_t len, bool strided)
{
    uint32_t n_blocks = b->a.n_seqs * b->a.table_width, n = b->a.n_seqs;
    int32_t *host = malloc((n_blocks + n) * sizeof *host);
    rnd r = {9};
    bool good = host != NULL;

    for (uint32_t i = 0; good && i < n_blocks; i++) {
        uint32_t at = strided ? (uint32_t)rnd_below(&r, i + 1) : i;

        host[i] = host[at];
        host[at] = (int32_t)i;
    }
    for (uint32_t i = 0; good && i < n; i++)
        host[n_blocks + i] = (int32_t)len;
    good = good && cudaMalloc((void **)&b->table, n_blocks * 4) == cudaSuccess &&
           cudaMalloc((void **)&b->lens, n * 4) == cudaSuccess &&
           cudaMemcpy(b->table, host, n_blocks * 4, cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaMemcpy(b->lens, host + n_blocks, n * 4, cudaMemcpyHostToDevice) == cudaSuccess;
    free(host);
    return good;
}

static bool bench_init(decode_bench *b, uint32_t n_seqs, uint32_t len, uint32_t h_q, uint32_t s_q, bool strided)
{
    uint64_t page = PAGE_TOKENS * ROW, rows = (uint64_t)n_seqs * s_q * h_q;
    uint32_t width = (len + PAGE_TOKENS - 1) / PAGE_TOKENS, n_blocks = n_seqs * width;

    *b = (decode_bench){.slot = strided ? page * LAYERS : page, .pool_bytes = page * LAYERS * n_blocks};
    b->a = (kvs_mla_decode_args){
        .n_seqs = n_seqs, .table_width = width, .table_stride = width, .s_q = s_q, .h_q = h_q, .sm_scale = 0.04167f};
    if (cudaMalloc((void **)&b->pool, b->pool_bytes) != cudaSuccess ||
        cudaMalloc((void **)&b->q, rows * ROW) != cudaSuccess ||
        cudaMalloc((void **)&b->out, rows * 1024) != cudaSuccess ||
        cudaMalloc((void **)&b->lse, rows * 4) != cudaSuccess || !fill_cuda_bf16(b->pool, b->pool_bytes / 2, 1) ||
        !fill_cuda_bf16(b->q, rows * ROW / 2, 2) || !tables(b, len, strided))
        return false;
    b->a.view = (kvs_view){b->pool, b->slot, page, n_blocks, PAGE_TOKENS, ROW, KVS_FORMAT_mla_bf16};
    b->a.q_nope = (kvs_strided){b->q, (uint64_t)h_q * ROW, ROW};
    b->a.q_pe = (kvs_strided){b->q + 1024, (uint64_t)h_q * ROW, ROW};
    b->a.out = (kvs_strided){b->out, (uint64_t)h_q * 1024, 1024};
    b->a.lse = (kvs_strided){b->lse, (uint64_t)h_q * 4, 4};
    b->a.seq_len = b->lens;
    b->a.block_table = b->table;
    b->workspace_bytes = kvs_mla_decode_cuda_workspace(&b->a);
    return cudaMalloc((void **)&b->workspace, b->workspace_bytes + 16) == cudaSuccess;
}

static void bench_fini(decode_bench *b)
{
    void *all[] = {b->pool, b->q, b->out, b->lse, b->workspace, b->lens, b->table};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        (void)cudaFree(all[i]);
}

/* Microseconds of one layer. */
static double bench_time(decode_bench *b, cudaStream_t stream, bool strided)
{
    enum { TIMES = 15 };
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    cudaEvent_t start, end;
    kvs_mla_decode_result ret;
    kvs_err err;
    double us[TIMES];
    bool good = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess;

    for (uint32_t i = 0; i < LAYERS; i++) {
        b->a.view.base = b->pool + (strided ? (uint64_t)i * PAGE_TOKENS * ROW : i * (b->pool_bytes / LAYERS));
        good = good && kvs_mla_decode_cuda(&b->a, b->workspace, b->workspace_bytes, NULL, &ret, stream, &err) == KVS_OK;
    }
    good = good && cudaStreamEndCapture(stream, &graph) == cudaSuccess &&
           cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess && cudaEventCreate(&start) == cudaSuccess &&
           cudaEventCreate(&end) == cudaSuccess;
    for (int i = 0; good && i < TIMES; i++) {
        float ms = 0;

        good = cudaEventRecord(start, stream) == cudaSuccess && cudaGraphLaunch(exec, stream) == cudaSuccess &&
               cudaEventRecord(end, stream) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess &&
               cudaEventElapsedTime(&ms, start, end) == cudaSuccess;
        us[i] = (double)ms * 1e3 / LAYERS;
    }
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return good ? median(us, TIMES) : 0;
}

static bool decode_beside_its_floor(device *d)
{
    static const uint32_t shapes[][4] = {
        {128, 4096, 16, 1}, {128, 4096, 32, 1}, {128, 4096, 64, 1}, {128, 4096, 128, 1}, {128, 4096, 16, 2},
        {32, 4096, 128, 1}, {32, 4096, 16, 1},  {8, 8192, 128, 1},  {8, 8192, 16, 1},    {1, 65536, 128, 1},
        {1, 8192, 128, 1},  {1, 8192, 16, 1},   {16, 1024, 128, 1}};
    cudaStream_t stream = NULL;
    bool good = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;

    (void)d;
    (void)printf("      b     context heads s_q parts     us   floor  of it   TFLOP/s  GB/s   strided/contiguous\n");
    for (size_t i = 0; good && i < sizeof shapes / sizeof shapes[0]; i++) {
        const uint32_t *s = shapes[i];
        double rows = (double)s[2] * s[3], flop = 2176.0 * rows * s[1] * s[0];
        double bytes = ((double)s[1] * ROW + rows * (ROW + 1028)) * s[0];
        double floor = flop / 790e12 > bytes / 4.3e12 ? flop / 790e12 : bytes / 4.3e12, us[2] = {0, 0};
        uint32_t parts = 0;

        for (int strided = 0; good && strided < 2; strided++) {
            decode_bench b;

            good = bench_init(&b, s[0], s[1], s[2], s[3], strided);
            us[strided] = good ? bench_time(&b, stream, strided) : 0;
            parts = kvs_mla_decode_cuda_parts(&b.a);
            bench_fini(&b);
            good = good && us[strided] > 0;
        }
        (void)printf("      %-5u %7u %5u %3u %5u %7.1f %6.1f  %.3f  %7.1f  %6.0f  %.3f\n", s[0], s[1], s[2], s[3],
                     parts, us[1], floor * 1e6, floor * 1e6 / us[1], flop / us[1] / 1e6, bytes / us[1] / 1e3,
                     us[1] / us[0]);
    }
    (void)cudaStreamDestroy(stream);
    return good || GPU_FAIL("%s", cudaGetErrorString(cudaGetLastError()));
}

static const gpu_test tests[] = {
    {"copies_of_whole_blocks", copies_of_whole_blocks},
    {"latency_of_one_block", latency_of_one_block},
    {"decode_beside_its_floor", decode_beside_its_floor},
};

int main(int argc, char **argv)
{
    return gpu_run(tests, sizeof tests / sizeof tests[0], argc, argv);
}
#else
static bool needs_cuda(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    const gpu_test tests[] = {{"needs_cuda", needs_cuda}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
