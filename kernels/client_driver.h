#ifndef KVS_KERNELS_CLIENT_DRIVER_H
#define KVS_KERNELS_CLIENT_DRIVER_H

/* The CUDA driver as libkvstride uses it: a table of its functions, filled by dlopen at the first use.
 *
 * Knows names and versions.  Does not know what they are used for.  For kernels/client_*.c only.
 * Threads: any; the table does not change once client_driver_load has returned KVS_OK.
 * Ownership: the library stays open for as long as the process lives. */

#ifdef KVS_CUDA
#include <stdbool.h>

#include <cudaTypedefs.h>

#include "proto/status.h"

/*  function, its symbol, its version */
#define CLIENT_DRIVER_MAP(X)                                                                                           \
    X(cuInit, cuInit, 2000)                                                                                            \
    X(cuGetErrorName, cuGetErrorName, 6000)                                                                            \
    X(cuDeviceGetCount, cuDeviceGetCount, 2000)                                                                        \
    X(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000)                                                                \
    X(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000)                                                        \
    X(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000)                                                  \
    X(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000)                                                    \
    X(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000)                                                                     \
    X(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000)                                                                       \
    X(cuCtxSynchronize, cuCtxSynchronize, 2000)                                                                        \
    X(cuCtxGetStreamPriorityRange, cuCtxGetStreamPriorityRange, 5050)                                                  \
    X(cuMemImportFromShareableHandle, cuMemImportFromShareableHandle, 10020)                                           \
    X(cuMemGetAllocationPropertiesFromHandle, cuMemGetAllocationPropertiesFromHandle, 10020)                           \
    X(cuMemAddressReserve, cuMemAddressReserve, 10020)                                                                 \
    X(cuMemAddressFree, cuMemAddressFree, 10020)                                                                       \
    X(cuMemMap, cuMemMap, 10020)                                                                                       \
    X(cuMemUnmap, cuMemUnmap, 10020)                                                                                   \
    X(cuMemSetAccess, cuMemSetAccess, 10020)                                                                           \
    X(cuMemRelease, cuMemRelease, 10020)                                                                               \
    X(cuMemAlloc, cuMemAlloc_v2, 3020)                                                                                 \
    X(cuMemFree, cuMemFree_v2, 3020)                                                                                   \
    X(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020)                                                             \
    X(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010)                                                                      \
    X(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040)                                                                      \
    X(cuMemHostAlloc, cuMemHostAlloc, 2020)                                                                            \
    X(cuMemFreeHost, cuMemFreeHost, 2000)                                                                              \
    X(cuMemHostRegister, cuMemHostRegister_v2, 6050)                                                                   \
    X(cuMemHostUnregister, cuMemHostUnregister, 4000)                                                                  \
    X(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020)                                                   \
    X(cuMemcpyAsync, cuMemcpyAsync, 4000)                                                                              \
    X(cuPointerGetAttribute, cuPointerGetAttribute, 4000)                                                              \
    X(cuStreamCreate, cuStreamCreate, 2000)                                                                            \
    X(cuStreamCreateWithPriority, cuStreamCreateWithPriority, 5050)                                                    \
    X(cuStreamDestroy, cuStreamDestroy_v2, 4000)                                                                       \
    X(cuStreamSynchronize, cuStreamSynchronize, 2000)                                                                  \
    X(cuStreamGetCtx, cuStreamGetCtx, 9020)                                                                            \
    X(cuStreamIsCapturing, cuStreamIsCapturing, 10000)                                                                 \
    X(cuStreamWaitEvent, cuStreamWaitEvent, 3020)                                                                      \
    X(cuStreamWriteValue64, cuStreamWriteValue64_v2, 11070)                                                            \
    X(cuStreamWaitValue64, cuStreamWaitValue64_v2, 11070)                                                              \
    X(cuEventCreate, cuEventCreate, 2000)                                                                              \
    X(cuEventRecord, cuEventRecord, 2000)                                                                              \
    X(cuEventQuery, cuEventQuery, 2000)                                                                                \
    X(cuEventDestroy, cuEventDestroy_v2, 4000)                                                                         \
    X(cuModuleLoadData, cuModuleLoadData, 2000)                                                                        \
    X(cuModuleUnload, cuModuleUnload, 2000)                                                                            \
    X(cuModuleGetFunction, cuModuleGetFunction, 2000)                                                                  \
    X(cuLaunchKernel, cuLaunchKernel, 4000)

typedef struct client_driver_calls {
#define X(name, symbol, version) PFN_##name##_v##version name;
    CLIENT_DRIVER_MAP(X)
#undef X
} client_driver_calls;
extern client_driver_calls client_driver;

/* Look for the driver, once.  E_UNSUPPORTED: there is none, or it lacks the function that the message names. */
kvs_status client_driver_load(kvs_err *err);
/* Somebody in this process uses the driver already.  False: nothing can be waiting on a GPU. */
bool client_driver_is_used(void);

/* Name what a call said.  E_NO_SPACE: out of memory; E_DEVICE: everything else. */
kvs_status client_driver_failed(kvs_err *err, const char *call, CUresult e);

/* A GPU whose primary context this process has already, or the first: for calls that take any context.  To make one costs
 * time and, on a GPU that other processes have filled, memory that is not there. */
kvs_status client_driver_home(int *ret_ordinal, kvs_err *err);
/* Load, and push the primary context of GPU `ordinal`; leave undoes it. */
kvs_status client_driver_enter(int ordinal, kvs_err *err);
void client_driver_leave(int ordinal);
#endif

#endif
