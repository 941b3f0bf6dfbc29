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

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include <cudaTypedefs.h>

/*  function, its symbol, its version */
#define CALLS(X)                                                                                                       \
    X(cuInit, cuInit, 2000)                                                                                            \
    X(cuGetErrorName, cuGetErrorName, 6000)                                                                            \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)                                                        \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000)                                                  \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000)                                                                     \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000)                                                                       \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020)                                           \
    X(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020)                           \
    X(cuMemAddressReserve, cuMemAddressReserve, 10020)                                                                 \
    X(cuMemAddressFree, cuMemAddressFree, 10020)                                                                       \
    X(cuMemMap, cuMemMap, 10020)                                                                                       \
    X(cuMemUnmap, cuMemUnmap, 10020)                                                                                   \
    X(cuMemSetAccess, cuMemSetAccess, 10020)                                                                           \
    X(cuMemRelease, cuMemRelease, 10020)                                                                               \
    X(cuStreamCreate, cuStreamCreate, 2000)                                                                            \
    X(cuStreamDestroy, cuStreamDestroy_v2, 4000)                                                                       \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000)                                                                  \
    X(cuMemcpyAsync, cuMemcpyAsync, 4000)                                                                              \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020)                                                                            \
    X(cuMemFreeHost, cuMemFreeHost, 2000)

static struct {
    kvs_err err; /* why there is none */
#define X(name, symbol, version) PFN_##name##_v##version name;
    CALLS(X)
#undef X
} driver;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static kvs_status failed(kvs_err *err, const char *call, CUresult e)
{
    const char *name = NULL;

    if (driver.cuGetErrorName(e, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown";
    return kvs_fail(err, e == CUDA_ERROR_OUT_OF_MEMORY ? KVS_E_NO_SPACE : KVS_E_DEVICE, "%s: %s (%d)", call, name,
                    (int)e);
}

static void load(void)
{
    void *lib = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    CUresult e;

    if (lib == NULL) {
        (void)kvs_fail(&driver.err, KVS_E_UNSUPPORTED, "GPU memory: this machine has no CUDA driver (libcuda.so.1)");
        return;
    }
#define X(name, symbol, version)                                                                                       \
    {                                                                                                                  \
        void *f = dlsym(lib, #symbol);                                                                                 \
                                                                                                                       \
        if (f == NULL)                                                                                                 \
            (void)kvs_fail(&driver.err, KVS_E_UNSUPPORTED, "GPU memory: the driver has no " #symbol);                  \
        memcpy(&driver.name, &f, sizeof f);                                                                            \
    }
    CALLS(X)
#undef X
    if (driver.err.status != KVS_OK)
        return;
    e = driver.cuInit(0);
    if (e != CUDA_SUCCESS) {
        (void)failed(&driver.err, "cuInit", e);
        driver.err.status = KVS_E_UNSUPPORTED;
    }
}

/* The driver, and the primary context of GPU `ordinal` pushed; leave() undoes both. */
static kvs_status enter(int ordinal, kvs_err *err)
{
    CUcontext c;
    CUresult e;

    (void)pthread_once(&once, load);
    if (driver.err.status != KVS_OK)
        return kvs_fail(err, driver.err.status, "%s", driver.err.msg);
    e = driver.cuDevicePrimaryCtxRetain(&c, ordinal);
    if (e != CUDA_SUCCESS)
        return failed(err, "cuDevicePrimaryCtxRetain", e);
    e = driver.cuCtxPushCurrent(c);
    if (e == CUDA_SUCCESS)
        return KVS_OK;
    (void)driver.cuDevicePrimaryCtxRelease(ordinal);
    return failed(err, "cuCtxPushCurrent", e);
}

static void leave(int ordinal)
{
    CUcontext c;

    (void)driver.cuCtxPopCurrent(&c);
    (void)driver.cuDevicePrimaryCtxRelease(ordinal);
}

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
    if (m->has_context && enter(m->ordinal, NULL) == KVS_OK) {
        for (uint32_t i = 0; i < m->n; i++)
            (void)driver.cuMemUnmap(m->base + i * m->piece_bytes, piece_len(m, i));
        if (m->base != 0)
            (void)driver.cuMemAddressFree(m->base, m->bytes);
        leave(m->ordinal);
        (void)driver.cuDevicePrimaryCtxRelease(m->ordinal);
    }
    free(m);
}

/* Which GPU a descriptor's memory is on, as this process counts them.  The context is that of the first one. */
static kvs_status find_device(int fd, int *ret, kvs_err *err)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_INVALID};
    CUmemGenericAllocationHandle h;
    CUresult e =
        driver.cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (e != CUDA_SUCCESS)
        return failed(err, "cuMemImportFromShareableHandle", e);
    e = driver.cuMemGetAllocationPropertiesFromHandle(&prop, h);
    (void)driver.cuMemRelease(h);
    if (e != CUDA_SUCCESS)
        return failed(err, "cuMemGetAllocationPropertiesFromHandle", e);
    if (prop.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "descriptor: memory of location type %d is not a GPU's",
                        (int)prop.location.type);
    *ret = prop.location.id;
    return KVS_OK;
}

static kvs_status map_piece(client_cuda_map *m, int fd, kvs_err *err)
{
    CUmemGenericAllocationHandle h;
    CUresult e =
        driver.cuMemImportFromShareableHandle(&h, (void *)(uintptr_t)fd, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);

    if (e != CUDA_SUCCESS)
        return failed(err, "cuMemImportFromShareableHandle", e);
    e = driver.cuMemMap(m->base + m->n * m->piece_bytes, piece_len(m, m->n), 0, h, 0);
    (void)driver.cuMemRelease(h); /* the mapping keeps the memory */
    if (e != CUDA_SUCCESS)
        return failed(err, "cuMemMap", e);
    m->n++;
    return KVS_OK;
}

static kvs_status map_all(client_cuda_map *m, const int *fds, uint32_t n, kvs_err *err)
{
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = m->ordinal},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CUresult e = driver.cuMemAddressReserve(&m->base, m->bytes, 0, 0, 0);
    kvs_status s = KVS_OK;

    if (e != CUDA_SUCCESS) {
        m->base = 0;
        return failed(err, "cuMemAddressReserve", e);
    }
    while (m->n < n && s == KVS_OK)
        s = map_piece(m, fds[m->n], err);
    if (s != KVS_OK)
        return s;
    e = driver.cuMemSetAccess(m->base, m->bytes, &access, 1);
    return e == CUDA_SUCCESS ? KVS_OK : failed(err, "cuMemSetAccess", e);
}

