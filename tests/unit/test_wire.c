#include "proto/wire.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static wire_header some_header(void)
{
    return (wire_header){.op = WIRE_LOAD,
                         .status = KVS_E_BUSY,
                         .id = UINT64_C(0x0102030405060708),
                         .body_len = 4096,
                         .n_fds = 3,
                         .deadline_us = UINT64_MAX};
}

Test(wire, header_has_its_fields_where_the_page_says)
{
    static const uint8_t want[WIRE_HEADER_BYTES] = {'K', 'V', 'S', '1', 10,   0,    16,   0,    8,    7,   6,
                                                    5,   4,   3,   2,   1,    0,    16,   0,    0,    3,   0,
                                                    0,   0,   255, 255, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff};
    wire_header h = some_header(), got;
    uint8_t buf[WIRE_HEADER_BYTES];

    wire_header_encode(&h, buf);
    cr_assert_eq(memcmp(buf, want, sizeof want), 0);
    cr_assert_eq(wire_header_decode(buf, 4096, &got, NULL), KVS_OK);
    cr_assert_eq(got.op, h.op);
    cr_assert_eq(got.status, h.status);
    cr_assert_eq(got.id, h.id);
    cr_assert_eq(got.body_len, h.body_len);
    cr_assert_eq(got.n_fds, h.n_fds);
    cr_assert_eq(got.deadline_us, h.deadline_us);
}

Test(wire, header_refusals_name_value_and_limit)
{
    static const struct {
        size_t at;
        uint8_t value;
        kvs_status status;
        const char *msg;
    } BAD[] = {
        {0, 'k', KVS_E_PROTO, "header magic: 0x3153566b is not 0x3153564b"},
        {23, 1, KVS_E_PROTO, "header reserved: 256 is not 0"},
        {16, 1, KVS_E_LIMIT, "header body_len: 4097 is above 4096 bytes"},
        {19, 0xff, KVS_E_LIMIT, "header body_len: 4278194176 is above 4096 bytes"},
        {20, 65, KVS_E_LIMIT, "header n_fds: 65 is above 64"},
    };
    wire_header h = some_header(), got;

    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        uint8_t buf[WIRE_HEADER_BYTES];
        kvs_err err = {0};

        wire_header_encode(&h, buf);
        buf[BAD[i].at] = BAD[i].value;
        memset(&got, 0x5a, sizeof got);
        cr_assert_eq(wire_header_decode(buf, 4096, &got, &err), BAD[i].status);
        cr_assert_str_eq(err.msg, BAD[i].msg);
        cr_assert_eq(got.id, UINT64_C(0x5a5a5a5a5a5a5a5a)); /* not written */
    }
}

Test(wire, header_takes_the_largest_values)
{
    wire_header h = some_header(), got;
    uint8_t buf[WIRE_HEADER_BYTES];

    h.body_len = UINT32_MAX;
    h.n_fds = WIRE_MAX_FDS;
    h.op = UINT16_MAX; /* an op of a newer peer is no broken frame */
    wire_header_encode(&h, buf);
    cr_assert_eq(wire_header_decode(buf, UINT32_MAX, &got, NULL), KVS_OK);
    cr_assert_eq(got.body_len, UINT32_MAX);
}

Test(wire, names_every_op)
{
#define X(name, value) cr_assert_str_eq(wire_op_name(value), #name);
    WIRE_OP_MAP(X)
#undef X
    cr_assert_null(wire_op_name(0));
    cr_assert_null(wire_op_name(29));
    cr_assert_null(wire_op_name(UINT16_MAX));
}

