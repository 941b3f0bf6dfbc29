#include "kernels/client_pack.h"

#include <stddef.h>

#ifndef KVS_CUDA

static kvs_status not_built(kvs_err *err)
{
    return kvs_fail(err, KVS_E_UNSUPPORTED, "packing: this build has no CUDA (nvcc was not there when it was made)");
}

kvs_status client_packer_open(client_packer **ret, const client_pack_options *o, kvs_err *err)
{
    (void)ret;
    (void)o;
    return not_built(err);
}

void client_packer_close(client_packer *p)
{
    (void)p;
}

void client_packer_slots(client_packer *p, void *staging, uint64_t slot_stride)
{
    (void)p;
    (void)staging;
    (void)slot_stride;
}

void *client_packer_stream(const client_packer *p)
{
    (void)p;
    return NULL;
}

kvs_status client_packer_after(client_packer *p, const client_mark *m, kvs_err *err)
{
    (void)p;
    (void)m;
    return not_built(err);
}

kvs_status client_packer_launch(client_packer *p, bool gather, const client_pack_pair *pairs, uint32_t n, kvs_err *err)
{
    (void)p;
    (void)gather;
    (void)pairs;
    (void)n;
    return not_built(err);
}

kvs_status client_packer_finish(client_packer *p, kvs_err *err)
{
    (void)p;
    return not_built(err);
}

#else

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/client_driver.h"
#include "kernels/client_stream_impl.h"

extern const unsigned char client_pack_image[]; /* the kernel as nvcc made it: a part of the build */

struct client_packer {
    int ordinal;
    CUcontext context; /* the primary one, kept */
    CUmodule module;
    CUfunction kernel;
    CUstream stream;
    CUdeviceptr planes; /* a copy of the table */
    uint32_t ctas;
    client_pack_params params;
};

static kvs_status inside(const client_packer *p, kvs_err *err)
{
    CUresult e = client_driver.cuCtxPushCurrent(p->context);

    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuCtxPushCurrent", e);
}

static void outside(void)
{
    CUcontext c;

    (void)client_driver.cuCtxPopCurrent(&c);
}

/* ---- checks ---- */

/* A tensor may lie in several allocations side by side (memory that is mapped in pieces): go from one to the next. */
static kvs_status check_range(uint32_t plane, uint64_t from, uint64_t bytes, kvs_err *err)
{
    uint64_t at = from, end = from + bytes;

    while (at < end) {
        CUdeviceptr base = 0;
        size_t size = 0;
        CUresult e = client_driver.cuMemGetAddressRange(&base, &size, at);

        if (e != CUDA_SUCCESS || base + size <= at)
            return kvs_fail(err, KVS_E_RANGE,
                            "planes[%" PRIu32 "]: %" PRIu64 " bytes from 0x%" PRIx64
                            " are needed, no memory at 0x%" PRIx64,
                            plane, bytes, from, at);
        at = base + size;
    }
    return KVS_OK;
}

static kvs_status check_plane(const client_packer *p, uint32_t i, const client_pack_plane *plane, uint32_t n_blocks,
                              kvs_err *err)
{
    CUmemorytype type = 0;
    int ordinal = -1;
    CUresult e = client_driver.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, plane->base);

    if (e == CUDA_SUCCESS)
        e = client_driver.cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, plane->base);
    if (e != CUDA_SUCCESS || type != CU_MEMORYTYPE_DEVICE)
        return kvs_fail(err, KVS_E_RANGE, "planes[%" PRIu32 "].base: 0x%" PRIx64 " is no memory of a GPU", i,
                        plane->base);
    if (ordinal != p->ordinal)
        return kvs_fail(err, KVS_E_RANGE, "planes[%" PRIu32 "].base: on GPU %d, but the staging slots are on GPU %d", i,
                        ordinal, p->ordinal);
    return check_range(i, plane->base, (uint64_t)(n_blocks - 1) * plane->stride + plane->bytes, err);
}

/* ---- life ---- */

static CUresult launch(client_packer *p)
{
    void *args[] = {&p->params};

    return client_driver.cuLaunchKernel(p->kernel, p->ctas, 1, 1, CLIENT_PACK_THREADS, 1, 1, 0, p->stream, args, NULL);
}

/* How pages are cut. */
static client_pack_params params_of(const client_packer *p, const client_pack_options *o)
{
    uint64_t longest = 0, tile;

    for (uint32_t i = 0; i < o->n_planes; i++)
        longest = o->planes[i].bytes > longest ? o->planes[i].bytes : longest;
    tile = (longest / CLIENT_PACK_TILES + 15) / 16 * 16 + 16;
    tile = tile > CLIENT_PACK_TILE ? tile : CLIENT_PACK_TILE;
    return (client_pack_params){.planes = (const client_pack_plane *)(uintptr_t)p->planes,
                                .n_planes = o->n_planes,
                                .tiles = (uint32_t)((longest + tile - 1) / tile),
                                .tile_bytes = tile};
}

/* One thread block a multiprocessor, if the caller does not care. */
static CUresult count_ctas(client_packer *p, const client_pack_options *o)
{
    int sms = 1;
    CUresult e = CUDA_SUCCESS;

    if (o->ctas == 0)
        e = client_driver.cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, o->ordinal);
    p->ctas = o->ctas != 0 ? o->ctas : (uint32_t)sms;
    return e;
}

