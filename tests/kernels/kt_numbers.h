#ifndef KVS_TESTS_KERNELS_KT_NUMBERS_H
#define KVS_TESTS_KERNELS_KT_NUMBERS_H

/* Number formats as their definitions say: by value and search, not by bit tricks.  The oracle of kernels/numeric.h;
 * shares no code with it.
 *
 * Knows formats.  Any thread; plain values. */

#include <stdint.h>

#include "tests/kernels/kt.h"

double kt_e4m3_value(uint8_t h);  /* NaN for 0x7F and 0xFF */
uint8_t kt_e4m3_of(float f);      /* nearest, ties to the even one; beyond 448: 448; NaN: 0x7F */
double kt_bf16_value(uint16_t h); /* exact */
uint16_t kt_bf16_of(float f);     /* nearest, ties to even; NaN: 0x7FFF */
double kt_fp16_value(uint16_t h);
uint16_t kt_fp16_of(float f); /* the same */
double kt_ue8m0_value(uint8_t code);

/* The byte that the cache holds for x with a scale: fp32(x / scale), then kt_e4m3_of. */
uint8_t kt_quantised(double x, float scale);
/* What is read for it: fp32(e4m3 * scale), a NaN as 0x7FFFFFFF. */
float kt_dequantised(uint8_t h, float scale);

/* A value of enum kvs_value at `row` as double, and into it (from fp32, one rounding). */
double kt_value(const uint8_t *row, uint32_t type, uint64_t i);
void kt_value_set(uint8_t *row, uint32_t type, uint64_t i, float f);

/* Values to be quantised: rows that are tame, wild (any bits), zero, or on the edges between two e4m3.  n values of
 * `type`. */
void kt_values_fill(kt *k, uint8_t *row, uint32_t type, uint32_t n);
/* Values that a scale puts on, or a few units beside, the edge between two e4m3: where a quotient must be right to the
 * last bit. */
void kt_values_near(kt *k, uint8_t *row, uint32_t type, uint32_t n, float scale);

#endif