Test(wire, words_are_little_endian)
{
    static const uint8_t want[] = {0x11, 0x33, 0x22, 0x77, 0x66, 0x55, 0x44, 0xff, 0xee, 0xdd, 0xcc,
                                   0xbb, 0xaa, 0x99, 0x88, 0x00, 0x00, 0x80, 0xbf, 'a',  'b'};
    uint8_t buf[64], back[2];
    wire_out o = {.base = buf, .cap = sizeof buf};
    wire_in i = {.base = buf, .len = sizeof want};

    wire_put_u8(&o, 0x11);
    wire_put_u16(&o, 0x2233);
    wire_put_u32(&o, 0x44556677);
    wire_put_u64(&o, UINT64_C(0x8899aabbccddeeff));
    wire_put_f32(&o, -1.0F);
    wire_put_bytes(&o, "ab", 2);
    cr_assert_eq(o.len, sizeof want);
    cr_assert_eq(memcmp(buf, want, sizeof want), 0);
    cr_assert_eq(wire_get_u8(&i), 0x11);
    cr_assert_eq(wire_get_u16(&i), 0x2233);
    cr_assert_eq(wire_get_u32(&i), 0x44556677);
    cr_assert_eq(wire_get_u64(&i), UINT64_C(0x8899aabbccddeeff));
    cr_assert_eq(wire_get_f32(&i), -1.0F);
    wire_get_bytes(&i, back, 2);
    cr_assert_eq(memcmp(back, "ab", 2), 0);
    cr_assert(wire_in_done(&i));
}

Test(wire, a_write_that_does_not_fit_writes_nothing_now_and_later)
{
    uint8_t buf[8] = {0};
    wire_out o = {.base = buf, .cap = 6};

    wire_put_u32(&o, 0x01010101);
    wire_put_u32(&o, 0x02020202);
    cr_assert(o.full);
    cr_assert_eq(o.len, 4);
    wire_put_u8(&o, 3);
    wire_put_pad8(&o);
    wire_put_bytes(&o, "x", 1);
    cr_assert_eq(o.len, 4);
    cr_assert_eq(buf[4], 0);
}

Test(wire, a_read_past_the_end_yields_zeros_from_then_on)
{
    static const uint8_t buf[6] = {1, 1, 1, 1, 7, 7};
    uint8_t bytes[3] = {9, 9, 9};
    wire_in i = {.base = buf, .len = sizeof buf};

    cr_assert_eq(wire_get_u32(&i), 0x01010101);
    cr_assert_eq(wire_get_u32(&i), 0);
    cr_assert(i.bad);
    cr_assert_eq(wire_get_u8(&i), 0);
    cr_assert_eq(wire_get_f32(&i), 0.0F);
    wire_get_bytes(&i, bytes, 3);
    cr_assert_eq(bytes[0] | bytes[1] | bytes[2], 0);
    cr_assert_null(wire_get_array(&i, 0, 4));
    cr_assert_not(wire_in_done(&i));
}

Test(wire, padding_is_zero_and_checked)
{
    uint8_t buf[16];
    wire_out o = {.base = buf, .cap = sizeof buf};
    wire_in i = {.base = buf, .len = 8};

    memset(buf, 0xff, sizeof buf);
    wire_put_pad8(&o);
    cr_assert_eq(o.len, 0);
    wire_put_u8(&o, 5);
    wire_put_pad8(&o);
    cr_assert_eq(o.len, 8);
    cr_assert_eq(wire_get_u64(&i), 5);
    for (size_t k = 1; k < 8; k++) {
        i = (wire_in){.base = buf, .len = 8};
        buf[k] = 0x80;
        cr_assert_eq(wire_get_u8(&i), 5);
        wire_get_pad8(&i);
        cr_assert(i.bad && i.bad_pad, "padding byte %zu", k);
        buf[k] = 0;
    }
    i = (wire_in){.base = buf, .len = 7};
    cr_assert_eq(wire_get_u8(&i), 5);
    wire_get_pad8(&i);
    cr_assert(i.bad && !i.bad_pad, "padding that is cut off");
}

Test(wire, bytes_left_over_are_not_done)
{
    static const uint8_t buf[16] = {0};
    wire_in i = {.base = buf, .len = sizeof buf};

    cr_assert_not_null(wire_get_array(&i, 1, 8));
    cr_assert_not(wire_in_done(&i));
    cr_assert_not_null(wire_get_array(&i, 8, 1));
    cr_assert(wire_in_done(&i));
}

