#ifdef KVS_CUDA
/* GPUs that read each other's memory. */
#include <string.h>

#include "kernels/cuda_device.h"

bool cuda_reaches(device *base, device *other_base)
{
    cuda_device *d = (cuda_device *)base, *other = (cuda_device *)other_base;
    cudaError_t e;
    int can = 0;

    if (other_base->ops->reaches != cuda_reaches || other->n_readers == CUDA_MAX_READERS ||
        cuda_enter(d, NULL) != KVS_OK)
        return false;
    e = cudaDeviceCanAccessPeer(&can, d->ordinal, other->ordinal);
    if (e == cudaSuccess && can)
        e = cudaDeviceEnablePeerAccess(other->ordinal, 0);
    if (e == cudaErrorPeerAccessAlreadyEnabled)
        e = cudaSuccess;
    (void)cudaGetLastError();
    if (e != cudaSuccess || !can)
        return false;
    other->readers[other->n_readers++] = d->ordinal;
    return true;
}

void cuda_grant(const cuda_device *d, CUdeviceptr at, uint64_t bytes, bool ret_has[CUDA_MAX_READERS])
{
    for (uint32_t i = 0; i < d->n_readers; i++) {
        CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = d->readers[i]},
                                  .flags = CU_MEM_ACCESS_FLAGS_PROT_READ};

        ret_has[i] = d->driver.cuMemSetAccess(at, bytes, &access, 1) == CUDA_SUCCESS;
    }
}
#else
typedef int kvs_no_cuda_peer; /* a translation unit holds a declaration */
#endif
