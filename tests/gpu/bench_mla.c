/* MLA attention of every format beside its floor: the bytes that it must read at the card's copy speed, or its operations,
 * whichever takes longer.  Random blocks of a pool of 64 GiB, layers in turn, so that no input stays in the cache; graph
 * replays, medians. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "kernels/kernels_cuda.h"
#include "kernels/mla_sparse.h"
#include "proto/layout.h"
#include "tests/gpu/fill_cuda.h"
#include "tests/support/mla_token.h"
#include "tests/support/random.h"

enum { TOKENS = 64, LAYERS = 61, TURNS = 6, TIMES = 11, MAX_HEADS = 128 };
#define POOL_BYTES (UINT64_C(64) << 30)
#define FLOPS      790e12

static double copy_bytes_per_s = 4.3e12;

typedef struct bench {
    uint32_t format;
    uint8_t *pool, *q, *out, *lse, *workspace;
    int32_t *lists, *lens;
    uint64_t page, workspace_bytes;
    uint32_t n_blocks;
    bool sparse;
    kvs_mla_decode_args dense;
    kvs_mla_sparse_args list;
} bench;

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

/* Seconds of one replay of what is captured, the median. */
static double replay_time(cudaGraphExec_t exec, cudaStream_t stream)
{
    cudaEvent_t start, end;
    double t[TIMES];
    bool good = cudaEventCreate(&start) == cudaSuccess && cudaEventCreate(&end) == cudaSuccess;

    for (int i = -1; good && i < TIMES; i++) {
        float ms = 0;

        good = cudaEventRecord(start, stream) == cudaSuccess && cudaGraphLaunch(exec, stream) == cudaSuccess &&
               cudaEventRecord(end, stream) == cudaSuccess && cudaEventSynchronize(end) == cudaSuccess &&
               cudaEventElapsedTime(&ms, start, end) == cudaSuccess;
        if (i >= 0)
            t[i] = (double)ms * 1e-3;
    }
    if (!good)
        return 0;
    (void)cudaEventDestroy(start);
    (void)cudaEventDestroy(end);
    qsort(t, TIMES, sizeof *t, by_value);
    return t[TIMES / 2];
}

static kvs_view view_of(const bench *b, uint32_t layer, bool strided)
{
    kvs_view v = {.base = b->pool + (strided ? layer * b->page : layer * b->page * b->n_blocks),
                  .block_stride = strided ? b->page * LAYERS : b->page,
                  .page_bytes = b->page,
                  .n_blocks = b->n_blocks,
                  .tokens_per_block = TOKENS,
                  .row_bytes = mla_token_row_bytes(b->format),
                  .format = b->format};

    return v;
}

static kvs_status launch(bench *b, uint32_t layer, bool strided, cudaStream_t stream, uint32_t *parts, kvs_err *err)
{
    kvs_mla_decode_result r = {0};
    kvs_status s;

    b->dense.view = b->list.view = view_of(b, layer, strided);
    s = b->sparse ? kvs_mla_sparse_cuda(&b->list, b->workspace, b->workspace_bytes, NULL, &r, stream, err)
                  : kvs_mla_decode_cuda(&b->dense, b->workspace, b->workspace_bytes, NULL, &r, stream, err);
    *parts = r.parts;
    return s;
}

/* Seconds a layer. */
static double layer_time(bench *b, bool strided, cudaStream_t stream, uint32_t *parts)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    kvs_err err = {.msg = ""};
    double t = 0;
    bool good = cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess;

    for (uint32_t i = 0; good && i < TURNS; i++)
        good = launch(b, i * 10, strided, stream, parts, &err) == KVS_OK;
    good = cudaStreamEndCapture(stream, &graph) == cudaSuccess && good &&
           cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess;
    if (good)
        t = replay_time(exec, stream) / TURNS;
    else
        (void)printf("      %s %s\n", err.msg, cudaGetErrorString(cudaGetLastError()));
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    return t;
}

static void shuffle(rnd *r, int32_t *p, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t at = rnd_below(r, i + 1);
        int32_t x = (int32_t)i;

        p[i] = p[at];
        p[at] = x;
    }
}

