#include "kernels/device_cuda.h"

#ifndef KVS_CUDA

static kvs_status not_built(kvs_err *err)
{
    return kvs_fail(err, KVS_E_UNSUPPORTED, "cuda device: this build has none (nvcc was not there when it was made)");
}

kvs_status device_cuda_count(uint32_t *ret, kvs_err *err)
{
    (void)ret;
    return not_built(err);
}

kvs_status device_cuda_find(const uint8_t uuid[16], uint32_t *ret_ordinal, kvs_err *err)
{
    (void)uuid;
    (void)ret_ordinal;
    return not_built(err);
}

kvs_status device_cuda_open(device **ret, uint32_t ordinal, kvs_err *err)
{
    (void)ret;
    (void)ordinal;
    return not_built(err);
}

kvs_status device_cuda_get_info(device *d, device_cuda_info *ret, kvs_err *err)
{
    (void)d;
    (void)ret;
    return not_built(err);
}

#else

#include <ctype.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "kernels/cuda_device.h"
#include "kernels/cuda_error.h"
#include "kernels/cuda_nodes.h"
#include "kernels/host_pages.h"
#include "kernels/kernels_cuda.h"
#include "proto/wire.h"

#define AHEAD_BYTES (UINT64_C(1) << 30) /* a pool's pieces, but the first and the last */

kvs_status cuda_failed(cuda_device *d, kvs_err *err, const char *call, int error)
{
    kvs_status s = kvs_cuda_fail(err, call, error);

    if (s == KVS_E_DEVICE_LOST)
        atomic_store_explicit(&d->lost, true, memory_order_relaxed);
    return s;
}

kvs_status cuda_failed_bytes(cuda_device *d, kvs_err *err, const char *call, uint64_t bytes, int error)
{
    kvs_status s = kvs_cuda_fail_bytes(err, call, bytes, error);

    if (s == KVS_E_DEVICE_LOST)
        atomic_store_explicit(&d->lost, true, memory_order_relaxed);
    return s;
}

kvs_status cuda_enter(cuda_device *d, kvs_err *err)
{
    cudaError_t e;

    if (atomic_load_explicit(&d->lost, memory_order_relaxed))
        return kvs_fail(err, KVS_E_DEVICE_LOST, "cuda device %d was lost before", d->ordinal);
    e = cudaSetDevice(d->ordinal);
    return e == cudaSuccess ? KVS_OK : cuda_failed(d, err, "cudaSetDevice", e);
}

/* --- host memory -------------------------------------------------------------------------------------------- */

/* A pool grows from its start to its end: while the driver pins one piece, a thread maps the next one, if it is of an earlier
 * life.  Else it finds nothing to do. */
static void *map_ahead(void *arg)
{
    cuda_device *d = arg;

    d->ahead_bytes = kvs_pages_map(d->ahead_at, AHEAD_BYTES);
    return NULL;
}

static void end_ahead(cuda_device *d)
{
    if (d->has_ahead)
        (void)pthread_join(d->ahead, NULL);
    d->has_ahead = false;
}

static void begin_ahead(cuda_device *d, uint8_t *at)
{
    d->ahead_at = at;
    d->ahead_bytes = 0;
    d->has_ahead = pthread_create(&d->ahead, NULL, map_ahead, d) == 0;
}

static bool is_mapped(const cuda_device *d, const uint8_t *p, uint64_t bytes)
{
    return p == d->ahead_at && bytes <= d->ahead_bytes;
}

/* Drivers that count what they pin against the limit of locked memory only say that it failed. */
static kvs_status with_lock_limit(kvs_status s, kvs_err *err)
{
    char said[KVS_ERR_MSG_BYTES];
    struct rlimit lim;

    if (err == NULL || getrlimit(RLIMIT_MEMLOCK, &lim) != 0 || lim.rlim_cur == RLIM_INFINITY)
        return s;
    (void)snprintf(said, sizeof said, "%s", err->msg);
    return kvs_fail(err, s, "%.150s; %llu bytes may be locked: try LimitMEMLOCK=infinity (ulimit -l)", said,
                    (unsigned long long)lim.rlim_cur);
}

static kvs_status cuda_host_register(device *base, void *p, uint64_t bytes, kvs_err *err)
{
    cuda_device *d = (cuda_device *)base;
    kvs_status s = cuda_enter(d, err);
    cudaError_t e;

    if (s == KVS_OK && (p == NULL || bytes == 0 || bytes > INTPTR_MAX))
        s = kvs_fail(err, KVS_E_INVALID, "host_register: %" PRIu64 " bytes at %p are no range", bytes, p);
    end_ahead(d);
    if (s == KVS_OK && !is_mapped(d, p, bytes))
        s = kvs_pages_make(p, bytes, err);
    if (s != KVS_OK)
        return s;
    begin_ahead(d, (uint8_t *)p + bytes);
    e = cudaHostRegister(p, bytes, cudaHostRegisterPortable);
    return e == cudaSuccess ? KVS_OK : with_lock_limit(cuda_failed_bytes(d, err, "cudaHostRegister", bytes, e), err);
}

