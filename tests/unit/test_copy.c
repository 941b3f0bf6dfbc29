#include "kernels/copy.h"

#include <criterion/criterion.h>
#include <stdint.h>
#include <string.h>

enum { ROOM = 80 << 10, MARGIN = 128 };

static uint8_t src[ROOM], dst[ROOM], want[ROOM];

/* Every length around the switch, every alignment of both sides: the bytes, and none beside them. */
Test(copy, copies_exactly_the_bytes_asked_for)
{
    static const size_t lengths[] = {0, 1, 63, 4096, 32767, 32768, 32769, 32768 + 63, 32768 + 64, 73728};

    for (size_t i = 0; i < ROOM; i++)
        src[i] = (uint8_t)(i * 131 + (i >> 8));
    for (size_t l = 0; l < sizeof lengths / sizeof lengths[0]; l++)
        for (size_t shift = 0; shift < 64; shift += 7) {
            size_t s_at = MARGIN + shift / 3, d_at = MARGIN + shift;

            memset(dst, 0xee, sizeof dst);
            memset(want, 0xee, sizeof want);
            memcpy(want + d_at, src + s_at, lengths[l]);
            kvs_copy(dst + d_at, src + s_at, lengths[l]);
            cr_assert_eq(memcmp(dst, want, sizeof dst), 0, "length %zu shift %zu", lengths[l], shift);
        }
}
