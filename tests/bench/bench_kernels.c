/* Kernels of the cpu device, as ratios of times measured in the same run: interleaved, median of rounds. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <xxhash.h>

#include "kernels/block_sum.h"
#include "kernels/device.h"
#include "kernels/mla_tile.h"
#include "proto/layout.h"
#include "tests/support/mla_case.h"
#include "tests/support/random.h"

enum { ROUNDS = 15, LAYERS = 61, TOKENS = 64, PAGE = TOKENS * 1152, BLOCK = LAYERS * PAGE, BLOCKS = 32 };

static const device_how BY_ENGINE = {DEVICE_BY_ENGINE, 0};

static double now(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return x < y ? -1 : x > y;
}

static double median(double *t)
{
    qsort(t, ROUNDS, sizeof *t, by_value);
    return t[ROUNDS / 2];
}

static void die(const char *what)
{
    (void)fprintf(stderr, "bench_kernels: %s\n", what);
    exit(1);
}

/* Whole blocks through the device table beside memcpy of the same blocks. */
static void bench_copy(device *d, uint8_t *from, uint8_t *to)
{
    double plain[ROUNDS], table[ROUNDS];
    device_queue *q;
    device_copy c[BLOCKS];
    uint64_t mark;

    if (d->ops->queue_open(d, DEVICE_LOAD, &q, NULL) != KVS_OK)
        die("queue_open");
    for (int r = 0; r < ROUNDS; r++) {
        double t0 = now(), t1;

        for (uint64_t b = 0; b < BLOCKS; b++)
            memcpy(to + b * BLOCK, from + (b * 7 + 3) % BLOCKS * BLOCK, BLOCK);
        t1 = now();
        plain[r] = t1 - t0;
        for (uint64_t b = 0; b < BLOCKS; b++)
            c[b] = (device_copy){to + b * BLOCK, from + (b * 7 + 3) % BLOCKS * BLOCK, BLOCK};
        if (d->ops->copy(q, c, BLOCKS, BY_ENGINE, &mark, NULL) != KVS_OK || d->ops->wait(q, mark, NULL) != KVS_OK)
            die("copy");
        table[r] = now() - t1;
    }
    d->ops->queue_close(q);
    printf("copy of 4.3 MiB blocks, speed against memcpy      %.2f  (%.1f GB/s)\n", median(plain) / median(table),
           1e-9 * BLOCKS * BLOCK / median(table));
}

/* Rows into the middle layer beside memcpy of as many rows to the same places. */
static void bench_write(const uint8_t *rows, uint8_t *pool)
{
    enum { N = BLOCKS * TOKENS };
    static int64_t slots[N];
    double plain[ROUNDS], kernel[ROUNDS];
    kvs_view v = {pool + 30 * (uint64_t)PAGE, BLOCK, PAGE, BLOCKS, TOKENS, 1152, KVS_FORMAT_mla_bf16};
    kvs_mla_write_args a = {.view = v,
                            .kv_c = rows,
                            .k_pe = rows + 1024,
                            .kv_c_stride = 1152,
                            .k_pe_stride = 1152,
                            .slot_mapping = slots,
                            .n_tokens = N};
    rnd r = {1};

    for (int i = 0; i < N; i++)
        slots[i] = (int64_t)rnd_below(&r, N);
    for (int i = 0; i < ROUNDS; i++) {
        double t0 = now(), t1;
        uint32_t bad;

        for (int t = 0; t < N; t++)
            memcpy(kvs_view_row(&v, (uint32_t)(slots[t] / TOKENS), (uint32_t)(slots[t] % TOKENS), KVS_SITE_NONE),
                   rows + (uint64_t)t * 1152, 1152);
        t1 = now();
        plain[i] = t1 - t0;
        if (kvs_mla_write(&a, &bad, NULL) != KVS_OK)
            die("write");
        kernel[i] = now() - t1;
    }
    printf("cache write of rows, speed against memcpy         %.2f\n", median(plain) / median(kernel));
}

