#ifndef KVS_KERNELS_CUDA_DRIVER_H
#define KVS_KERNELS_CUDA_DRIVER_H

/* The driver's functions that the runtime does not wrap, found when a device is opened.
 *
 * Knows names and versions: each is asked for in the version that we were written against, whatever the newest is.
 * Any thread; immutable once filled.  Nothing to close: the runtime owns the driver library. */

#ifdef KVS_CUDA
#include <cudaTypedefs.h>

#include "proto/status.h"

#define CUDA_DRIVER_MAP(X)                                                                                             \
    X(cuMemCreate, 10020)                                                                                              \
    X(cuMemRelease, 10020)                                                                                             \
    X(cuMemMap, 10020)                                                                                                 \
    X(cuMemUnmap, 10020)                                                                                               \
    X(cuMemSetAccess, 10020)                                                                                           \
    X(cuMemAddressReserve, 10020)                                                                                      \
    X(cuMemAddressFree, 10020)                                                                                         \
    X(cuMemGetAllocationGranularity, 10020)                                                                            \
    X(cuMemGetAllocationPropertiesFromHandle, 10020)                                                                   \
    X(cuMemExportToShareableHandle, 10020)                                                                             \
    X(cuMemImportFromShareableHandle, 10020)                                                                           \
    X(cuMemGetAddressRange, 3020)                                                                                      \
    X(cuDeviceGetAttribute, 2000)

typedef struct cuda_driver {
#define X(name, version) PFN_##name##_v##version name;
    CUDA_DRIVER_MAP(X)
#undef X
} cuda_driver;

/* E_UNSUPPORTED names the function that this driver lacks. */
kvs_status cuda_driver_load(cuda_driver *ret, kvs_err *err);
#endif

#endif
