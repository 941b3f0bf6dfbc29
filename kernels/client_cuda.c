#include "kernels/client_cuda.h"

#ifndef KVS_CUDA

static kvs_status not_built(kvs_err *err)
{
    return kvs_fail(err, KVS_E_UNSUPPORTED, "GPU memory: this build has no CUDA (nvcc was not there when it was made)");
}

kvs_status client_cuda_map_fds(client_cuda_map **ret, const int *fds, uint32_t n, uint64_t piece_bytes, uint64_t bytes,
                               void **ret_base, kvs_err *err)
{
    (void)ret;
    (void)fds;
    (void)n;
    (void)piece_bytes;
    (void)bytes;
    (void)ret_base;
    return not_built(err);
}

void client_cuda_unmap(client_cuda_map *m)
{
    (void)m;
}

int client_cuda_map_ordinal(const client_cuda_map *m)
{
    (void)m;
    return 0;
}

kvs_status client_cuda_lane_open(client_cuda_lane **ret, kvs_err *err)
{
    (void)ret;
    return not_built(err);
}

kvs_status client_cuda_copy(client_cuda_lane *l, void *dst, const void *src, uint64_t bytes, kvs_err *err)
{
    (void)l;
    (void)dst;
    (void)src;
    (void)bytes;
    return not_built(err);
}

kvs_status client_cuda_host(client_cuda_lane *l, uint64_t bytes, void **ret, kvs_err *err)
{
    (void)l;
    (void)bytes;
    (void)ret;
    return not_built(err);
}

void client_cuda_lane_close(client_cuda_lane *l)
{
    (void)l;
}

#else

#include <inttypes.h>
#include <stdbool.h>
#include <stdlib.h>

#include "kernels/client_driver.h"

/* ---- maps ---- */

struct client_cuda_map {
    CUdeviceptr base;
    uint64_t bytes, piece_bytes;
    int ordinal; /* whose context is kept for as long as this lives */
    bool has_context;
    uint32_t n; /* mapped */
};

static uint64_t piece_len(const client_cuda_map *m, uint32_t i)
{
    uint64_t left = m->bytes - i * m->piece_bytes;

    return left < m->piece_bytes ? left : m->piece_bytes;
}

void client_cuda_unmap(client_cuda_map *m)
{
    if (m == NULL)
        return;
    if (m->has_context && client_driver_enter(m->ordinal, NULL) == KVS_OK) {
        for (uint32_t i = 0; i < m->n; i++)
            (void)client_driver.cuMemUnmap(m->base + i * m->piece_bytes, piece_len(m, i));
        if (m->base != 0)
            (void)client_driver.cuMemAddressFree(m->base, m->bytes);
        client_driver_leave(m->ordinal);
        (void)client_driver.cuDevicePrimaryCtxRelease(m->ordinal);
    }
    free(m);
}

int client_cuda_map_ordinal(const client_cuda_map *m)
{
    return m->ordinal;
}

/* Which GPU a descriptor's memory is on, as this process counts them.  Some context is pushed. */
static kvs_status find_device(int fd, int *ret, kvs_err *err)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_INVALID};
    CUmemGenericAllocationHandle h;
    CUresult e = client_driver.cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd,
                                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuMemImportFromShareableHandle", e);
    e = client_driver.cuMemGetAllocationPropertiesFromHandle(&prop, h);
    (void)client_driver.cuMemRelease(h);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuMemGetAllocationPropertiesFromHandle", e);
    if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "descriptor: memory of location type %d is not a GPU's",
                        (int)prop.location.type);
    *ret = prop.location.id;
    return KVS_OK;
}

static kvs_status map_piece(client_cuda_map *m, int fd, kvs_err *err)
{
    CUmemGenericAllocationHandle h;
    CUresult e = client_driver.cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd,
                                                              CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuMemImportFromShareableHandle", e);
    e = client_driver.cuMemMap(m->base + m->n * m->piece_bytes, piece_len(m, m->n), 0, h, 0);
    (void)client_driver.cuMemRelease(h); /* the mapping keeps the memory */
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuMemMap", e);
    m->n++;
    return KVS_OK;
}

static kvs_status map_all(client_cuda_map *m, const int *fds, uint32_t n, kvs_err *err)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = m->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult e = client_driver.cuMemAddressReserve(&m->base, m->bytes, 0, 0, 0);
    kvs_status s = KVS_OK;

    if (e != CUDA_SUCCESS) {
        m->base = 0;
        return client_driver_failed(err, "cuMemAddressReserve", e);
    }
    while (m->n < n && s == KVS_OK)
        s = map_piece(m, fds[m->n], err);
    if (s != KVS_OK)
        return s;
    e = client_driver.cuMemSetAccess(m->base, m->bytes, &access, 1);
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuMemSetAccess", e);
}

