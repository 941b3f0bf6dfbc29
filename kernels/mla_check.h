#ifndef KVS_KERNELS_MLA_CHECK_H
#define KVS_KERNELS_MLA_CHECK_H

/* Argument checks that every MLA kernel makes before it touches memory, whatever device it then runs on.
 *
 * Knows the rules of MLA's operands; those of views are in view_check.h.  Reads no memory behind them.  Any thread;
 * plain values. */

#include "kernels/mla.h"
#include "kernels/view_check.h"

#ifdef __cplusplus
extern "C" {
#endif

/* All of kvs_mla_decode's arguments but the workspace. */
kvs_status kvs_mla_decode_check(const kvs_mla_decode_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
