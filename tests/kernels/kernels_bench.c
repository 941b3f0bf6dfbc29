/* kernels-bench: kernels-bench [--json] [OPERATION...]: each operation beside the bound of the card. */
#include <stdio.h>
#include <string.h>

static int usage(FILE *to, int status)
{
    (void)fputs("usage: kernels-bench [--json] [OPERATION...]\n\n"
                "Each operation, or those that are named, beside the bound of the card, and strided views beside\n"
                "contiguous ones.  Needs a GPU with 64 GiB to spare.  'kernels-test --list' names the operations.\n",
                to);
    return status;
}

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdarg.h>
#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "kernels/kernels_cuda.h"
#include "kernels/view_check.h"
#include "tests/gpu/fill_cuda.h"
#include "tests/kernels/kb_ops.h"

enum { ROUNDS = 41, MAX_TURNS = 64 };
#define GiB   (UINT64_C(1) << 30)
#define FLOPS 790e12 /* of bf16 by tensor cores that the card sustains */

void kb_die(const char *fmt, ...)
{
    va_list ap;

    va_start(ap, fmt);
    (void)fprintf(stderr, "kernels-bench: ");
    (void)vfprintf(stderr, fmt, ap);
    (void)fprintf(stderr, "\n");
    va_end(ap);
    exit(3);
}

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        cudaError_t try_ = (call);                                                                                     \
        if (try_ != cudaSuccess)                                                                                       \
            kb_die("%s: %s", #call, cudaGetErrorString(try_));                                                         \
    } while (0)

/* --- memory and views --------------------------------------------------------------------------------------------- */

void *kb_alloc(kb *b, uint64_t bytes)
{
    void *p = NULL;

    if (b->n_taken == sizeof b->taken / sizeof *b->taken)
        kb_die("an operation takes more than %u pieces of memory", b->n_taken);
    TRY(cudaMalloc(&p, bytes > 0 ? bytes : 16));
    b->taken[b->n_taken++] = p;
    return p;
}

void *kb_in(kb *b, const void *host, uint64_t bytes)
{
    void *p = kb_alloc(b, bytes);

    TRY(cudaMemcpy(p, host, bytes, cudaMemcpyHostToDevice));
    return p;
}

void *kb_random(kb *b, uint64_t bytes)
{
    void *p = kb_alloc(b, (bytes + 1) / 2 * 2);

    if (!fill_cuda_bf16(p, (bytes + 1) / 2, bytes))
        kb_die("filling %" PRIu64 " bytes", bytes);
    return p;
}

uint64_t kb_page_bytes(uint32_t format)
{
    const kvs_token_bytes t = kvs_format_token_bytes(format);
    const uint32_t align = kvs_format_page_align(format);

    return ((uint64_t)KB_TOKENS * (t.row + t.tail) + align - 1) / align * align;
}

uint32_t kb_n_blocks(const kb *b, uint32_t format)
{
    return (uint32_t)(b->pool_bytes / (kb_page_bytes(format) * KB_LAYERS));
}

kvs_view kb_view(const kb *b, uint32_t format, uint32_t layer, bool strided)
{
    const uint64_t page = kb_page_bytes(format);
    const uint32_t n = kb_n_blocks(b, format);

    return (kvs_view){.base = b->pool + (strided ? layer : (uint64_t)layer * n) * page,
                      .block_stride = strided ? page * KB_LAYERS : page,
                      .page_bytes = page,
                      .n_blocks = n,
                      .tokens_per_block = KB_TOKENS,
                      .row_bytes = kvs_format_token_bytes(format).row,
                      .format = format};
}

uint32_t kb_layer(uint32_t turn)
{
    return turn * 23 % KB_LAYERS;
}

/* By drawing again what is taken: for n well below `below`.  Steps of a constant would be quicker, but then the card sees a
 * lattice, and a figure depends on where it meets the banks of the memory. */
uint64_t *kb_pick(kb *b, uint32_t n, uint64_t below)
{
    uint64_t *picked = malloc((size_t)n * sizeof *picked);
    uint8_t *taken = calloc(below, 1);

    if (picked == NULL || taken == NULL || n > below)
        kb_die("%u of %" PRIu64 " slots", n, below);
    for (uint32_t i = 0; i < n; i++) {
        do
            picked[i] = rnd_below(&b->r, below);
        while (taken[picked[i]] != 0);
        taken[picked[i]] = 1;
    }
    free(taken);
    return picked;
}