/* Operands for n_units of rows each; lists of `width` entries a unit. */
static bool take(bench *b, uint32_t n_units, uint32_t rows, uint32_t width, uint32_t len, rnd *r)
{
    const uint64_t n = (uint64_t)n_units * rows, q_row = 1152;
    uint64_t all = b->sparse ? (uint64_t)b->n_blocks * TOKENS : b->n_blocks, entries = (uint64_t)n_units * width;
    int32_t *order = malloc(all * sizeof *order), *host = malloc((entries + n_units) * sizeof *host);
    bool good = order != NULL && host != NULL;

    if (!good)
        return false;
    shuffle(r, order, all);
    for (uint64_t i = 0; i < entries; i++)
        host[i] = order[i % all];
    for (uint32_t i = 0; i < n_units; i++)
        host[entries + i] = (int32_t)len;
    good = cudaMalloc((void **)&b->q, n * q_row) == cudaSuccess &&
           cudaMalloc((void **)&b->out, n * 1024) == cudaSuccess &&
           cudaMalloc((void **)&b->lse, n * 4) == cudaSuccess &&
           cudaMalloc((void **)&b->lists, entries * 4) == cudaSuccess &&
           cudaMalloc((void **)&b->lens, n_units * 4) == cudaSuccess && fill_cuda_bf16(b->q, n * q_row / 2, 2) &&
           cudaMemcpy(b->lists, host, entries * 4, cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaMemcpy(b->lens, host + entries, n_units * 4, cudaMemcpyHostToDevice) == cudaSuccess;
    free(order);
    free(host);
    return good;
}

static void give(bench *b)
{
    void *all[] = {b->q, b->out, b->lse, b->workspace, b->lists, b->lens};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        (void)cudaFree(all[i]);
    b->q = b->out = b->lse = b->workspace = NULL;
    b->lists = b->lens = NULL;
}

static void say(bench *b, const char *what, uint32_t n, uint32_t len, uint32_t h_q, uint32_t s_q, double bytes,
                double flop, cudaStream_t stream)
{
    double floor = flop / FLOPS > bytes / copy_bytes_per_s ? flop / FLOPS : bytes / copy_bytes_per_s, t[2];
    uint32_t parts = 0;

    for (int strided = 0; strided < 2; strided++)
        t[strided] = layer_time(b, strided, stream, &parts);
    (void)printf("      %-6s %-11s %5u %6u %5u %3u %5u %9.1f %9.1f %6.3f %8.1f %7.0f %7.3f\n", what,
                 kvs_format_name(b->format), n, len, h_q, s_q, parts, t[1] * 1e6, floor * 1e6, floor / t[1],
                 flop / t[1] / 1e12, bytes / t[1] / 1e9, t[1] / t[0]);
    (void)fflush(stdout);
}

static bool dense(bench *b, uint32_t n, uint32_t len, uint32_t h_q, uint32_t s_q, cudaStream_t stream)
{
    const uint32_t width = (len + TOKENS - 1) / TOKENS;
    const double rows = (double)h_q * s_q;
    rnd r = {9};
    kvs_mla_decode_args *a = &b->dense;

    b->sparse = false;
    if ((uint64_t)n * width > b->n_blocks || !take(b, n, h_q * s_q, width, len, &r))
        return false;
    *a = (kvs_mla_decode_args){.n_seqs = n,
                               .table_width = width,
                               .table_stride = width,
                               .s_q = s_q,
                               .h_q = h_q,
                               .sm_scale = 0.04167f,
                               .kv_scale = (const float *)(const void *)b->q,
                               .seq_len = b->lens,
                               .block_table = b->lists,
                               .q_nope = {b->q, (uint64_t)h_q * 1152, 1152},
                               .q_pe = {b->q + 1024, (uint64_t)h_q * 1152, 1152},
                               .out = {b->out, (uint64_t)h_q * 1024, 1024},
                               .lse = {b->lse, (uint64_t)h_q * 4, 4}};
    a->view = view_of(b, 0, true);
    b->workspace_bytes = kvs_mla_decode_cuda_workspace(a);
    if (cudaMalloc((void **)&b->workspace, b->workspace_bytes + 16) != cudaSuccess)
        return false;
    say(b, "dense", n, len, h_q, s_q, ((double)len * mla_token_row_bytes(b->format) + rows * (1152 + 1028)) * n,
        2176.0 * rows * len * n, stream);
    give(b);
    return true;
}

static bool sparse(bench *b, uint32_t n, uint32_t topk, uint32_t h_q, cudaStream_t stream)
{
    const uint32_t token = mla_token_row_bytes(b->format) + mla_token_tail_bytes(b->format);
    const double dims = b->format == KVS_FORMAT_fp8_ds_mla ? 1088 : 1024;
    rnd r = {9};
    kvs_mla_sparse_args *a = &b->list;

    b->sparse = true;
    if (!take(b, n, h_q, topk, topk, &r))
        return false;
    *a = (kvs_mla_sparse_args){.n_seqs = n,
                               .s_q = 1,
                               .topk = topk,
                               .index_stride = topk,
                               .indices = (const kvs_logical_index *)(const void *)b->lists,
                               .h_q = h_q,
                               .sm_scale = 0.04167f,
                               .q_nope = {b->q, (uint64_t)h_q * 1152, 1152},
                               .q_pe = {b->q + 1024, (uint64_t)h_q * 1152, 1152},
                               .out = {b->out, (uint64_t)h_q * 1024, 1024},
                               .lse = {b->lse, (uint64_t)h_q * 4, 4}};
    a->view = view_of(b, 0, true);
    b->workspace_bytes = kvs_mla_sparse_cuda_workspace(a);
    if (cudaMalloc((void **)&b->workspace, b->workspace_bytes + 16) != cudaSuccess)
        return false;
    say(b, "sparse", n, topk, h_q, 1, ((double)topk * token + h_q * (1152 + 1028)) * n, 2 * dims * h_q * topk * n,
        stream);
    give(b);
    return true;
}

/* What a copy inside the card reaches: bytes read, not read and written. */
static void measure_copy(bench *b, cudaStream_t stream)
{
    const uint64_t n = POOL_BYTES / 4;
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    double t = 0;

    if (cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal) == cudaSuccess &&
        cudaMemcpyAsync(b->pool, b->pool + POOL_BYTES / 2, n, cudaMemcpyDeviceToDevice, stream) == cudaSuccess &&
        cudaStreamEndCapture(stream, &graph) == cudaSuccess && cudaGraphInstantiate(&exec, graph, 0) == cudaSuccess)
        t = replay_time(exec, stream);
    if (t > 0)
        copy_bytes_per_s = 2 * (double)n / t;
    (void)cudaGraphExecDestroy(exec);
    (void)cudaGraphDestroy(graph);
    (void)printf("      copy inside the card: %.2f TB/s read and written\n", copy_bytes_per_s / 1e12);
}

