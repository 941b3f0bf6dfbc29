#ifndef KVS_KERNELS_MLA_WALK_H
#define KVS_KERNELS_MLA_WALK_H

/* The walk of mla_decode.c for kernels that have queries of their own making (mla_extend.c).
 *
 * Knows kvs_mla_decode_args, which the caller has checked but for s_q: here it has no limit.  Any thread. */

#include "kernels/mla.h"

/* a->parts, or what decode chooses for these lengths if it is 0. */
uint32_t mla_walk_parts(const kvs_mla_decode_args *a);

/* What kvs_mla_decode does behind its checks.  workspace: of kvs_mla_decode_workspace for these shapes with s_q 1.
 * site: of the addresses.  Returns how many lengths and table entries were bad. */
uint32_t mla_walk_run(const kvs_mla_decode_args *a, uint32_t parts, kvs_site site, void *workspace);

#endif