static void cuda_host_unregister(device *base, void *p, uint64_t bytes)
{
    (void)bytes;
    end_ahead((cuda_device *)base); /* its memory may be on its way out as well */
    ((cuda_device *)base)->ahead_bytes = 0;
    if (cuda_enter((cuda_device *)base, NULL) == KVS_OK && cudaHostUnregister(p) != cudaSuccess)
        (void)cudaGetLastError();
}

/* --- the device --------------------------------------------------------------------------------------------- */

static void cuda_close(device *base)
{
    cuda_device *d = (cuda_device *)base;

    if (d == NULL)
        return;
    end_ahead(d);
    free(d); /* the context is the process's: other devices of ours, or the caller's own code, may use it */
}

static void cuda_about(const device *base, device_about *ret)
{
    *ret = ((const cuda_device *)base)->about;
}

static const device_ops cuda_ops = {
    .name = "cuda",
    .memory = WIRE_MEMORY_CUDA_VMM,
    .depth = 2,
    .copies_by_kernel = true,
    .about = cuda_about,
    .close = cuda_close,
    .host_register = cuda_host_register,
    .host_unregister = cuda_host_unregister,
    .mem_create = cuda_mem_create,
    .mem_import = cuda_mem_import,
    .mem_close = cuda_mem_close,
    .mem_pieces = cuda_mem_pieces,
    .mem_base = cuda_mem_base,
    .mem_fd = cuda_mem_fd,
    .reaches = cuda_reaches,
    .mem_reached = cuda_mem_reached,
    .queue_open = cuda_queue_open,
    .queue_close = cuda_queue_close,
    .copy = cuda_queue_copy,
    .sum = cuda_queue_sum,
    .mla_write = cuda_queue_mla_write,
    .mla_decode = cuda_queue_mla_decode,
    .mla_extend = cuda_queue_mla_extend,
    .wait = cuda_queue_wait,
};

/* The driver's word for it, and the obstacle behind it where one can be seen: it is rarely the same. */
static kvs_status explained(kvs_status s, kvs_err *err)
{
    char why[KVS_ERR_MSG_BYTES], said[KVS_ERR_MSG_BYTES];

    if (s == KVS_OK || err == NULL || kvs_cuda_nodes_explain("", why, sizeof why)[0] == '\0')
        return s;
    (void)snprintf(said, sizeof said, "%s", err->msg);
    return kvs_fail(err, s, "%.150s; %s", why, said);
}

kvs_status device_cuda_count(uint32_t *ret, kvs_err *err)
{
    int n = 0, version = 0;
    cudaError_t e = cudaGetDeviceCount(&n);

    if (e != cudaSuccess && cudaDriverGetVersion(&version) == cudaSuccess && version == 0) {
        (void)cudaGetLastError();
        return kvs_fail(err, KVS_E_UNSUPPORTED, "cuda device: this machine has no CUDA driver");
    }
    if (e != cudaSuccess)
        return explained(kvs_cuda_fail(err, "cuda device: cudaGetDeviceCount", e), err);
    if (n < 1)
        return explained(kvs_fail(err, KVS_E_UNSUPPORTED, "cuda device: the driver shows 0 GPUs"), err);
    *ret = (uint32_t)n;
    return KVS_OK;
}

static kvs_status get_properties(uint32_t ordinal, struct cudaDeviceProp *ret, kvs_err *err)
{
    cudaError_t e = cudaGetDeviceProperties(ret, (int)ordinal);

    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, "cuda device: cudaGetDeviceProperties", e);
}

kvs_status device_cuda_find(const uint8_t uuid[16], uint32_t *ret_ordinal, kvs_err *err)
{
    uint32_t n = 0;
    kvs_status s = device_cuda_count(&n, err);
    char text[KVS_UUID_TEXT_BYTES];

    for (uint32_t i = 0; i < n && s == KVS_OK; i++) {
        struct cudaDeviceProp p;

        s = get_properties(i, &p, err);
        if (s == KVS_OK && memcmp(p.uuid.bytes, uuid, 16) == 0) {
            *ret_ordinal = i;
            return KVS_OK;
        }
    }
    if (s != KVS_OK)
        return s;
    kvs_cuda_uuid_text(uuid, text);
    return kvs_fail(err, KVS_E_NOT_FOUND, "cuda device: none of %" PRIu32 " GPUs has UUID %s", n, text);
}

static kvs_status check_sharing(cuda_device *d, kvs_err *err)
{
    static const struct {
        CUdevice_attribute attribute;
        const char *what;
    } needs[] = {
        {CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED, "virtual memory management"},
        {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, "memory handles as descriptors"},
        {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, "unified addressing"},
    };

    for (size_t i = 0; i < sizeof needs / sizeof needs[0]; i++) {
        int has = 0;
        CUresult e = d->driver.cuDeviceGetAttribute(&has, needs[i].attribute, d->ordinal);

        if (e != CUDA_SUCCESS)
            return cuda_failed(d, err, "cuDeviceGetAttribute", (int)e);
        if (!has)
            return kvs_fail(err, KVS_E_UNSUPPORTED, "cuda device %d: no %s", d->ordinal, needs[i].what);
    }
    return KVS_OK;
}

