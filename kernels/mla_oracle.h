#ifndef KVS_KERNELS_MLA_ORACLE_H
#define KVS_KERNELS_MLA_ORACLE_H

/* MLA decode, dense and sparse, as its definition says it, in fp64 and in no hurry, and the judge that compares a kernel with
 * it.
 *
 * Knows kernels/mla.h.  Shares no code with the kernels, not even number formats and addresses.  Any thread;
 * memory is the caller's. */

#include <stdbool.h>
#include <stdint.h>

#include "kernels/mla_sparse.h"

/* Value of 16 bits of an mla_bf16 or mla_fp16 view, and the bits nearest to a value (ties to even). */
double oracle_value(uint32_t format, uint16_t bits);
uint16_t oracle_bits(uint32_t format, double value);

double oracle_e4m3(uint8_t bits);

/* out [T][h_q][512], lse [T][h_q], both dense; a->out and a->lse are not touched.  Returns what ret_bad must
 * be. */
uint32_t oracle_mla_decode(const kvs_mla_decode_args *a, double *out, double *lse);
uint32_t oracle_mla_sparse(const kvs_mla_sparse_args *a, double *out, double *lse);

typedef struct oracle_verdict {
    double cosine;       /* worst cosine distance of a (token, head) row */
    double max_error;    /* worst error of a value, in units of its row's RMS */
    double lse;          /* worst error of an LSE */
    uint64_t wrong;      /* rows that are empty here and not there, or not finite */
    double cosine_limit; /* 1e-5 for 16-bit formats, 1e-4 for fp8 */
} oracle_verdict;

enum { ORACLE_TEXT_BYTES = 160 };

/* Compare a->out and a->lse with the oracle's, row by row. */
oracle_verdict oracle_compare(const kvs_mla_decode_args *a, const double *out, const double *lse);
oracle_verdict oracle_compare_rows(uint32_t format, const kvs_strided *got, const kvs_strided *got_lse,
                                   uint64_t n_tokens, uint32_t h_q, const double *out, const double *lse);
/* cosine < cosine_limit, max_error <= 0.03, lse <= 1e-3, wrong == 0.  The text says the numbers either way. */
bool oracle_accepts(const oracle_verdict *v, char text[ORACLE_TEXT_BYTES]);

/* Both of the above with memory of its own.  false: refused (the text says why) or out of memory. */
bool oracle_judge(const kvs_mla_decode_args *a, char text[ORACLE_TEXT_BYTES]);

#endif