kvs_status client_cuda_map_fds(client_cuda_map **ret, const int *fds, uint32_t n, uint64_t piece_bytes, uint64_t bytes,
                               void **ret_base, kvs_err *err)
{
    client_cuda_map *m;
    int home = 0;
    CUcontext kept;
    CUresult e;
    kvs_status s;

    if (n == 0 || piece_bytes == 0 || bytes == 0 || (bytes - 1) / piece_bytes + 1 != n)
        return kvs_fail(err, KVS_E_INVALID, "map: %" PRIu64 " bytes are not %" PRIu32 " pieces of %" PRIu64, bytes, n,
                        piece_bytes);
    m = calloc(1, sizeof *m);
    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "map: no memory");
    m->bytes = bytes;
    m->piece_bytes = piece_bytes;
    s = client_driver_home(&home, err);
    if (s == KVS_OK)
        s = client_driver_enter(home, err);
    if (s == KVS_OK) {
        s = find_device(fds[0], &m->ordinal, err);
        client_driver_leave(home);
    }
    if (s == KVS_OK) {
        e = client_driver.cuDevicePrimaryCtxRetain(&kept, m->ordinal);
        m->has_context = e == CUDA_SUCCESS;
        s = m->has_context ? client_driver_enter(m->ordinal, err)
                           : client_driver_failed(err, "cuDevicePrimaryCtxRetain", e);
    }
    if (s == KVS_OK) {
        s = map_all(m, fds, n, err);
        client_driver_leave(m->ordinal);
    }
    if (s != KVS_OK) {
        client_cuda_unmap(m);
        return s;
    }
    *ret = m;
    *ret_base = (void *)(uintptr_t)m->base;
    return KVS_OK;
}

/* ---- lanes ---- */

enum { LANE_BUFFERS = 8 };

struct client_cuda_lane {
    CUstream stream;
    CUcontext context;
    void *buffers[LANE_BUFFERS];
    uint32_t n;
};

kvs_status client_cuda_lane_open(client_cuda_lane **ret, kvs_err *err)
{
    client_cuda_lane *l = calloc(1, sizeof *l);
    CUresult e;
    kvs_status s;

    if (l == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "lane: no memory");
    s = client_driver_enter(0, err);
    if (s == KVS_OK) {
        e = client_driver.cuDevicePrimaryCtxRetain(&l->context, 0);
        if (e == CUDA_SUCCESS)
            e = client_driver.cuStreamCreate(&l->stream, CU_STREAM_NON_BLOCKING);
        s = e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuStreamCreate", e);
        if (s != KVS_OK && l->context != NULL)
            (void)client_driver.cuDevicePrimaryCtxRelease(0);
        client_driver_leave(0);
    }
    if (s != KVS_OK) {
        free(l);
        return s;
    }
    *ret = l;
    return KVS_OK;
}

void client_cuda_lane_close(client_cuda_lane *l)
{
    CUcontext c;

    if (l == NULL)
        return;
    if (client_driver.cuCtxPushCurrent(l->context) == CUDA_SUCCESS) {
        for (uint32_t i = 0; i < l->n; i++)
            (void)client_driver.cuMemFreeHost(l->buffers[i]);
        (void)client_driver.cuStreamDestroy(l->stream);
        (void)client_driver.cuCtxPopCurrent(&c);
    }
    (void)client_driver.cuDevicePrimaryCtxRelease(0);
    free(l);
}

kvs_status client_cuda_copy(client_cuda_lane *l, void *dst, const void *src, uint64_t bytes, kvs_err *err)
{
    CUcontext c;
    CUresult e = client_driver.cuCtxPushCurrent(l->context), end;

    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuCtxPushCurrent", e);
    e = client_driver.cuMemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, bytes, l->stream);
    end = client_driver.cuStreamSynchronize(l->stream);
    e = e != CUDA_SUCCESS ? e : end;
    (void)client_driver.cuCtxPopCurrent(&c);
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuMemcpyAsync", e);
}

kvs_status client_cuda_host(client_cuda_lane *l, uint64_t bytes, void **ret, kvs_err *err)
{
    CUcontext c;
    CUresult e;

    if (l->n == LANE_BUFFERS)
        return kvs_fail(err, KVS_E_LIMIT, "lane: %u buffers are as many as it has", l->n);
    e = client_driver.cuCtxPushCurrent(l->context);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuCtxPushCurrent", e);
    e = client_driver.cuMemHostAlloc(ret, bytes, CU_MEMHOSTALLOC_PORTABLE);
    (void)client_driver.cuCtxPopCurrent(&c);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuMemHostAlloc", e);
    l->buffers[l->n++] = *ret;
    return KVS_OK;
}
#endif
