/* A daemon on a host with several GPUs: numbers and UUIDs, blocks from one to the other, both links at once.
 *
 * With one GPU the tests of two say so and count as passed over: the program then has one test. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "proto/ctl/clock.h"
#include "proto/ctl/pattern.h"
#include "tests/gpu/gpu_rank.h"

enum { GPUS = RANK_GPUS, SHARED = 32, ROUNDS = 5, RAW_MIB = RANK_RAW_MIB };

static bool by_uuid(device *d)
{
    static const uint8_t nobody[16] = {0xde, 0xad};
    kvs_server server;
    uint32_t found = 0;
    rank x;
    bool good;

    (void)d;
    good = rank_open(&x, (int)rank_n_gpus() - 1, FLAT);
    if (good) {
        kvs_server_get(x.e.client, &server);
        good = server.n_devices == rank_n_gpus() || GPU_FAIL("%u devices, %u GPUs", server.n_devices, rank_n_gpus());
        (void)printf("      the daemon serves %u GPUs\n", server.n_devices);
    }
    if (good && kvs_device_find(x.e.client, nobody, &found, NULL) != KVS_E_NOT_FOUND)
        good = GPU_FAIL("a UUID that nobody has was found as %u", found);
    rank_close(&x);
    return good;
}

/* ---- two ---- */

/* Case 035: rank 0 stores, both load; the pool has each block once. */
static bool replicas(device *d)
{
    rank x[GPUS];
    flight *f = calloc(GPUS, sizeof *f);
    uint8_t *host = NULL;
    kvs_err err = {.msg = ""};
    bool good = f != NULL && rank_open_both(x, DEEP);

    (void)d;
    host = good ? malloc(x[0].e.slot_bytes) : NULL;
    good = good && host != NULL && rank_fill(&x[0], SHARED, 500, host);
    if (good && engine_store(&x[0].e, x[0].region, 500, x[0].slots, SHARED, NULL, &err) != KVS_OK)
        good = GPU_FAIL("store: %s", err.msg);
    good = good && rank_wipe(&x[0], SHARED) && rank_wipe(&x[1], SHARED);
    for (int i = 0; i < GPUS; i++)
        good = good && flight_load(&f[i], &x[i].e, x[i].region, 500, x[i].slots, SHARED, NULL, NULL);
    for (int i = 0; i < GPUS && good; i++)
        good = flight_end(&f[i], &err) == KVS_OK || GPU_FAIL("load on GPU %d: %s", i, err.msg);
    good = good && rank_holds(&x[0], SHARED, 500, host) && rank_holds(&x[1], SHARED, 500, host);
    kvs_close(x[0].e.client); /* rank 1 alone still finds them */
    x[0].e.client = NULL;
    good = good && rank_wipe(&x[1], SHARED);
    if (good && engine_load(&x[1].e, x[1].region, 500, x[1].slots, SHARED, &err) != KVS_OK)
        good = GPU_FAIL("load behind rank 0's end: %s", err.msg);
    good = good && rank_holds(&x[1], SHARED, 500, host);
    rank_close(&x[0]);
    rank_close(&x[1]);
    free(host);
    free(f);
    return good;
}

/* GB/s of 1 GiB on each of the n GPUs in x, all at once. */
static double raw(rank *x, int n, bool load)
{
    const uint64_t bytes = RAW_MIB * MiB;
    uint64_t began = clock_ns();

    for (int i = 0; i < n; i++) {
        void *to = load ? x[i].raw : x[i].host, *from = load ? x[i].host : x[i].raw;

        if (!rank_use(&x[i]) || !cuda_ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, x[i].stream), "copy"))
            return 0;
    }
    for (int i = 0; i < n; i++)
        if (!cuda_ok(cudaStreamSynchronize(x[i].stream), "synchronise"))
            return 0;
    return (double)((uint64_t)n * bytes) / (double)(clock_ns() - began);
}

/* GB/s of MANY blocks for each of the n engines, all at once. */
static double moved(rank *x, flight *f, int n, bool load, uint64_t id)
{
    uint64_t began = clock_ns(), bytes = 0;
    kvs_err err = {.msg = ""};

    for (int i = 0; i < n; i++) {
        uint64_t first = id + (uint64_t)i * MANY;

        bytes += MANY * x[i].e.slot_bytes;
        if (!(load ? flight_load(&f[i], &x[i].e, x[i].region, first, x[i].slots, MANY, &engine_now, NULL)
                   : flight_store(&f[i], &x[i].e, x[i].region, first, x[i].slots, MANY, &engine_now)))
            return 0;
    }
    for (int i = 0; i < n; i++)
        if (flight_end(&f[i], &err) != KVS_OK) {
            (void)GPU_FAIL("GPU %d: %s", i, err.msg);
            return 0;
        }
    return (double)bytes / (double)(clock_ns() - began);
}

