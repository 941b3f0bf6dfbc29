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

/* Lengths of n_seqs sequences and their rows of a block table. */
kvs_status kvs_tables_check(const int32_t *seq_len, const int32_t *block_table, uint64_t table_stride,
                            uint32_t table_width, uint32_t n_seqs, kvs_err *err);

/* All of kvs_mla_write's arguments, and all of kvs_mla_write_layers'.  *ret_type: of the source, never 0. */
kvs_status kvs_mla_write_check(const kvs_mla_write_args *a, uint32_t *ret_type, kvs_err *err);
kvs_status kvs_mla_write_layers_check(const kvs_mla_write_layers_args *a, uint32_t *ret_type, kvs_err *err);
/* One layer of it, as kvs_mla_write takes it. */
kvs_mla_write_args kvs_mla_write_layer(const kvs_mla_write_layers_args *a, uint32_t layer);

/* All of kvs_mla_decode's arguments but the workspace. */
kvs_status kvs_mla_decode_check(const kvs_mla_decode_args *a, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