int64_t *kb_slots(kb *b, uint32_t n, uint64_t below)
{
    uint64_t *picked = kb_pick(b, n, below);
    int64_t *dev = kb_in(b, picked, (uint64_t)n * sizeof *dev); /* all of them below 2^63 */

    free(picked);
    return dev;
}

int32_t *kb_ids(kb *b, uint32_t n, uint32_t below)
{
    uint64_t *picked = kb_pick(b, n, below);
    int32_t *ids = malloc((size_t)n * sizeof *ids), *dev;

    if (ids == NULL)
        kb_die("no memory for %u ids", n);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = (int32_t)picked[i];
    dev = kb_in(b, ids, (uint64_t)n * sizeof *ids);
    free(ids);
    free(picked);
    return dev;
}

/* --- time --------------------------------------------------------------------------------------------------------- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, by_value);
    return v[n / 2];
}

static cudaGraphExec_t capture(kb *b, const kb_work *w, bool strided)
{
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    kvs_err err = {.msg = ""};

    TRY(cudaStreamBeginCapture(b->stream, cudaStreamCaptureModeGlobal));
    for (uint32_t turn = 0; turn < w->turns; turn++)
        if (w->call(b, w->args, turn, strided, &err) != KVS_OK)
            kb_die("%s %s: %s", w->op, w->shape, err.msg);
    TRY(cudaStreamEndCapture(b->stream, &graph));
    TRY(cudaGraphInstantiate(&exec, graph, 0));
    TRY(cudaGraphDestroy(graph));
    return exec;
}

/* Seconds of one replay. */
static double replay(kb *b, cudaGraphExec_t exec)
{
    static cudaEvent_t start, end;
    float ms = 0;

    if (start == NULL) {
        TRY(cudaEventCreate(&start));
        TRY(cudaEventCreate(&end));
    }
    TRY(cudaEventRecord(start, b->stream));
    TRY(cudaGraphLaunch(exec, b->stream));
    TRY(cudaEventRecord(end, b->stream));
    TRY(cudaEventSynchronize(end));
    TRY(cudaEventElapsedTime(&ms, start, end));
    return (double)ms * 1e-3;
}

static void print_row(kb *b, const kb_work *w, double strided, double contiguous)
{
    const double by_bytes = (double)w->bytes / b->copy_rate, by_flop = w->flop / b->flop_rate,
                 bound = by_bytes > by_flop ? by_bytes : by_flop;

    if (b->json) {
        (void)printf("%s\n  {\"op\": \"%s\", \"shape\": \"%s\", \"bytes\": %" PRIu64
                     ", \"flop\": %.6g, \"seconds\": %.9g, \"contiguous_seconds\": %.9g, \"bound_seconds\": %.9g}",
                     b->n_rows++ > 0 ? "," : "", w->op, w->shape, w->bytes, w->flop, strided, contiguous, bound);
        return;
    }
    (void)printf("%-17s %-34s %9.1f %9.1f %9.1f %8.1f  %5.3f  ", w->op, w->shape, (double)w->bytes / 1e6, strided * 1e6,
                 bound * 1e6, (double)w->bytes / strided / 1e9, bound / strided);
    if (w->no_view)
        (void)printf("    -\n");
    else
        (void)printf("%5.3f\n", strided / contiguous);
}

void kb_measure(kb *b, const kb_work *w)
{
    double seconds[2][ROUNDS];
    cudaGraphExec_t exec[2];

    if (w->turns < 1 || w->turns > MAX_TURNS)
        kb_die("%s: %u turns are outside 1..%d", w->op, w->turns, MAX_TURNS);
    for (int layout = 0; layout < 2; layout++) {
        exec[layout] = capture(b, w, layout == 0);
        (void)replay(b, exec[layout]);
    }
    for (int i = 0; i < ROUNDS; i++)
        for (int layout = 0; layout < 2; layout++)
            seconds[layout][i] = replay(b, exec[layout]) / w->turns;
    print_row(b, w, median(seconds[0], ROUNDS), median(seconds[1], ROUNDS));
    for (int layout = 0; layout < 2; layout++)
        TRY(cudaGraphExecDestroy(exec[layout]));
}

/* --- start -------------------------------------------------------------------------------------------------------- */

