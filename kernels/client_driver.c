#include "kernels/client_driver.h"

#ifdef KVS_CUDA
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

static const char LIBRARY[] = "libcuda.so.1";

client_driver_calls client_driver;
static kvs_err missing; /* why there is none */
static pthread_once_t once = PTHREAD_ONCE_INIT;

kvs_status client_driver_failed(kvs_err *err, const char *call, CUresult e)
{
    const char *name = NULL;

    if (client_driver.cuGetErrorName(e, &name) != CUDA_SUCCESS || name == NULL)
        name = "unknown";
    return kvs_fail(err, e == CUDA_ERROR_OUT_OF_MEMORY ? KVS_E_NO_SPACE : KVS_E_DEVICE, "%s: %s (%d)", call, name,
                    (int)e);
}

static void load(void)
{
    void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    CUresult e;

    if (lib == NULL) {
        (void)kvs_fail(&missing, KVS_E_UNSUPPORTED, "GPU memory: this machine has no CUDA driver (%s)", LIBRARY);
        return;
    }
#define X(name, symbol, version)                                                                                       \
    {                                                                                                                  \
        void *f = dlsym(lib, #symbol);                                                                                 \
                                                                                                                       \
        if (f == NULL)                                                                                                 \
            (void)kvs_fail(&missing, KVS_E_UNSUPPORTED, "GPU memory: the driver has no " #symbol);                     \
        memcpy(&client_driver.name, &f, sizeof f);                                                                     \
    }
    CLIENT_DRIVER_MAP(X)
#undef X
    if (missing.status != KVS_OK)
        return;
    e = client_driver.cuInit(0);
    if (e != CUDA_SUCCESS) {
        (void)client_driver_failed(&missing, "cuInit", e);
        missing.status = KVS_E_UNSUPPORTED;
    }
}

kvs_status client_driver_load(kvs_err *err)
{
    (void)pthread_once(&once, load);
    return missing.status == KVS_OK ? KVS_OK : kvs_fail(err, missing.status, "%s", missing.msg);
}

bool client_driver_is_used(void)
{
    void *lib = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD);

    if (lib == NULL)
        return false;
    (void)dlclose(lib);
    return true;
}

kvs_status client_driver_home(int *ret_ordinal, kvs_err *err)
{
    kvs_status s = client_driver_load(err);
    int n = 0, active = 0;
    unsigned flags;
    CUresult e;

    if (s != KVS_OK)
        return s;
    e = client_driver.cuDeviceGetCount(&n);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuDeviceGetCount", e);
    *ret_ordinal = 0;
    for (int i = 0; i < n && !active; i++)
        if (client_driver.cuDevicePrimaryCtxGetState(i, &flags, &active) == CUDA_SUCCESS && active)
            *ret_ordinal = i;
    return KVS_OK;
}

kvs_status client_driver_enter(int ordinal, kvs_err *err)
{
    CUcontext c;
    CUresult e;
    kvs_status s = client_driver_load(err);

    if (s != KVS_OK)
        return s;
    e = client_driver.cuDevicePrimaryCtxRetain(&c, ordinal);
    if (e != CUDA_SUCCESS)
        return client_driver_failed(err, "cuDevicePrimaryCtxRetain", e);
    e = client_driver.cuCtxPushCurrent(c);
    if (e == CUDA_SUCCESS)
        return KVS_OK;
    (void)client_driver.cuDevicePrimaryCtxRelease(ordinal);
    return client_driver_failed(err, "cuCtxPushCurrent", e);
}

void client_driver_leave(int ordinal)
{
    CUcontext c;

    (void)client_driver.cuCtxPopCurrent(&c);
    (void)client_driver.cuDevicePrimaryCtxRelease(ordinal);
}
#endif
