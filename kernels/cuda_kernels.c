#ifdef KVS_CUDA
#include "kernels/cuda_kernels.h"

#include "kernels/kernels_cuda.h"

kvs_status kvs_kernels_init(kvs_err *err)
{
    kvs_status (*const load[])(kvs_err *) = {
#define X(name) kvs_##name##_cuda_init,
        KVS_CUDA_KERNEL_MAP(X)
#undef X
    };
    kvs_status s = KVS_OK;

    for (size_t i = 0; i < sizeof load / sizeof *load && s == KVS_OK; i++)
        s = load[i](err);
    return s;
}
#else
typedef int kvs_no_cuda_kernels; /* a translation unit holds a declaration */
#endif