/* Sums of whole blocks by every instruction set beside XXH3, and of pages that are in the cache. */
static void bench_sum(const uint8_t *blocks)
{
    const kvs_sum_variant *v;
    const uint32_t n = kvs_sum_variants(&v);
    double xxh[ROUNDS], block[ROUNDS], page[ROUNDS];
    volatile uint64_t sink = 0;

    for (uint32_t k = 0; k < n; k++) {
        for (int i = 0; i < ROUNDS; i++) {
            double t0 = now(), t1, t2;

            for (uint64_t b = 0; b < BLOCKS; b++)
                sink += XXH3_64bits(blocks + b * BLOCK, BLOCK);
            t1 = now();
            xxh[i] = t1 - t0;
            for (uint64_t b = 0; b < BLOCKS; b++)
                sink += v[k].words(blocks + b * BLOCK, BLOCK / 8);
            t2 = now();
            block[i] = t2 - t1;
            for (int p = 0; p < LAYERS; p++)
                sink += v[k].words(blocks, PAGE / 8);
            page[i] = now() - t2;
        }
        printf("sum of blocks, %-8s against XXH3 speed        %.2f  (%.1f GB/s; in the cache %.1f GB/s)\n", v[k].name,
               median(xxh) / median(block), 1e-9 * BLOCKS * BLOCK / median(block), 1e-9 * BLOCK / median(page));
    }
}

/* Decode on the middle layer of 61 beside the same on a pool of one layer. */
static void bench_decode(void)
{
    mla_shape s = {.seed = 1, .tokens_per_block = TOKENS, .h_q = 128, .len = {1024}, .block_order = true};
    mla_case one, many;
    double plain[ROUNDS], strided[ROUNDS];

    if (!mla_case_init(&one, &s))
        die("memory");
    s.n_layers = LAYERS;
    s.layer = 30;
    if (!mla_case_init(&many, &s))
        die("memory");
    for (int r = 0; r < ROUNDS; r++) {
        double t0 = now(), t1;

        if (mla_case_run(&one, NULL) != KVS_OK)
            die("decode");
        t1 = now();
        plain[r] = t1 - t0;
        if (mla_case_run(&many, NULL) != KVS_OK)
            die("decode");
        strided[r] = now() - t1;
    }
    printf("decode, cross-layer against contiguous speed      %.2f  (128 heads, 1024 tokens: %.1f ms, %.0f "
           "GFLOP/s)\n",
           median(plain) / median(strided), 1e3 * median(strided), 128 * 1024 * 2176e-9 / median(strided));
    mla_case_fini(&one);
    mla_case_fini(&many);
}

/* Tiles by each instruction set beside the one that runs everywhere. */
static void bench_tiles(void)
{
    static uint8_t rows[MLA_TILE][2 * MLA_ROW];
    const mla_tile_variant *v;
    size_t n = mla_tile_variants(&v);
    double t[8][ROUNDS];
    mla_group *g = aligned_alloc(MLA_VECTOR_BYTES, sizeof *g / MLA_VECTOR_BYTES * MLA_VECTOR_BYTES + MLA_VECTOR_BYTES);

    if (g == NULL || n > 8)
        die("memory");
    memset(g, 0, sizeof *g);
    g->format = KVS_FORMAT_mla_bf16;
    g->n_rows = MLA_GROUP;
    g->n_tokens = MLA_TILE;
    for (uint32_t i = 0; i < MLA_GROUP; i++)
        g->visible[i] = MLA_TILE;
    for (uint32_t i = 0; i < MLA_TILE; i++)
        g->src[i] = rows[i];
    for (int r = 0; r < ROUNDS; r++)
        for (size_t k = 0; k < n; k++) {
            double t0 = now();

            for (int i = 0; i < 50; i++)
                v[k].step(g);
            t[k][r] = now() - t0;
        }
    for (size_t k = 0; k < n; k++) {
        double base = median(t[n - 1]);

        printf("decode tile, %-8s against plain speed         %.2f\n", v[k].name, base / median(t[k]));
    }
    free(g);
}

int main(void)
{
    uint8_t *a = aligned_alloc(4096, (uint64_t)BLOCKS * BLOCK), *b = aligned_alloc(4096, (uint64_t)BLOCKS * BLOCK);
    device *d;
    rnd r = {1};

    if (a == NULL || b == NULL || device_cpu_open(&d, NULL) != KVS_OK)
        die("memory");
    rnd_bytes(&r, a, (uint64_t)BLOCKS * BLOCK);
    memset(b, 1, (uint64_t)BLOCKS * BLOCK);
    bench_copy(d, a, b);
    bench_write(a, b);
    bench_sum(a);
    bench_decode();
    bench_tiles();
    d->ops->close(d);
    free(a);
    free(b);
    return 0;
}
