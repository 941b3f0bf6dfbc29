#ifndef KVS_KERNELS_MLA_RECORD_H
#define KVS_KERNELS_MLA_RECORD_H

/* One token of a quantised MLA format to fp32: what the C references of attention see.
 *
 * Knows formats.  Does not know views or queries.  Any thread; memory is the caller's. */

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { MLA_RECORD_VALUES = 576 };

/* Values of a token that a query is multiplied with: 512 for the block-wise formats, else 576. */
uint32_t mla_record_dims(uint32_t format);

/* row: the token's row; tail: its entry behind the page's rows (block-wise formats; else not looked at).  mla_fp8,
 * fp8_ds_mla, fp8_blk584 and fp8_blk528.  Values behind the format's own are 0; mla_fp8 comes without its scale. */
void mla_record_load(uint32_t format, const uint8_t *row, const uint8_t *tail, float dst[MLA_RECORD_VALUES]);

#ifdef __cplusplus
}
#endif
#endif
