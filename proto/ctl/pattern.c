#include "proto/ctl/pattern.h"

#include <string.h>

/* Sebastiano Vigna's splitmix64 finaliser: a bijection on 64 bits, so different inputs give different words.
 */
static uint64_t mix(uint64_t x)
{
    x ^= x >> 30;
    x *= UINT64_C(0xbf58476d1ce4e5b9);
    x ^= x >> 27;
    x *= UINT64_C(0x94d049bb133111eb);
    return x ^ (x >> 31);
}

static const uint64_t STEP = UINT64_C(0x9e3779b97f4a7c15);

void pattern_key(uint64_t id, uint8_t ret_key[32])
{
    for (unsigned w = 0; w < 4; w++) {
        uint64_t v = mix(id + (w + 1) * STEP);

        for (unsigned b = 0; b < 8; b++)
            ret_key[w * 8 + b] = (uint8_t)(v >> (8 * b));
    }
}

static uint64_t fold(const uint8_t key[32])
{
    uint64_t h = 0;

    for (unsigned i = 0; i < 32; i++)
        h = mix(h ^ key[i]) + STEP;
    return h;
}

void pattern_fill(const uint8_t key[32], void *p, uint64_t bytes)
{
    uint64_t seed = fold(key);
    uint8_t *out = p;

    for (uint64_t i = 0; i < bytes / 8; i++) {
        uint64_t v = mix(seed + i * STEP);

        memcpy(out + i * 8, &v, 8);
    }
}

uint64_t pattern_verify(const uint8_t key[32], const void *p, uint64_t bytes)
{
    uint64_t seed = fold(key);
    const uint8_t *in = p;

    for (uint64_t i = 0; i < bytes / 8; i++) {
        uint64_t v;

        memcpy(&v, in + i * 8, 8);
        if (v != mix(seed + i * STEP))
            return i * 8;
    }
    return bytes;
}
