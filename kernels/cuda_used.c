#ifdef KVS_CUDA
/* How much of a GPU's memory is in use, before a context exists as well as after: what NVML says.  The library comes with
 * the driver; where it is missing nothing is known, and nothing else suffers. */
#include <dlfcn.h>
#include <string.h>

#include "kernels/cuda_device.h"

/* nvmlMemory_t, version 1 of the interface, which never changes. */
typedef struct used_memory {
    unsigned long long total, free, used;
} used_memory;

typedef struct used_library {
    int (*init)(void);
    int (*shutdown)(void);
    int (*find)(const char *pci, void **ret);
    int (*memory)(void *card, used_memory *ret);
} used_library;

static bool find(void *lib, const char *name, void *ret)
{
    void *f = dlsym(lib, name);

    /* C has no cast from an object's address to a function's; POSIX promises that the bits are the same. */
    memcpy(ret, &f, sizeof f);
    return f != NULL;
}

static uint64_t ask(void *lib, const char *pci)
{
    used_library u;
    used_memory m = {0};
    void *card = NULL;
    bool good;

    if (!find(lib, "nvmlInit_v2", &u.init) || !find(lib, "nvmlShutdown", &u.shutdown) ||
        !find(lib, "nvmlDeviceGetHandleByPciBusId_v2", &u.find) || !find(lib, "nvmlDeviceGetMemoryInfo", &u.memory))
        return 0;
    if (u.init() != 0)
        return 0;
    good = u.find(pci, &card) == 0 && u.memory(card, &m) == 0;
    (void)u.shutdown();
    return good ? m.used : 0;
}

uint64_t cuda_used_bytes(int ordinal)
{
    char pci[32];
    uint64_t used = 0;
    void *lib;

    if (cudaDeviceGetPCIBusId(pci, sizeof pci, ordinal) != cudaSuccess) {
        (void)cudaGetLastError();
        return 0;
    }
    lib = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    if (lib == NULL)
        return 0;
    used = ask(lib, pci);
    (void)dlclose(lib);
    return used;
}
#else
typedef int kvs_no_cuda_used; /* a translation unit holds a declaration */
#endif
