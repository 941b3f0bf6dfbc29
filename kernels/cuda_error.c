#ifdef KVS_CUDA
#include "kernels/cuda_error.h"

#include <cuda_runtime_api.h>
#include <string.h>

kvs_status kvs_cuda_status(int error)
{
    switch (error) {
    case cudaSuccess:
        return KVS_OK;
    case cudaErrorMemoryAllocation:
        return KVS_E_NO_SPACE;
    case cudaErrorInsufficientDriver:
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorCallRequiresNewerDriver:
    case cudaErrorCompatNotSupportedOnDevice:
    case cudaErrorSystemDriverMismatch:
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorStubLibrary:
    case cudaErrorInitializationError:
    case cudaErrorSystemNotReady:
        return KVS_E_UNSUPPORTED;
    case cudaErrorInvalidValue:
    case cudaErrorInvalidConfiguration:
    case cudaErrorInvalidDevicePointer:
    case cudaErrorInvalidMemcpyDirection:
    case cudaErrorInvalidResourceHandle:
    case cudaErrorInvalidDeviceFunction:
    case cudaErrorMapBufferObjectFailed:
    case cudaErrorUnmapBufferObjectFailed:
    case cudaErrorAlreadyMapped:
    case cudaErrorNotMapped:
    case cudaErrorHostMemoryAlreadyRegistered:
    case cudaErrorHostMemoryNotRegistered:
    case cudaErrorOperatingSystem:
    case cudaErrorPeerAccessUnsupported:
    case cudaErrorLaunchOutOfResources:
    case cudaErrorNotReady:
    case cudaErrorNotPermitted:
    case cudaErrorNotSupported:
    case cudaErrorSymbolNotFound:
    case cudaErrorStreamCaptureUnsupported:
    case cudaErrorStreamCaptureInvalidated:
    case cudaErrorStreamCaptureWrongThread:
    case cudaErrorStreamCaptureImplicit:
        return KVS_E_DEVICE;
    default:
        return KVS_E_DEVICE_LOST;
    }
}

kvs_status kvs_cuda_fail(kvs_err *err, const char *call, int error)
{
    cudaError_t e = (cudaError_t)error;

    (void)cudaGetLastError();
    return kvs_fail(err, kvs_cuda_status(error), "%s: %s (%d): %s", call, cudaGetErrorName(e), error,
                    cudaGetErrorString(e));
}

kvs_status kvs_cuda_fail_bytes(kvs_err *err, const char *call, unsigned long long bytes, int error)
{
    cudaError_t e = (cudaError_t)error;

    (void)cudaGetLastError();
    return kvs_fail(err, kvs_cuda_status(error), "%s: %llu bytes: %s (%d): %s", call, bytes, cudaGetErrorName(e), error,
                    cudaGetErrorString(e));
}

void kvs_cuda_uuid_text(const uint8_t uuid[16], char ret[KVS_UUID_TEXT_BYTES])
{
    static const char digits[] = "0123456789abcdef";
    char *p = ret;

    memcpy(p, "GPU-", 4);
    p += 4;
    for (int i = 0; i < 16; i++) {
        *p++ = digits[uuid[i] >> 4];
        *p++ = digits[uuid[i] & 15];
        if (i == 3 || i == 5 || i == 7 || i == 9)
            *p++ = '-';
    }
    *p = '\0';
}
#else
typedef int kvs_no_cuda_error; /* a translation unit holds a declaration */
#endif
