#include "kernels/client_memory.h"

#ifndef KVS_CUDA

kvs_status client_memory_handle(const void *p, uint8_t ret_uuid[16], uint8_t ret_handle[64], uint64_t *ret_offset,
                                uint64_t *ret_bytes, kvs_err *err)
{
    (void)p;
    (void)ret_uuid;
    (void)ret_handle;
    (void)ret_offset;
    (void)ret_bytes;
    return kvs_fail(err, KVS_E_UNSUPPORTED, "GPU memory: this build has no CUDA (nvcc was not there when it was made)");
}

#else

#include <string.h>

#include "kernels/client_driver.h"

static kvs_status wrong_kind(const void *p, const char *what, const char *instead, kvs_err *err)
{
    return kvs_fail(err, KVS_E_INVALID, "memory at %p is %s: %s", p, what, instead);
}

/* An attribute that this driver does not know is 0. */
static unsigned attribute(CUpointer_attribute which, CUdeviceptr at)
{
    unsigned value = 0;

    return client_driver.cuPointerGetAttribute(&value, which, at) == CUDA_SUCCESS ? value : 0;
}

/* The kinds that have no handle, and memory of the GPU `*ret_ordinal`, which has one. */
static kvs_status check_kind(const void *p, int *ret_ordinal, kvs_err *err)
{
    const CUdeviceptr at = (CUdeviceptr)(uintptr_t)p;
    CUmemorytype type = 0;
    void *pool = NULL;
    CUresult e = client_driver.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at);

    if (p == NULL)
        return wrong_kind(p, "no memory", "a null pointer was given", err);
    if (e == CUDA_ERROR_INVALID_VALUE)
        return wrong_kind(p, "ordinary host memory", "cudaMalloc it; a daemon without a GPU takes a memfd", err);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuPointerGetAttribute", e);
    if (attribute(CU_POINTER_ATTRIBUTE_IS_MANAGED, at) != 0)
        return wrong_kind(p, "managed memory", "it may be anywhere; cudaMalloc it", err);
    if (type != CU_MEMORYTYPE_DEVICE)
        return wrong_kind(p, "pinned host memory", "slots are on a GPU; cudaMalloc them", err);
    if (client_driver.cuPointerGetAttribute(&pool, CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, at) == CUDA_SUCCESS &&
        pool != NULL)
        return wrong_kind(p, "from a stream-ordered pool (cudaMallocAsync)", "cudaMalloc it", err);
    if (attribute(CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, at) == 0)
        return wrong_kind(p, "mapped virtual memory (cuMemMap, expandable segments)",
                          "export its handles as descriptors, memory = KVS_MEMORY_CUDA_VMM", err);
    e = client_driver.cuPointerGetAttribute(ret_ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at);
    return e == CUDA_SUCCESS ? KVS_OK : client_driver_failed(err, "cuPointerGetAttribute", e);
}

/* In the context of its GPU. */
static kvs_status describe(const void *p, int ordinal, uint8_t ret_uuid[16], uint8_t ret_handle[64],
                           uint64_t *ret_offset, uint64_t *ret_bytes, kvs_err *err)
{
    CUipcMemHandle handle;
    CUdeviceptr base = 0;
    size_t bytes = 0;
    CUuuid uuid;
    CUresult e = client_driver.cuMemGetAddressRange(&base, &bytes, (CUdeviceptr)(uintptr_t)p);

    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuMemGetAddressRange", e);
    e = client_driver.cuIpcGetMemHandle(&handle, base);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuIpcGetMemHandle", e);
    e = client_driver.cuDeviceGetUuid(&uuid, ordinal);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuDeviceGetUuid", e);
    _Static_assert(sizeof handle == 64 && sizeof uuid == 16, "the wire's handle and UUID are CUDA's");
    memcpy(ret_uuid, &uuid, 16);
    memcpy(ret_handle, &handle, 64);
    *ret_offset = (uint64_t)(uintptr_t)p - base;
    *ret_bytes = bytes;
    return KVS_OK;
}

kvs_status client_memory_handle(const void *p, uint8_t ret_uuid[16], uint8_t ret_handle[64], uint64_t *ret_offset,
                                uint64_t *ret_bytes, kvs_err *err)
{
    int ordinal = 0, home;
    kvs_status s = client_driver_home(&home, err);

    if (s == KVS_OK)
        s = client_driver_enter(home, err);
    if (s != KVS_OK)
        return s;
    s = check_kind(p, &ordinal, err);
    client_driver_leave(home);
    if (s == KVS_OK)
        s = client_driver_enter(ordinal, err);
    if (s != KVS_OK)
        return s;
    s = describe(p, ordinal, ret_uuid, ret_handle, ret_offset, ret_bytes, err);
    client_driver_leave(ordinal);
    return s;
}

#endif
