/* Checksums that the cuda device makes: libxxhash's, of blocks anywhere in a region and of every length that it takes. */
#include "tests/gpu/gpu.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "kernels/device_cuda.h"
#include "tests/support/random.h"

#ifdef KVS_CUDA
#include <cuda_runtime_api.h>

enum { REGION = 96 << 20, LAYERS = 61, PAGE = 73728, BLOCK = LAYERS * PAGE, PART = 256 << 10, KIB = 1024 };

typedef struct field { /* random bytes on both sides */
    device_mem *mem;
    device_queue *store;
    uint8_t *dev, *host;
    rnd r;
} field;

static bool field_open(field *f, device *d, uint64_t seed)
{
    kvs_err err = {.msg = ""};
    uint64_t bytes;

    *f = (field){.host = malloc(REGION), .r = rnd_open("sums", seed)};
    if (f->host == NULL || d->ops->mem_create(d, REGION, &f->mem, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_STORE, &f->store, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    f->dev = d->ops->mem_base(f->mem, 0, &bytes);
    rnd_bytes(&f->r, f->host, REGION);
    return cudaMemcpy(f->dev, f->host, REGION, cudaMemcpyDefault) == cudaSuccess || GPU_FAIL("no bytes on the device");
}

static void field_close(field *f, device *d)
{
    d->ops->queue_close(f->store);
    d->ops->mem_close(f->mem);
    free(f->host);
}

/* n blocks of `bytes` that begin anywhere, overlapping ones too. */
static bool sum_blocks(field *f, device *d, uint32_t n, uint64_t bytes, uint64_t part)
{
    static uint64_t parts[DEVICE_SUM_PARTS];
    const void *blocks[DEVICE_SUM_BLOCKS];
    const uint64_t n_parts = kvs_part_sum_parts(bytes, part);
    device_sums s = {.blocks = blocks, .n = n, .bytes = bytes, .part_bytes = part, .parts = parts};
    kvs_err err = {.msg = ""};

    for (uint32_t i = 0; i < n; i++)
        blocks[i] = f->dev + rnd_below(&f->r, (REGION - bytes) / 16 + 1) * 16;
    memset(parts, 0xA5, sizeof parts);
    if (d->ops->sum(f->store, &s, &err) != KVS_OK)
        return GPU_FAIL("%" PRIu32 " of %" PRIu64 " in parts of %" PRIu64 ": %s", n, bytes, part, err.msg);
    for (uint32_t i = 0; i < n; i++)
        for (uint64_t k = 0; k < n_parts; k++) {
            const uint8_t *at = f->host + ((const uint8_t *)blocks[i] - f->dev) + k * part;
            uint64_t left = bytes - k * part, want = XXH3_64bits(at, left < part ? left : part);

            if (parts[i * n_parts + k] != want)
                return GPU_FAIL("block %" PRIu32 " of %" PRIu64 ", part %" PRIu64 ": %016" PRIx64 ", not %016" PRIx64,
                                i, bytes, k, parts[i * n_parts + k], want);
        }
    if (n * n_parts < DEVICE_SUM_PARTS && parts[n * n_parts] != UINT64_C(0xA5A5A5A5A5A5A5A5))
        return GPU_FAIL("more than %" PRIu64 " parts were written", n * n_parts);
    return true;
}

/* All lengths around the steps of the function: stripes of 64, KiB, the eight KiB that a warp has on their way. */
static bool of_every_length(device *d)
{
    static const uint64_t near[] = {256, KIB, 8 * KIB, 16 * KIB, 24 * KIB, PART};
    field f;
    bool good = field_open(&f, d, 21);

    for (uint64_t bytes = 256; good && bytes <= (gpu_subset() ? 1200u : 3 * KIB); bytes += 16)
        good = sum_blocks(&f, d, 3, bytes, PART);
    for (size_t i = 0; good && i < sizeof near / sizeof near[0]; i++)
        for (int64_t step = -8; good && step <= 8; step++)
            if (kvs_part_sum_fits(near[i] + (uint64_t)(16 * step), PART))
                good = sum_blocks(&f, d, 2, near[i] + (uint64_t)(16 * step), PART);
    for (int i = 0; good && i < (gpu_subset() ? 10 : 300); i++) {
        const uint64_t bytes = (16 + rnd_below(&f.r, 20000)) * 16;

        good = !kvs_part_sum_fits(bytes, PART) || sum_blocks(&f, d, 1 + (uint32_t)rnd_below(&f.r, 5), bytes, PART);
    }
    field_close(&f, d);
    return good;
}

static bool of_blocks_in_parts(device *d)
{
    field f;
    bool good = field_open(&f, d, 22) && sum_blocks(&f, d, 200, BLOCK, PART) && sum_blocks(&f, d, 1, BLOCK, PART) &&
                sum_blocks(&f, d, DEVICE_SUM_BLOCKS, 65536, PART) && sum_blocks(&f, d, 64, 16 << 20, PART) &&
                sum_blocks(&f, d, 1, 64 << 20, 1 << 20) && sum_blocks(&f, d, 7, 4800, 1600) &&
                sum_blocks(&f, d, 5, 4096 + 256, 1024);

    field_close(&f, d);
    return good;
}

/* What it cannot sum is refused, and the next call is fine. */
static bool what_does_not_fit_is_refused(device *d)
{
    static const struct {
        uint32_t n;
        uint64_t bytes, part, off;
        kvs_status want;
    } cases[] = {
        {0, BLOCK, PART, 0, KVS_E_INVALID},       {1, 0, PART, 0, KVS_E_INVALID},
        {1, 4100, PART, 0, KVS_E_INVALID},        {1, 240, PART, 0, KVS_E_INVALID},
        {1, PART + 240, PART, 0, KVS_E_INVALID},  {1, 4096, 0, 0, KVS_E_LIMIT},
        {1, 4096, 1000, 0, KVS_E_INVALID},        {1, 4096, PART, 8, KVS_E_INVALID},
        {200, 16 << 20, PART, 0, KVS_E_LIMIT},    {DEVICE_SUM_BLOCKS + 1, 4096, PART, 0, KVS_E_INVALID},
        {UINT32_MAX, 4096, PART, 0, KVS_E_LIMIT},
    };
    static uint64_t parts[DEVICE_SUM_PARTS];
    const void *blocks[DEVICE_SUM_BLOCKS + 1];
    device_queue *load = NULL;
    kvs_err err = {.msg = ""};
    device_sums s;
    field f;
    bool good = field_open(&f, d, 23) && d->ops->queue_open(d, DEVICE_LOAD, &load, &err) == KVS_OK;

    for (size_t i = 0; good && i < sizeof cases / sizeof cases[0]; i++) {
        for (uint32_t k = 0; k <= DEVICE_SUM_BLOCKS; k++)
            blocks[k] = f.dev + cases[i].off;
        s = (device_sums){blocks, cases[i].n, cases[i].bytes, cases[i].part, parts};
        if (d->ops->sum(f.store, &s, &err) != cases[i].want)
            good = GPU_FAIL("case %zu: %s: %s", i, kvs_status_name(err.status), err.msg);
    }
    s = (device_sums){blocks, 1, 4096, PART, parts};
    blocks[0] = f.dev;
    good = good && (d->ops->sum(load, &s, &err) == KVS_E_INVALID || GPU_FAIL("a queue that loads has summed"));
    good = good && sum_blocks(&f, d, 3, BLOCK, PART);
    d->ops->queue_close(load);
    field_close(&f, d);
    return good;
}

/* Beside copies of the same blocks: neither waits for the other.  Prints how long a batch takes. */
static bool beside_copies(device *d)
{
    enum { N = 3, ROUNDS = 50 }; /* a batch of the mover is no longer than that */
    static uint64_t parts[DEVICE_SUM_PARTS];
    const void *blocks[N];
    device_copy copies[N];
    device_sums s = {blocks, N, BLOCK, PART, parts};
    kvs_err err = {.msg = ""};
    uint8_t *pinned = NULL;
    double best = 1, best_beside = 1;
    uint64_t mark = 0;
    field f;
    bool good = field_open(&f, d, 24) && cudaHostAlloc((void **)&pinned, (size_t)N * BLOCK, 0) == cudaSuccess;

    for (uint32_t i = 0; good && i < N; i++) {
        blocks[i] = f.dev + (uint64_t)i * BLOCK;
        copies[i] = (device_copy){pinned + (uint64_t)i * BLOCK, blocks[i], BLOCK};
    }
    for (int i = 0; good && i < 2 * ROUNDS; i++) {
        bool beside = i % 2 != 0;
        double start, took;

        if (beside)
            good = d->ops->copy(f.store, copies, N, (device_how){DEVICE_BY_ENGINE, 0}, &mark, &err) == KVS_OK;
        start = gpu_seconds();
        good = good && d->ops->sum(f.store, &s, &err) == KVS_OK;
        took = gpu_seconds() - start;
        if (took < (beside ? best_beside : best))
            *(beside ? &best_beside : &best) = took;
        good = good && (!beside || d->ops->wait(f.store, mark, &err) == KVS_OK);
    }
    (void)printf("      %d blocks of %d bytes summed in %.0f us, and in %.0f us while they are copied\n", N, BLOCK,
                 best * 1e6, best_beside * 1e6);
    good = good && (memcmp(pinned, f.host, (size_t)N * BLOCK) == 0 || GPU_FAIL("copies differ"));
    for (uint32_t i = 0; good && i < N; i++)
        good = parts[i * kvs_part_sum_parts(BLOCK, PART)] == XXH3_64bits(pinned + (uint64_t)i * BLOCK, PART) ||
               GPU_FAIL("sum %" PRIu32, i);
    if (!good)
        (void)printf("      %s\n", err.msg);
    (void)cudaFreeHost(pinned);
    field_close(&f, d);
    return good;
}

static const gpu_test tests[] = {
    {"of_every_length", of_every_length},
    {"of_blocks_in_parts", of_blocks_in_parts},
    {"what_does_not_fit_is_refused", what_does_not_fit_is_refused},
    {"beside_copies", beside_copies},
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
