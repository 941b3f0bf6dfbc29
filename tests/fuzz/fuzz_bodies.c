#include "proto/wire.h"

#include <stdlib.h>
#include <string.h>

/* The first byte picks a body table; the rest is read as that body with one array behind it.  What was read
 * in full must be written back as the same bytes. */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void same(const uint8_t *data, const wire_out *o, const wire_in *i)
{
    if (i->bad)
        return;
    if (o->full || o->len > i->pos || memcmp(o->base, data, o->len) != 0)
        abort();
}

/* A float is only copied, so that even the bits of a NaN come back. */
#define ROUND_TRIP(body)                                                                                               \
    static void round_trip_##body(const uint8_t *data, size_t size)                                                    \
    {                                                                                                                  \
        uint8_t back[WIRE_##body##_BYTES];                                                                             \
        wire_in i = {.base = data, .len = size};                                                                       \
        wire_out o = {.base = back, .cap = sizeof back};                                                               \
        wire_##body v;                                                                                                 \
                                                                                                                       \
        wire_get_##body(&i, &v);                                                                                       \
        wire_put_##body(&o, &v);                                                                                       \
        same(data, &o, &i);                                                                                            \
    }
WIRE_BODY_MAP(ROUND_TRIP)

static void arrays(const uint8_t *data, size_t size)
{
    wire_in i = {.base = data, .len = size};
    uint64_t n = wire_get_u64(&i);
    size_t item = wire_get_u32(&i) & 63;
    const uint8_t *p = wire_get_array(&i, n, item);

    if (p == NULL && !i.bad)
        abort();
    for (size_t k = 0; p != NULL && k < n * item; k++)
        if (p + k >= data + size)
            abort();
    if (wire_in_done(&i) && i.pos != size)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static void (*const TRY[])(const uint8_t *, size_t) = {arrays,
#define X(body) round_trip_##body,
                                                           WIRE_BODY_MAP(X)
#undef X
    };

    if (size != 0)
        TRY[data[0] % (sizeof TRY / sizeof *TRY)](data + 1, size - 1);
    return 0;
}
