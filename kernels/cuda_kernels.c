#ifdef KVS_CUDA
#include "kernels/cuda_kernels.h"

#include "kernels/kernels_cuda.h"

kvs_status kvs_kernels_init(kvs_err *err)
{
    kvs_status s = kvs_mla_write_cuda_init(err);

    if (s == KVS_OK)
        s = kvs_mla_decode_cuda_init(err);
    return s == KVS_OK ? kvs_page_copy_cuda_init(err) : s;
}
#else
typedef int kvs_no_cuda_kernels; /* a translation unit holds a declaration */
#endif
