#ifndef KVS_TESTS_MLA_TOKEN_H
#define KVS_TESTS_MLA_TOKEN_H

/* Tokens of every MLA format with random values of about unit variance, fit for attention.
 *
 * Knows the bytes of the formats.  Any thread; memory is the caller's. */

#include <stdint.h>

#include "tests/support/random.h"

/* kv_scale that mla_fp8 tokens are written for. */
#define MLA_TOKEN_KV_SCALE 0.0137f

/* Bytes of a row, and of its entry behind the page's rows (0: none). */
uint32_t mla_token_row_bytes(uint32_t format);
uint32_t mla_token_tail_bytes(uint32_t format);

/* n values of `format` (mla_bf16 or mla_fp16), n a multiple of 4. */
void mla_token_put_values(rnd *r, uint32_t format, uint8_t *row, uint32_t n, double scale);

/* A whole token.  Scales are not powers of two where the format leaves that open; bytes that no reader may look at are
 * NaN patterns. */
void mla_token_put(rnd *r, uint32_t format, uint8_t *row, uint8_t *tail);

#endif