static bool attention_beside_its_floor(device *d)
{
    static const uint32_t formats[] = {KVS_FORMAT_mla_bf16, KVS_FORMAT_mla_fp8, KVS_FORMAT_fp8_ds_mla,
                                       KVS_FORMAT_fp8_blk584, KVS_FORMAT_fp8_blk528};
    static const uint32_t shapes[][4] = {{128, 4096, 16, 1}, {128, 4096, 128, 1}, {128, 4096, 16, 2},
                                         {8, 8192, 16, 1},   {8, 8192, 128, 1},   {1, 65536, 128, 1}};
    static const uint32_t lists[][3] = {
        {128, 2048, 64}, {128, 2048, 128}, {128, 2048, 16}, {16, 2048, 128}, {1, 2048, 128}};
    cudaStream_t stream = NULL;
    bench b = {0};
    bool good = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess &&
                cudaMalloc((void **)&b.pool, POOL_BYTES) == cudaSuccess;

    (void)d;
    if (good)
        measure_copy(&b, stream);
    (void)printf("      kind   format          n length heads s_q parts        us     floor  of it  TFLOP/s    GB/s   "
                 "strided/contiguous\n");
    for (size_t f = 0; good && f < sizeof formats / sizeof *formats; f++) {
        b.format = formats[f];
        b.page = (uint64_t)TOKENS * (mla_token_row_bytes(b.format) + mla_token_tail_bytes(b.format));
        b.n_blocks = (uint32_t)(POOL_BYTES / LAYERS / b.page);
        good = fill_cuda_pages(b.pool, (uint64_t)b.n_blocks * LAYERS, b.page, b.format, TOKENS);
        for (size_t i = 0; good && f < 3 && i < sizeof shapes / sizeof *shapes; i++)
            good = dense(&b, shapes[i][0], shapes[i][1], shapes[i][2], shapes[i][3], stream);
        for (size_t i = 0; good && f >= 2 && i < sizeof lists / sizeof *lists; i++)
            good = sparse(&b, lists[i][0], lists[i][1], lists[i][2], stream);
    }
    (void)cudaFree(b.pool);
    (void)cudaStreamDestroy(stream);
    return good || GPU_FAIL("%s", cudaGetErrorString(cudaGetLastError()));
}

int main(int argc, char **argv)
{
    const gpu_test tests[] = {{"attention_beside_its_floor", attention_beside_its_floor}};

    return gpu_run(tests, 1, argc, argv);
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
