#ifndef KVS_KERNELS_CLIENT_STREAM_IMPL_H
#define KVS_KERNELS_CLIENT_STREAM_IMPL_H

/* What a mark is, for those in kernels/ who make a stream wait for one.  See client_stream.h. */

#ifdef KVS_CUDA
#include <cudaTypedefs.h>

#include "kernels/client_stream.h"

struct client_mark {
    CUevent event;
};
#endif

#endif
