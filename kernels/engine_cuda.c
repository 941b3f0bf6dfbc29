#include "kernels/engine_cuda.h"

#ifndef KVS_CUDA

static kvs_status not_built(kvs_err *err)
{
    return kvs_fail(err, KVS_E_UNSUPPORTED, "engine: this build has no CUDA (nvcc was not there when it was made)");
}

kvs_status engine_cuda_open(engine_cuda **ret, kvs_err *err)
{
    (void)ret;
    return not_built(err);
}

void engine_cuda_close(engine_cuda *e)
{
    (void)e;
}

kvs_status engine_cuda_alloc(engine_cuda *e, uint64_t bytes, void **ret, uint8_t ret_uuid[16], uint8_t ret_handle[64],
                             kvs_err *err)
{
    (void)e;
    (void)bytes;
    (void)ret;
    (void)ret_uuid;
    (void)ret_handle;
    return not_built(err);
}

kvs_status engine_cuda_step(engine_cuda *e, enum engine_cuda_work work, double *ret_ms, kvs_err *err)
{
    (void)e;
    (void)work;
    (void)ret_ms;
    return not_built(err);
}

#else

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda_error.h"

enum { MAX_ALLOCATIONS = 16, MARKS = 3, SHORT_KERNELS = 64, HOST_NS = 20000 };
#define BUFFER_BYTES (UINT64_C(2) << 30)

struct engine_cuda {
    cudaStream_t stream;
    cudaEvent_t marks[MARKS]; /* the end of step n is mark n % MARKS */
    uint64_t steps;
    void *buffer;
    void *allocations[MAX_ALLOCATIONS];
    uint32_t n;
};

static kvs_status done(cudaError_t e, const char *call, kvs_err *err)
{
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, call, e);
}

void engine_cuda_close(engine_cuda *e)
{
    if (e == NULL)
        return;
    if (e->stream != NULL)
        (void)cudaStreamSynchronize(e->stream);
    for (uint32_t i = 0; i < e->n; i++)
        (void)cudaFree(e->allocations[i]);
    (void)cudaFree(e->buffer);
    for (int i = 0; i < MARKS; i++)
        if (e->marks[i] != NULL)
            (void)cudaEventDestroy(e->marks[i]);
    if (e->stream != NULL)
        (void)cudaStreamDestroy(e->stream);
    (void)cudaGetLastError();
    free(e);
}

kvs_status engine_cuda_open(engine_cuda **ret, kvs_err *err)
{
    engine_cuda *e = calloc(1, sizeof *e);
    kvs_status s;

    if (e == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "engine: no memory");
    s = done(cudaStreamCreateWithFlags(&e->stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags", err);
    for (int i = 0; i < MARKS && s == KVS_OK; i++)
        s = done(cudaEventCreateWithFlags(&e->marks[i], cudaEventBlockingSync), "cudaEventCreateWithFlags", err);
    if (s != KVS_OK) {
        engine_cuda_close(e);
        return s;
    }
    *ret = e;
    return KVS_OK;
}

kvs_status engine_cuda_alloc(engine_cuda *e, uint64_t bytes, void **ret, uint8_t ret_uuid[16], uint8_t ret_handle[64],
                             kvs_err *err)
{
    struct cudaDeviceProp prop;
    cudaIpcMemHandle_t handle;
    void *p = NULL;
    kvs_status s;

    if (e->n == MAX_ALLOCATIONS)
        return kvs_fail(err, KVS_E_LIMIT, "engine: %d allocations are as many as it has", (int)MAX_ALLOCATIONS);
    s = done(cudaMalloc(&p, bytes), "cudaMalloc", err);
    if (s != KVS_OK)
        return s;
    e->allocations[e->n++] = p;
    s = done(cudaIpcGetMemHandle(&handle, p), "cudaIpcGetMemHandle", err);
    if (s == KVS_OK)
        s = done(cudaGetDeviceProperties(&prop, 0), "cudaGetDeviceProperties", err);
    if (s != KVS_OK)
        return s;
    memcpy(ret_uuid, prop.uuid.bytes, 16);
    memcpy(ret_handle, &handle, 64);
    *ret = p;
    return KVS_OK;
}

static uint64_t now_ns(void)
{
    struct timespec t;

    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static kvs_status latency_step(engine_cuda *e, double *ret_ms, kvs_err *err)
{
    const uint64_t began = now_ns();
    kvs_status s = KVS_OK;

    for (int i = 0; i < SHORT_KERNELS && s == KVS_OK; i++) {
        uint64_t ended;

        s = engine_cuda_launch(ENGINE_CUDA_LATENCY, e->buffer, BUFFER_BYTES, e->stream, err);
        if (s == KVS_OK)
            s = done(cudaStreamSynchronize(e->stream), "cudaStreamSynchronize", err);
        for (ended = now_ns(); now_ns() < ended + HOST_NS;)
            ;
    }
    *ret_ms = (double)(now_ns() - began) / 1e6;
    return s;
}

kvs_status engine_cuda_step(engine_cuda *e, enum engine_cuda_work work, double *ret_ms, kvs_err *err)
{
    const uint64_t n = e->steps;
    float ms = 0;
    kvs_status s = KVS_OK;

    if (e->buffer == NULL)
        s = done(cudaMalloc(&e->buffer, BUFFER_BYTES), "cudaMalloc", err);
    if (s == KVS_OK && work == ENGINE_CUDA_LATENCY)
        return latency_step(e, ret_ms, err);
    if (s == KVS_OK)
        s = engine_cuda_launch(work, e->buffer, BUFFER_BYTES, e->stream, err);
    if (s == KVS_OK)
        s = done(cudaEventRecord(e->marks[n % MARKS], e->stream), "cudaEventRecord", err);
    if (s == KVS_OK && n > 0)
        s = done(cudaEventSynchronize(e->marks[(n - 1) % MARKS]), "cudaEventSynchronize", err);
    if (s == KVS_OK && n > 1)
        s = done(cudaEventElapsedTime(&ms, e->marks[(n - 2) % MARKS], e->marks[(n - 1) % MARKS]),
                 "cudaEventElapsedTime", err);
    e->steps += s == KVS_OK;
    if (s == KVS_OK)
        *ret_ms = (double)ms;
    return s;
}

#endif
