#ifdef KVS_CUDA
#include "kernels/cuda_driver.h"

#include <string.h>

#include <cuda_runtime_api.h>

static kvs_status find(const char *name, unsigned version, void *ret, kvs_err *err)
{
    enum cudaDriverEntryPointQueryResult found = cudaDriverEntryPointSymbolNotFound;
    void *f = NULL;

#if CUDART_VERSION >= 12050
    cudaError_t e = cudaGetDriverEntryPointByVersion(name, &f, version, cudaEnableDefault, &found);
#else
    cudaError_t e = cudaGetDriverEntryPoint(name, &f, cudaEnableDefault, &found);
    (void)version;
#endif

    if (e != cudaSuccess || found != cudaDriverEntryPointSuccess || f == NULL) {
        (void)cudaGetLastError();
        return kvs_fail(err, KVS_E_UNSUPPORTED, "driver: %s, version %u, is not there (%s)", name, version,
                        cudaGetErrorString(e));
    }
    /* C has no cast from an object's address to a function's; POSIX promises that the bits are the same. */
    memcpy(ret, &f, sizeof f);
    return KVS_OK;
}

kvs_status cuda_driver_load(cuda_driver *ret, kvs_err *err)
{
    cuda_driver d = {0};
    kvs_status s = KVS_OK;

#define X(name, version)                                                                                               \
    if (s == KVS_OK)                                                                                                   \
        s = find(#name, version, &d.name, err);
    CUDA_DRIVER_MAP(X)
#undef X
    if (s == KVS_OK)
        *ret = d;
    return s;
}
#else
typedef int kvs_no_cuda_driver; /* a translation unit holds a declaration */
#endif
