#ifndef KVS_TESTS_KERNELS_KT_ORACLE_H
#define KVS_TESTS_KERNELS_KT_ORACLE_H

/* Number formats once more, as their definitions say, for expectations that share no code with kernels/.
 *
 * Knows bits.  Any thread; plain values. */

#include <stdint.h>

#include "tests/kernels/kt.h"

/* Value i of a row of enum kvs_value. */
double kt_value(const uint8_t *row, uint32_t type, uint64_t i);
/* The nearest e4m3, of two the even one; greater than 448 is 448, NaN is 0x7F. */
uint8_t kt_e4m3(double x);
double kt_e4m3_value(uint8_t code);
/* x / scale in fp32, then kt_e4m3. */
uint8_t kt_quantised(double x, float scale);

/* n values of a type that tell mistakes apart: ordinary ones, or now and then a whole row of zeros of both signs, of any
 * bits (NaN and infinity among them), or of zeros and one that is tiny. */
void kt_fill_values(kt *k, uint8_t *row, uint32_t type, uint32_t n);

#endif
