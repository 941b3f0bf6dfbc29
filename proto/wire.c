#include "proto/wire.h"

#include <string.h>

/* The tables promise bodies without implicit padding: every fixed part keeps what follows on a multiple of 8.
 */
#define CHECK_SIZE(body) _Static_assert(WIRE_##body##_BYTES % 8 == 0, "wire_" #body " must be a multiple of 8 bytes");
WIRE_BODY_MAP(CHECK_SIZE)
#undef CHECK_SIZE

const char *wire_op_name(uint16_t op)
{
    switch (op) {
#define X(name, value)                                                                                                 \
    case WIRE_##name:                                                                                                  \
        return #name;
        WIRE_OP_MAP(X)
#undef X
    default:
        return NULL;
    }
}

/* ---- little-endian words ---- */

static void store_le(uint8_t *p, uint64_t v, size_t n)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (uint8_t)(v >> (8 * i));
}

static uint64_t load_le(const uint8_t *p, size_t n)
{
    uint64_t v = 0;

    for (size_t i = 0; i < n; i++)
        v |= (uint64_t)p[i] << (8 * i);
    return v;
}

/* ---- header ---- */

void wire_header_encode(const wire_header *h, uint8_t buf[WIRE_HEADER_BYTES])
{
    store_le(buf, WIRE_MAGIC, 4);
    store_le(buf + 4, h->op, 2);
    store_le(buf + 6, h->status, 2);
    store_le(buf + 8, h->id, 8);
    store_le(buf + 16, h->body_len, 4);
    store_le(buf + 20, h->n_fds, 2);
    store_le(buf + 22, 0, 2);
    store_le(buf + 24, h->deadline_us, 8);
}

kvs_status wire_header_decode(const uint8_t buf[WIRE_HEADER_BYTES], uint32_t body_max, wire_header *ret, kvs_err *err)
{
    uint32_t magic = (uint32_t)load_le(buf, 4);
    uint32_t reserved = (uint32_t)load_le(buf + 22, 2);
    wire_header h = {
        .op = (uint16_t)load_le(buf + 4, 2),
        .status = (uint16_t)load_le(buf + 6, 2),
        .id = load_le(buf + 8, 8),
        .body_len = (uint32_t)load_le(buf + 16, 4),
        .n_fds = (uint16_t)load_le(buf + 20, 2),
        .deadline_us = load_le(buf + 24, 8),
    };

    if (magic != WIRE_MAGIC)
        return kvs_fail(err, KVS_E_PROTO, "header magic: 0x%08x is not 0x%08x", magic, (unsigned)WIRE_MAGIC);
    if (reserved != 0)
        return kvs_fail(err, KVS_E_PROTO, "header reserved: %u is not 0", reserved);
    if (h.body_len > body_max)
        return kvs_fail(err, KVS_E_LIMIT, "header body_len: %u is above %u bytes", h.body_len, body_max);
    if (h.n_fds > WIRE_MAX_FDS)
        return kvs_fail(err, KVS_E_LIMIT, "header n_fds: %u is above %d", h.n_fds, WIRE_MAX_FDS);
    *ret = h;
    return KVS_OK;
}

/* ---- writing ---- */

/* `n` bytes of room, or NULL from the first write that does not fit on. */
static uint8_t *room(wire_out *o, size_t n)
{
    uint8_t *p;

    if (o->full || n > o->cap - o->len) {
        o->full = true;
        return NULL;
    }
    p = o->base + o->len;
    o->len += n;
    return p;
}

static void put_le(wire_out *o, uint64_t v, size_t n)
{
    uint8_t *p = room(o, n);

    if (p != NULL)
        store_le(p, v, n);
}

void wire_put_u8(wire_out *o, uint8_t v)
{
    put_le(o, v, 1);
}

void wire_put_u16(wire_out *o, uint16_t v)
{
    put_le(o, v, 2);
}

void wire_put_u32(wire_out *o, uint32_t v)
{
    put_le(o, v, 4);
}

void wire_put_u64(wire_out *o, uint64_t v)
{
    put_le(o, v, 8);
}

void wire_put_f32(wire_out *o, float v)
{
    uint32_t bits;

    memcpy(&bits, &v, sizeof bits);
    put_le(o, bits, 4);
}