Test(wire, array_products_do_not_wrap)
{
    static const uint8_t buf[64] = {0};
    static const struct {
        uint64_t n;
        size_t item;
    } BAD[] = {{UINT64_C(1) << 59, 32}, {UINT64_MAX / 32 + 2, 32},
               {UINT64_MAX, 1},         {UINT64_MAX, SIZE_MAX},
               {0x10000001, 16},        {3, 32},
               {2, SIZE_MAX / 2 + 2},   {65, 1}};

    for (size_t k = 0; k < sizeof BAD / sizeof *BAD; k++) {
        wire_in i = {.base = buf, .len = sizeof buf};

        cr_assert_null(wire_get_array(&i, BAD[k].n, BAD[k].item), "row %zu", k);
        cr_assert(i.bad);
    }
}

Test(wire, arrays_are_borrowed_in_place_and_padded)
{
    uint8_t *buf = calloc(1, 25); /* read from byte 1, so that elements are unaligned */
    wire_in i = {.base = buf + 1, .len = 24};
    const uint8_t *p;

    cr_assert_not_null(buf);
    buf[1] = 1;
    buf[9] = 2;
    p = wire_get_array(&i, 3, 4);
    cr_assert_eq(p, buf + 1);
    cr_assert_eq(i.pos, 16);
    cr_assert_eq(wire_at_u32(p, 0), 1);
    cr_assert_eq(wire_at_u32(p, 2), 2);
    cr_assert_eq(wire_at_u64(p, 1), 2);
    buf[13] = 3; /* in the padding */
    i = (wire_in){.base = buf + 1, .len = 24};
    cr_assert_null(wire_get_array(&i, 3, 4));
    cr_assert(i.bad);
    free(buf);
}

Test(wire, an_empty_array_takes_no_bytes)
{
    static const uint8_t buf[8] = {1};
    wire_in i = {.base = buf, .len = 8};

    cr_assert_eq(wire_get_array(&i, 0, 32), buf);
    cr_assert_eq(i.pos, 0);
    i = (wire_in){.base = buf, .len = 0};
    cr_assert_not_null(wire_get_array(&i, 0, 32));
    cr_assert(wire_in_done(&i));
}

/* Every body: all bytes different, read, written back, compared; cut at every length; refused when full. */
#define ROUND_TRIP(body)                                                                                               \
    static void round_trip_##body(void)                                                                                \
    {                                                                                                                  \
        uint8_t from[WIRE_##body##_BYTES], back[WIRE_##body##_BYTES];                                                  \
        wire_out o = {.base = back, .cap = sizeof back};                                                               \
        wire_in i = {.base = from, .len = sizeof from};                                                                \
        wire_##body v;                                                                                                 \
                                                                                                                       \
        for (size_t k = 0; k < sizeof from; k++)                                                                       \
            from[k] = (uint8_t)(k + 1);                                                                                \
        wire_get_##body(&i, &v);                                                                                       \
        cr_assert(wire_in_done(&i), #body);                                                                            \
        wire_put_##body(&o, &v);                                                                                       \
        cr_assert(!o.full && o.len == sizeof back && memcmp(from, back, sizeof back) == 0, #body);                     \
        i = (wire_in){.base = from, .len = sizeof from - 1};                                                           \
        wire_get_##body(&i, &v);                                                                                       \
        cr_assert(i.bad, #body);                                                                                       \
        o = (wire_out){.base = back, .cap = sizeof back - 1};                                                          \
        wire_put_##body(&o, &v);                                                                                       \
        cr_assert(o.full, #body);                                                                                      \
    }
WIRE_BODY_MAP(ROUND_TRIP)

Test(wire, every_body_comes_back_as_it_was)
{
#define X(body) round_trip_##body();
    WIRE_BODY_MAP(X)
#undef X
}

Test(wire, floats_keep_their_bits)
{
    static const float values[] = {0.0F, -0.0F, 1.5F, INFINITY, -INFINITY, 1e-45F, 0x1.fffffep127F};

    for (size_t k = 0; k < sizeof values / sizeof *values; k++) {
        uint8_t buf[4];
        wire_out o = {.base = buf, .cap = 4};
        wire_in i = {.base = buf, .len = 4};
        float got;

        wire_put_f32(&o, values[k]);
        got = wire_get_f32(&i);
        cr_assert_eq(memcmp(&got, &values[k], 4), 0, "value %zu", k);
    }
}