kvs_status client_cuda_map_fds(client_cuda_map **ret, const int *fds, uint32_t n, uint64_t piece_bytes, uint64_t bytes,
                               void **ret_base, kvs_err *err)
{
    client_cuda_map *m;
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
    s = enter(0, err);
    if (s == KVS_OK) {
        s = find_device(fds[0], &m->ordinal, err);
        leave(0);
    }
    if (s == KVS_OK) {
        e = driver.cuDevicePrimaryCtxRetain(&kept, m->ordinal);
        m->has_context = e == CUDA_SUCCESS;
        s = m->has_context ? enter(m->ordinal, err) : failed(err, "cuDevicePrimaryCtxRetain", e);
    }
    if (s == KVS_OK) {
        s = map_all(m, fds, n, err);
        leave(m->ordinal);
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
    s = enter(0, err);
    if (s == KVS_OK) {
        e = driver.cuDevicePrimaryCtxRetain(&l->context, 0);
        if (e == CUDA_SUCCESS)
            e = driver.cuStreamCreate(&l->stream, CU_STREAM_NON_BLOCKING);
        s = e == CUDA_SUCCESS ? KVS_OK : failed(err, "cuStreamCreate", e);
        if (s != KVS_OK && l->context != NULL)
            (void)driver.cuDevicePrimaryCtxRelease(0);
        leave(0);
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
    if (driver.cuCtxPushCurrent(l->context) == CUDA_SUCCESS) {
        for (uint32_t i = 0; i < l->n; i++)
            (void)driver.cuMemFreeHost(l->buffers[i]);
        (void)driver.cuStreamDestroy(l->stream);
        (void)driver.cuCtxPopCurrent(&c);
    }
    (void)driver.cuDevicePrimaryCtxRelease(0);
    free(l);
}

kvs_status client_cuda_copy(client_cuda_lane *l, void *dst, const void *src, uint64_t bytes, kvs_err *err)
{
    CUcontext c;
    CUresult e = driver.cuCtxPushCurrent(l->context), end;

    if (e != CUDA_SUCCESS)
        return failed(err, "cuCtxPushCurrent", e);
    e = driver.cuMemcpyAsync((CUdeviceptr)(uintptr_t)dst, (CUdeviceptr)(uintptr_t)src, bytes, l->stream);
    end = driver.cuStreamSynchronize(l->stream);
    e = e != CUDA_SUCCESS ? e : end;
    (void)driver.cuCtxPopCurrent(&c);
    return e == CUDA_SUCCESS ? KVS_OK : failed(err, "cuMemcpyAsync", e);
}

kvs_status client_cuda_host(client_cuda_lane *l, uint64_t bytes, void **ret, kvs_err *err)
{
    CUcontext c;
    CUresult e;

    if (l->n == LANE_BUFFERS)
        return kvs_fail(err, KVS_E_LIMIT, "lane: %u buffers are as many as it has", l->n);
    e = driver.cuCtxPushCurrent(l->context);
    if (e != CUDA_SUCCESS)
        return failed(err, "cuCtxPushCurrent", e);
    e = driver.cuMemHostAlloc(ret, bytes, CU_MEMHOSTALLOC_PORTABLE);
    (void)driver.cuCtxPopCurrent(&c);
    if (e != CUDA_SUCCESS)
        return failed(err, "cuMemHostAlloc", e);
    l->buffers[l->n++] = *ret;
    return KVS_OK;
}
#endif