static kvs_status find_granularity(cuda_device *d, kvs_err *err)
{
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = d->ordinal}};
    size_t bytes = 0;
    CUresult e = d->driver.cuMemGetAllocationGranularity(&bytes, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM);

    if (e != CUDA_SUCCESS)
        return cuda_failed(d, err, "cuMemGetAllocationGranularity", (int)e);
    d->granularity = bytes;
    return KVS_OK;
}

/* Where the card is plugged in; -1: one node, or the system does not tell. */
static int32_t node_of(int ordinal)
{
    char pci[32], path[96];
    int node = -1;
    FILE *f;

    if (cudaDeviceGetPCIBusId(pci, sizeof pci, ordinal) != cudaSuccess) {
        (void)cudaGetLastError();
        return -1;
    }
    for (char *p = pci; *p != '\0'; p++)
        *p = (char)tolower((unsigned char)*p);
    (void)snprintf(path, sizeof path, "/sys/bus/pci/devices/%s/numa_node", pci);
    f = fopen(path, "re");
    if (f == NULL)
        return -1;
    if (fscanf(f, "%d", &node) != 1)
        node = -1;
    (void)fclose(f);
    return node;
}

kvs_status device_cuda_open(device **ret, uint32_t ordinal, kvs_err *err)
{
    cuda_device *d = NULL;
    struct cudaDeviceProp prop;
    int driver = 0;
    uint32_t n = 0;
    uint64_t before, after;
    kvs_status s = device_cuda_count(&n, err);

    if (s == KVS_OK && ordinal >= n)
        s = kvs_fail(err, KVS_E_UNSUPPORTED, "cuda device: ordinal %" PRIu32 " is not below the %" PRIu32 " GPUs",
                     ordinal, n);
    if (s == KVS_OK)
        s = get_properties(ordinal, &prop, err);
    if (s != KVS_OK)
        return s;
    before = cuda_used_bytes((int)ordinal);
    d = calloc(1, sizeof *d);
    if (d == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "cuda device: no memory for %zu bytes", sizeof *d);
    d->base.ops = &cuda_ops;
    d->ordinal = (int)ordinal;
    memcpy(d->uuid, prop.uuid.bytes, sizeof d->uuid);
    s = cuda_enter(d, err);
    if (s == KVS_OK)
        s = cuda_driver_load(&d->driver, err);
    if (s == KVS_OK)
        s = check_sharing(d, err);
    if (s == KVS_OK)
        s = find_granularity(d, err);
    if (s == KVS_OK)
        s = kvs_kernels_init(err);
    if (s != KVS_OK) {
        cuda_close(&d->base);
        return explained(s, err);
    }
    after = cuda_used_bytes((int)ordinal);
    (void)snprintf(d->about.name, sizeof d->about.name, "%.63s", prop.name);
    memcpy(d->about.uuid, d->uuid, sizeof d->about.uuid);
    d->about.total_bytes = prop.totalGlobalMem;
    d->about.numa_node = node_of((int)ordinal);
    if (cudaDriverGetVersion(&driver) == cudaSuccess)
        d->about.driver_version = (uint32_t)driver;
    d->about.idle_bytes = before != 0 && after > before ? after - before : 0;
    *ret = &d->base;
    return KVS_OK;
}

kvs_status device_cuda_get_info(device *base, device_cuda_info *ret, kvs_err *err)
{
    cuda_device *d = (cuda_device *)base;
    device_cuda_info info = {.ordinal = (uint32_t)d->ordinal, .granularity = d->granularity};
    struct cudaDeviceProp prop;
    size_t available = 0, total = 0;
    int driver = 0;
    kvs_status s = cuda_enter(d, err);
    cudaError_t e;

    if (s == KVS_OK)
        s = get_properties(info.ordinal, &prop, err);
    if (s != KVS_OK)
        return s;
    e = cudaMemGetInfo(&available, &total);
    if (e == cudaSuccess)
        e = cudaDriverGetVersion(&driver);
    if (e != cudaSuccess)
        return cuda_failed(d, err, "cudaMemGetInfo", e);
    (void)snprintf(info.name, sizeof info.name, "%.63s", prop.name);
    memcpy(info.uuid, d->uuid, sizeof info.uuid);
    info.n_processors = (uint32_t)prop.multiProcessorCount;
    info.capability = (uint32_t)(prop.major * 10 + prop.minor);
    info.driver_version = (uint32_t)driver;
    info.total_bytes = total;
    info.free_bytes = available;
    info.numa_node = d->about.numa_node;
    *ret = info;
    return KVS_OK;
}

#endif