void wire_put_bytes(wire_out *o, const void *p, size_t n)
{
    uint8_t *to = room(o, n);

    if (to != NULL && n != 0)
        memcpy(to, p, n);
}

void wire_put_pad8(wire_out *o)
{
    size_t n = (8 - o->len % 8) % 8;
    uint8_t *p = room(o, n);

    if (p != NULL && n != 0)
        memset(p, 0, n);
}

/* ---- reading ---- */

/* The next `n` bytes, or NULL from the first read that does not fit on. */
static const uint8_t *taken(wire_in *i, size_t n)
{
    const uint8_t *p;

    if (i->bad || n > i->len - i->pos) {
        i->bad = true;
        return NULL;
    }
    p = i->base + i->pos;
    i->pos += n;
    return p;
}

static uint64_t get_le(wire_in *i, size_t n)
{
    const uint8_t *p = taken(i, n);

    return p != NULL ? load_le(p, n) : 0;
}

uint8_t wire_get_u8(wire_in *i)
{
    return (uint8_t)get_le(i, 1);
}

uint16_t wire_get_u16(wire_in *i)
{
    return (uint16_t)get_le(i, 2);
}

uint32_t wire_get_u32(wire_in *i)
{
    return (uint32_t)get_le(i, 4);
}

uint64_t wire_get_u64(wire_in *i)
{
    return get_le(i, 8);
}

float wire_get_f32(wire_in *i)
{
    uint32_t bits = (uint32_t)get_le(i, 4);
    float v;

    memcpy(&v, &bits, sizeof v);
    return v;
}

void wire_get_bytes(wire_in *i, void *p, size_t n)
{
    const uint8_t *from = taken(i, n);

    if (n == 0)
        return;
    if (from != NULL)
        memcpy(p, from, n);
    else
        memset(p, 0, n);
}

void wire_get_pad8(wire_in *i)
{
    size_t n = (8 - i->pos % 8) % 8;
    const uint8_t *p = taken(i, n);

    for (size_t k = 0; p != NULL && k < n; k++)
        if (p[k] != 0)
            i->bad = i->bad_pad = true;
}

const uint8_t *wire_get_array(wire_in *i, uint64_t n, size_t item)
{
    const uint8_t *p;

    if (i->bad || (item != 0 && n > (i->len - i->pos) / item)) {
        i->bad = true;
        return NULL;
    }
    p = taken(i, (size_t)n * item); /* fits: the division above bounds the product by len */
    wire_get_pad8(i);
    return i->bad ? NULL : p;
}

uint32_t wire_at_u32(const uint8_t *array, size_t index)
{
    return (uint32_t)load_le(array + index * 4, 4);
}

uint64_t wire_at_u64(const uint8_t *array, size_t index)
{
    return load_le(array + index * 8, 8);
}

bool wire_in_done(const wire_in *i)
{
    return !i->bad && i->pos == i->len;
}

/* ---- fixed parts, one pair of functions a table ---- */

#define PUT_u16(name)   wire_put_u16(o, v->name);
#define PUT_u32(name)   wire_put_u32(o, v->name);
#define PUT_u64(name)   wire_put_u64(o, v->name);
#define PUT_f32(name)   wire_put_f32(o, v->name);
#define PUT_b16(name)   wire_put_bytes(o, v->name, 16);
#define PUT_b32(name)   wire_put_bytes(o, v->name, 32);
#define PUT(type, name) PUT_##type(name)

#define GET_u16(name)   v->name = wire_get_u16(i);
#define GET_u32(name)   v->name = wire_get_u32(i);
#define GET_u64(name)   v->name = wire_get_u64(i);
#define GET_f32(name)   v->name = wire_get_f32(i);
#define GET_b16(name)   wire_get_bytes(i, v->name, 16);
#define GET_b32(name)   wire_get_bytes(i, v->name, 32);
#define GET(type, name) GET_##type(name)

#define DEFINE_BODY(body)                                                                                              \
    void wire_put_##body(wire_out *o, const wire_##body *v)                                                            \
    {                                                                                                                  \
        WIRE_##body(PUT)                                                                                               \
    }                                                                                                                  \
    void wire_get_##body(wire_in *i, wire_##body *v)                                                                   \
    {                                                                                                                  \
        WIRE_##body(GET)                                                                                               \
    }
WIRE_BODY_MAP(DEFINE_BODY)