static kvs_status open_inside(client_packer *p, const client_pack_options *o, kvs_err *err)
{
    uint64_t bytes = o->n_planes * sizeof *o->planes;
    int lowest = 0, highest = 0;
    const char *call = "cuDeviceGetAttribute";
    CUresult e;
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < o->n_planes && s == KVS_OK; i++)
        s = check_plane(p, i, &o->planes[i], o->n_blocks, err);
    if (s != KVS_OK)
        return s;
    e = count_ctas(p, o);
    if (e == CUDA_SUCCESS) {
        call = "cuModuleLoadData";
        e = client_driver.cuModuleLoadData(&p->module, client_pack_image);
    }
    if (e == CUDA_SUCCESS) {
        call = "cuModuleGetFunction";
        e = client_driver.cuModuleGetFunction(&p->kernel, p->module, "kvs_client_pack");
    }
    if (e == CUDA_SUCCESS) {
        call = "cuStreamCreateWithPriority";
        (void)client_driver.cuCtxGetStreamPriorityRange(&lowest, &highest);
        e = client_driver.cuStreamCreateWithPriority(&p->stream, CU_STREAM_NON_BLOCKING, lowest);
    }
    if (e == CUDA_SUCCESS) {
        call = "cuMemAlloc";
        e = client_driver.cuMemAlloc(&p->planes, bytes);
    }
    if (e == CUDA_SUCCESS) {
        call = "cuMemcpyAsync";
        e = client_driver.cuMemcpyAsync(p->planes, (CUdeviceptr)(uintptr_t)o->planes, bytes, p->stream);
    }
    /* A kernel is loaded at its first launch, which would wait for every stream: not later, when one may wait for us. */
    p->params = params_of(p, o);
    if (e == CUDA_SUCCESS) {
        call = "cuLaunchKernel";
        e = launch(p);
    }
    if (e == CUDA_SUCCESS)
        e = client_driver.cuStreamSynchronize(p->stream);
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, call, e);
}

kvs_status client_packer_open(client_packer **ret, const client_pack_options *o, kvs_err *err)
{
    client_packer *p = calloc(1, sizeof *p);
    CUresult e;
    kvs_status s;

    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "packing: no memory");
    p->ordinal = o->ordinal;
    s = client_driver_load(err);
    if (s == KVS_OK) {
        e = client_driver.cuDevicePrimaryCtxRetain(&p->context, o->ordinal);
        if (e != CUDA_SUCCESS) {
            p->context = NULL;
            s = client_driver_failed(err, "cuDevicePrimaryCtxRetain", e);
        }
    }
    if (s == KVS_OK)
        s = inside(p, err);
    if (s == KVS_OK) {
        s = open_inside(p, o, err);
        outside();
    }
    if (s != KVS_OK) {
        client_packer_close(p);
        return s;
    }
    *ret = p;
    return KVS_OK;
}

void client_packer_close(client_packer *p)
{
    if (p == NULL)
        return;
    if (p->context != NULL) {
        if (inside(p, NULL) == KVS_OK) {
            if (p->stream != NULL) {
                (void)client_driver.cuStreamSynchronize(p->stream);
                (void)client_driver.cuStreamDestroy(p->stream);
            }
            if (p->planes != 0)
                (void)client_driver.cuMemFree(p->planes);
            if (p->module != NULL)
                (void)client_driver.cuModuleUnload(p->module);
            outside();
        }
        (void)client_driver.cuDevicePrimaryCtxRelease(p->ordinal);
    }
    free(p);
}

void client_packer_slots(client_packer *p, void *staging, uint64_t slot_stride)
{
    p->params.staging = (uint64_t)(uintptr_t)staging;
    p->params.slot_stride = slot_stride;
}

/* ---- work ---- */

void *client_packer_stream(const client_packer *p)
{
    return p->stream;
}

kvs_status client_packer_after(client_packer *p, const client_mark *m, kvs_err *err)
{
    kvs_status s = inside(p, err);
    CUresult e;

    if (s != KVS_OK)
        return s;
    e = client_driver.cuStreamWaitEvent(p->stream, m->event, 0);
    outside();
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuStreamWaitEvent", e);
}

kvs_status client_packer_launch(client_packer *p, bool gather, const client_pack_pair *pairs, uint32_t n, kvs_err *err)
{
    kvs_status s;
    CUresult e;

    if (n == 0 || n > CLIENT_PACK_PAIRS)
        return kvs_fail(err, KVS_E_LIMIT, "packing: %" PRIu32 " blocks of a launch are outside 1..%d", n,
                        CLIENT_PACK_PAIRS);
    s = inside(p, err);
    if (s != KVS_OK)
        return s;
    p->params.gather = gather;
    p->params.n_pairs = n;
    memcpy(p->params.pairs, pairs, n * sizeof *pairs);
    e = launch(p);
    outside();
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "packing: cuLaunchKernel", e);
}

kvs_status client_packer_finish(client_packer *p, kvs_err *err)
{
    kvs_status s = inside(p, err);
    CUresult e;

    if (s != KVS_OK)
        return s;
    e = client_driver.cuStreamSynchronize(p->stream);
    outside();
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "packing: cuStreamSynchronize", e);
}
#endif
