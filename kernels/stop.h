#ifndef KVS_KERNELS_STOP_H
#define KVS_KERNELS_STOP_H

/* A flag by which another thread ends a call early.
 *
 * Calls in C look at it every few tokens, and return E_CANCELLED within a millisecond.  Outputs then hold rows of before
 * and rows of the call, each of them whole.  Those of CUDA do not look: what was launched comes to its end. */

#include <stdbool.h>
#include <stddef.h>

/* flag: NULL: nobody ever asks. */
static inline bool kvs_is_stopped(const bool *flag)
{
    return flag != NULL && __atomic_load_n(flag, __ATOMIC_RELAXED);
}

#endif