static int by_size(const void *a, const void *b)
{
    double d = *(const double *)a - *(const double *)b;

    return d < 0 ? -1 : d > 0;
}

static double median(double *v)
{
    qsort(v, ROUNDS, sizeof *v, by_size);
    return v[ROUNDS / 2];
}

typedef struct way {
    const char *name;
    bool load, checksum;
    double least; /* of raw copies on both GPUs at once */
} way;

/* With checksums a stored byte is read again by a processor, and the host's memory, not the links, is the limit of two GPUs: that
 * figure depends on the host, and is judged for being there at all. */
static const way WAYS[] = {
    {"STORE with checksums", false, true, 0.3},
    {"STORE", false, false, 0.9},
    {"LOAD", true, false, 0.95},
};

/* Of each round: raw on either GPU and on both at once, through the daemon at once. */
typedef struct round {
    double one[GPUS], both, own;
} round;

static bool play(rank x[GPUS], flight *f, const way *w, uint64_t id, round *ret)
{
    kvs_err err = {.msg = ""};

    if (kvs_reset(x[0].e.client, x[0].e.ns, 0, NULL, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    for (int i = 0; i < GPUS; i++)
        ret->one[i] = raw(&x[i], 1, w->load);
    ret->both = raw(x, GPUS, w->load);
    if (w->load && moved(x, f, GPUS, false, id) == 0)
        return false;
    ret->own = moved(x, f, GPUS, w->load, id);
    return ret->one[0] > 0 && ret->one[1] > 0 && ret->both > 0 && ret->own > 0;
}

/* Judged against raw copies on both GPUs at once: that is what the host can do.  One copy alone is faster, so that the sum of two
 * such is more than any program gets; it stands in the output beside it. */
static bool go_both_ways(rank x[GPUS], flight *f, const way *w)
{
    double first[ROUNDS], second[ROUNDS], both[ROUNDS], own[ROUNDS], sum, plain, through;

    for (int r = -1; r < ROUNDS; r++) { /* the first is for warmth */
        round t = {.own = 0};

        if (!play(x, f, w, 10000 + (uint64_t)(r + 1) * GPUS * MANY, &t))
            return false;
        if (r < 0)
            continue;
        first[r] = t.one[0];
        second[r] = t.one[1];
        both[r] = t.both;
        own[r] = t.own;
    }
    sum = median(first) + median(second);
    plain = median(both);
    through = median(own);
    (void)printf(
        "      %s: raw %.1f GB/s one by one in sum, %.1f at once; %d blocks each through the daemon at once %.1f: "
        "%.3f of raw at once, %.3f of that sum\n",
        w->name, sum, plain, MANY, through, through / plain, through / sum);
    return through >= w->least * plain || GPU_FAIL("%s: below %.2f of both raw copies at once", w->name, w->least);
}

static bool links(device *d)
{
    flight *f = calloc(GPUS, sizeof *f);
    bool good = f != NULL;

    (void)d;
    for (size_t i = 0; i < sizeof WAYS / sizeof *WAYS && good; i++) {
        rank x[GPUS];

        engine_set_checksum(WAYS[i].checksum);
        good = rank_open_both(x, DEEP) && go_both_ways(x, f, &WAYS[i]);
        rank_close(&x[0]);
        rank_close(&x[1]);
    }
    engine_set_checksum(true);
    free(f);
    return good;
}

static const gpu_test tests[] = {
    {"every GPU has a number, found by its UUID", by_uuid},
    {"case 035: rank 0 stores, both ranks load, each on its GPU", replicas},
    {"both links at once, beside raw copies on both at once", links},
};

int main(int argc, char **argv)
{
    int code = gpu_run(tests, rank_n_gpus() < GPUS ? 1 : sizeof tests / sizeof *tests, argc, argv);

    if (rank_n_gpus() == 1)
        (void)printf("      two GPUs: not here\n");
    engine_end_daemon(code != 0);
    return code;
}
#else
static bool none(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    static const gpu_test tests[] = {{"several GPUs", none}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