/* Bytes read and written a second by the largest copy that the pool has room for twice, at most 16 GiB. */
static double measure_copy(kb *b)
{
    const uint64_t bytes = b->pool_bytes / 2 < 16 * GiB ? b->pool_bytes / 2 : 16 * GiB;
    double seconds[ROUNDS];
    cudaEvent_t start, end;

    TRY(cudaEventCreate(&start));
    TRY(cudaEventCreate(&end));
    for (int i = 0; i < ROUNDS; i++) {
        float ms = 0;

        TRY(cudaEventRecord(start, b->stream));
        TRY(cudaMemcpyAsync(b->pool + bytes, b->pool, bytes, cudaMemcpyDeviceToDevice, b->stream));
        TRY(cudaEventRecord(end, b->stream));
        TRY(cudaEventSynchronize(end));
        TRY(cudaEventElapsedTime(&ms, start, end));
        seconds[i] = (double)ms * 1e-3;
    }
    TRY(cudaEventDestroy(start));
    TRY(cudaEventDestroy(end));
    return 2.0 * (double)bytes / median(seconds, ROUNDS);
}

static void bench_open(kb *b)
{
    size_t free_bytes = 0, total = 0;
    struct cudaDeviceProp about;
    kvs_err err = {.msg = ""};

    if (kvs_kernels_init(&err) != KVS_OK)
        kb_die("kvs_kernels_init: %s", err.msg);
    TRY(cudaGetDeviceProperties(&about, 0));
    TRY(cudaStreamCreateWithFlags(&b->stream, cudaStreamNonBlocking));
    TRY(cudaMemGetInfo(&free_bytes, &total));
    b->pool_bytes = free_bytes > 72 * GiB ? 66 * GiB : free_bytes / 2 / GiB * GiB;
    TRY(cudaMalloc((void **)&b->pool, b->pool_bytes));
    if (!fill_cuda_bf16(b->pool, b->pool_bytes / 2, 1))
        kb_die("filling the pool");
    b->flop_rate = FLOPS;
    b->copy_rate = measure_copy(b);
    if (b->json)
        (void)printf("{\"device\": \"%s\", \"pool_bytes\": %" PRIu64
                     ", \"copy_bytes_per_second\": %.6g, \"flop_per_second\": %.6g, \"rows\": [",
                     about.name, b->pool_bytes, b->copy_rate, b->flop_rate);
    else
        (void)printf(
            "%s, pool of %.0f GiB, a plain copy reads and writes %.0f GB/s\n"
            "operation         shape                                     MB        us  bound us     GB/s  bound  "
            "strided\n"
            "                                                                                             of it  "
            "/ contiguous\n",
            about.name, (double)b->pool_bytes / (double)GiB, b->copy_rate / 1e9);
}

static bool wanted(const char *name, int argc, char **argv)
{
    bool any = false;

    for (int i = 1; i < argc; i++) {
        any |= argv[i][0] != '-';
        if (strcmp(argv[i], name) == 0)
            return true;
    }
    return !any;
}

static const kb_op *const OPS[] = {
#define X(name) &kb_op_##name,
    KB_OP_MAP(X)
#undef X
};

static bool known(const char *name)
{
    for (size_t i = 0; i < sizeof OPS / sizeof *OPS; i++)
        if (strcmp(OPS[i]->name, name) == 0)
            return true;
    return false;
}

int main(int argc, char **argv)
{
    static kb b = {.r = {7}};
    int n = 0;

    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return usage(stdout, 0);
        if (strcmp(argv[i], "--json") == 0)
            b.json = true;
        else if (argv[i][0] == '-')
            return usage(stderr, 2);
        else if (!known(argv[i])) {
            (void)fprintf(stderr, "kernels-bench: no operation '%s'; 'kernels-test --list' names them\n", argv[i]);
            return 2;
        }
    }
    if (cudaGetDeviceCount(&n) != cudaSuccess || n == 0) {
        (void)printf("SKIP: no CUDA device\n");
        return 0;
    }
    (void)setvbuf(stdout, NULL, _IOLBF, 0);
    bench_open(&b);
    for (size_t i = 0; i < sizeof OPS / sizeof *OPS; i++) {
        if (!wanted(OPS[i]->name, argc, argv))
            continue;
        OPS[i]->run(&b);
        TRY(cudaDeviceSynchronize());
        while (b.n_taken > 0)
            TRY(cudaFree(b.taken[--b.n_taken]));
    }
    if (b.json)
        (void)printf("\n]}\n");
    return 0;
}
#else
int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return usage(stdout, 0);
    (void)printf("SKIP: built without CUDA\n");
    return 0;
}
#endif
