#include "tests/gpu/gpu_rank.h"

#ifdef KVS_CUDA
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "proto/ctl/pattern.h"

uint32_t rank_n_gpus(void)
{
    uint32_t n = 0;

    return device_cuda_count(&n, NULL) == KVS_OK ? n : 0;
}

bool rank_use(const rank *x)
{
    return cuda_ok(cudaSetDevice(x->ordinal), "cudaSetDevice");
}

void rank_close(rank *x)
{
    if (x->e.client != NULL)
        kvs_close(x->e.client);
    (void)cudaSetDevice(x->ordinal);
    if (x->stream != NULL)
        (void)cudaStreamDestroy(x->stream);
    (void)cudaFree(x->raw);
    (void)cudaFreeHost(x->host);
    (void)cudaSetDevice(0);
}

bool rank_join(rank *x, const char *socket, int ordinal, uint32_t layers)
{
    struct cudaPointerAttributes at;
    struct cudaDeviceProp prop;
    kvs_err err = {.msg = ""};
    uint32_t number = 0;
    uint64_t bytes;
    void *base;

    *x = (rank){.ordinal = ordinal};
    if (!engine_open(&x->e, socket, layers) ||
        !cuda_ok(cudaGetDeviceProperties(&prop, ordinal), "cudaGetDeviceProperties"))
        return false;
    if (kvs_device_find(x->e.client, (const uint8_t *)prop.uuid.bytes, &number, &err) != KVS_OK ||
        kvs_region_create(x->e.ns, number, MANY, &x->region, 0, &err) != KVS_OK ||
        kvs_region_map(x->region, &base, &bytes, &err) != KVS_OK ||
        kvs_slot_take(x->region, MANY, x->slots, 0, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    x->base = base;
    if (!rank_use(x) || !cuda_ok(cudaPointerGetAttributes(&at, base), "cudaPointerGetAttributes"))
        return false;
    if (at.device != ordinal)
        return GPU_FAIL("the region of device %u is on GPU %d, not on %d", number, at.device, ordinal);
    return cuda_ok(cudaStreamCreateWithFlags((cudaStream_t *)(void *)&x->stream, cudaStreamNonBlocking), "stream") &&
           cuda_ok(cudaMallocHost(&x->host, RANK_RAW_MIB * MiB), "pinned memory") &&
           cuda_ok(cudaMalloc(&x->raw, RANK_RAW_MIB * MiB), "device memory");
}

bool rank_open(rank *x, int ordinal, uint32_t layers)
{
    *x = (rank){.ordinal = ordinal};
    return engine_start_daemon() && rank_join(x, engine_daemon.socket, ordinal, layers);
}

bool rank_open_both(rank x[RANK_GPUS], uint32_t layers)
{
    memset(x, 0, RANK_GPUS * sizeof *x);
    return rank_open(&x[0], 0, layers) && rank_open(&x[1], 1, layers);
}

bool rank_fill(rank *x, uint32_t n, uint64_t id, uint8_t *host)
{
    uint64_t bytes = x->e.slot_bytes;

    for (uint32_t i = 0; i < n; i++) {
        uint8_t key[KVS_KEY_BYTES];

        pattern_key(id + i, key);
        pattern_fill(key, host, bytes);
        if (!rank_use(x) || !to_device(x->base + x->slots[i].slot * bytes, host, bytes))
            return false;
    }
    return true;
}

bool rank_holds(rank *x, uint32_t n, uint64_t id, uint8_t *host)
{
    uint64_t bytes = x->e.slot_bytes;

    for (uint32_t i = 0; i < n; i++) {
        uint8_t key[KVS_KEY_BYTES];

        pattern_key(id + i, key);
        if (!rank_use(x) || !from_device(host, x->base + x->slots[i].slot * bytes, bytes) ||
            pattern_verify(key, host, bytes) != bytes)
            return GPU_FAIL("GPU %d: block %u is not what was stored", x->ordinal, i);
    }
    return true;
}

bool rank_wipe(rank *x, uint32_t n)
{
    return rank_use(x) && set_device(x->base, 0x99, n * x->e.slot_bytes);
}
#else
typedef int gpu_rank_none; /* a translation unit holds a declaration */
#endif
