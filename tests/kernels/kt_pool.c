#include "tests/kernels/kt_pool.h"

#include <string.h>

#include "kernels/view_check.h"
#include "proto/layout.h"

enum { FAR_BLOCKS = 1000, FAR_LAYERS = 61 };
#define FAR_SLOT UINT64_C(4497408) /* 61 layers of 64 tokens of 1152 bytes: block 955 is the first above 2^32 */

static uint64_t up16(uint64_t n)
{
    return (n + 15) / 16 * 16;
}

uint32_t kt_shape_add(kt_shape *s, uint32_t format, uint32_t row_bytes)
{
    const kvs_token_bytes t = kvs_format_token_bytes(format);
    const uint32_t row = row_bytes > 0 ? row_bytes : t.row;

    s->plane[s->n_planes] = (kt_plane){format, row, up16((uint64_t)s->tokens * (row + t.tail))};
    return s->n_planes++;
}

kt_shape kt_shape_plain(uint32_t format, uint32_t row_bytes, uint32_t tokens, uint32_t n_blocks)
{
    kt_shape s = {.n_layers = 1, .n_blocks = n_blocks, .tokens = tokens};

    (void)kt_shape_add(&s, format, row_bytes);
    return s;
}

static uint64_t slot_bytes(const kt_shape *s)
{
    uint64_t layer = 0;

    for (uint32_t i = 0; i < s->n_planes; i++)
        layer += s->plane[i].page_bytes + s->gap;
    return layer * s->n_layers + s->slot_pad;
}

kt_shape kt_shape_far(uint32_t format, uint32_t row_bytes, uint32_t tokens)
{
    kt_shape s = {.n_layers = FAR_LAYERS, .layer = FAR_LAYERS - 1, .tokens = tokens, .front = 4096, .far = true};

    (void)kt_shape_add(&s, format, row_bytes);
    return s;
}

kt_shape kt_shape_random(kt *k, uint32_t format, uint32_t row_bytes, uint64_t max_bytes)
{
    static const uint32_t layers[] = {1, 2, 3, 3, 3, 5, 61}, tokens[] = {1, 2, 3, 5, 16, 16, 32, 64, 64, 100, 256};
    kt_shape s = {.n_layers = KT_PICK(k, layers), .tokens = KT_PICK(k, tokens)};
    const uint32_t where = (uint32_t)rnd_below(&k->r, 4);

    s.layer = where == 0 ? 0 : where == 1 ? s.n_layers - 1 : (uint32_t)rnd_below(&k->r, s.n_layers);
    s.gap = kt_chance(k, 3) ? 16 * rnd_below(&k->r, 5) : 0;
    s.slot_pad = kt_chance(k, 2) ? 16 * rnd_below(&k->r, 200) : 0;
    s.front = 16 * rnd_below(&k->r, 300);
    s.descending = kt_chance(k, 3);
    for (;;) { /* fewer tokens until it fits */
        s.n_planes = 0;
        (void)kt_shape_add(&s, format, row_bytes);
        if (slot_bytes(&s) * 3 <= max_bytes || s.tokens == 1)
            break;
        s.tokens = (s.tokens + 1) / 2;
    }
    if (kt_chance(k, 2)) { /* longer rows, and bytes between the last one and the next page */
        const uint32_t more = 16 * (uint32_t)rnd_below(&k->r, 3);

        s.plane[0].row_bytes += more;
        s.plane[0].page_bytes += (uint64_t)s.tokens * more + 16 * rnd_below(&k->r, 3);
    }
    if (kt_chance(k, 3))
        (void)kt_shape_add(&s, kt_chance(k, 2) ? KVS_FORMAT_indexer_fp8 : KVS_FORMAT_fp8_ds_mla, 0);
    s.n_blocks = 2 + (uint32_t)rnd_below(&k->r, 9);
    while (s.n_blocks > 2 && slot_bytes(&s) * s.n_blocks > max_bytes)
        s.n_blocks--;
    return s;
}

uint64_t kt_plane_offset(const kt_pool *p, uint32_t layer, uint32_t plane)
{
    const kt_shape *s = &p->shape;
    uint64_t one = 0, inside = 0;

    for (uint32_t i = 0; i < s->n_planes; i++) {
        if (i < plane)
            inside += s->plane[i].page_bytes + s->gap;
        one += s->plane[i].page_bytes + s->gap;
    }
    return one * (s->descending ? s->n_layers - 1 - layer : layer) + inside;
}

/* The slots of a few blocks, and the places that an address cut to 32 bits would lead to. */
static void far_windows(kt *k, kt_pool *p)
{
    const uint64_t slot = p->slot_bytes, front = p->shape.front, wrap = UINT64_C(1) << 32;
    const uint32_t ids[KT_FAR_IDS] = {0,
                                      1,
                                      (uint32_t)(wrap / 2 / slot),
                                      (uint32_t)(wrap / 2 / slot) + 1,
                                      (uint32_t)(wrap / slot),
                                      (uint32_t)(wrap / slot) + 1,
                                      FAR_BLOCKS - 2,
                                      FAR_BLOCKS - 1};

    memcpy(p->far_id, ids, sizeof ids);
    for (int i = 0; i < KT_FAR_IDS; i++) {
        const uint64_t at = ids[i] * slot;

        kt_buf_window(k, &p->buf, front + at, slot);
        if (at >= wrap)
            kt_buf_window(k, &p->buf, front + at - wrap, slot);
    }
}

kt_pool kt_pool_make(kt *k, const kt_shape *s)
{
    kt_pool p = {.shape = *s};

    if (s->far) {
        p.shape.n_blocks = FAR_BLOCKS;
        if (slot_bytes(&p.shape) < FAR_SLOT)
            p.shape.slot_pad += FAR_SLOT - slot_bytes(&p.shape);
    }
    p.slot_bytes = slot_bytes(&p.shape);
    /* A slot of slack behind the last one: a length that is a whole stride ends in it. */
    if (s->far) {
        p.buf = kt_buf_sparse(k, "pool", s->front + p.slot_bytes * (p.shape.n_blocks + 1));
        far_windows(k, &p);
    } else
        p.buf = kt_buf_make(k, "pool", s->front + p.slot_bytes * (p.shape.n_blocks + 1));
    return p;
}

kvs_view kt_view(kt *k, const kt_pool *p, uint32_t layer, uint32_t plane)
{
    const kt_plane *l = &p->shape.plane[plane];
    const uint64_t offset = kt_plane_offset(p, layer, plane);
    kvs_view v = {.base = p->buf.dev + p->shape.front + offset,
                  .block_stride = p->slot_bytes,
                  .page_bytes = l->page_bytes,
                  .n_blocks = p->shape.n_blocks,
                  .tokens_per_block = p->shape.tokens,
                  .row_bytes = l->row_bytes,
                  .format = l->format};

    kt_mutate(k, &v, offset);
    return v;
}

uint8_t *kt_page(const kt_pool *p, uint32_t layer, uint32_t plane, uint64_t block)
{
    return p->buf.want + p->shape.front + block * p->slot_bytes + kt_plane_offset(p, layer, plane);
}

uint8_t *kt_row(const kt_pool *p, uint32_t layer, uint32_t plane, uint64_t block, uint32_t token)
{
    return kt_page(p, layer, plane, block) + (uint64_t)token * p->shape.plane[plane].row_bytes;
}

uint32_t kt_block(kt *k, const kt_pool *p)
{
    return p->shape.far ? p->far_id[rnd_below(&k->r, KT_FAR_IDS)] : (uint32_t)rnd_below(&k->r, p->shape.n_blocks);
}

bool kt_slot_good(const kt_pool *p, int64_t slot)
{
    return slot >= 0 && (uint64_t)slot < (uint64_t)p->shape.n_blocks * p->shape.tokens;
}

int64_t *kt_slots(kt *k, const kt_pool *p, uint32_t n, bool with_bad, uint32_t *ret_bad)
{
    static const int64_t strange[] = {-1, INT64_MIN, -77, INT64_MAX, INT64_C(1) << 40, -(INT64_C(1) << 31)};
    const int64_t n_slots = (int64_t)p->shape.n_blocks * p->shape.tokens;
    int64_t *slots = kt_host(k, (n + 1) * sizeof *slots);
    uint64_t n_here = p->shape.far ? (uint64_t)KT_FAR_IDS * p->shape.tokens : (uint64_t)n_slots;
    uint64_t start = rnd_below(&k->r, n_here), step;

    /* Every `step`-th one from a random start, with a step that has no divisor in common: no slot comes twice. */
    do {
        uint64_t a = n_here, b = step = 1 + rnd_below(&k->r, n_here);

        while (b != 0) {
            const uint64_t rest = a % b;

            a = b;
            b = rest;
        }
        if (a == 1)
            break;
    } while (true);
    *ret_bad = 0;
    for (uint32_t t = 0; t < n; t++) {
        const uint64_t i = (start + t * step) % n_here;

        slots[t] = (int64_t)i;
        if (p->shape.far)
            slots[t] = (int64_t)p->far_id[i / p->shape.tokens] * p->shape.tokens + (int64_t)(i % p->shape.tokens);
        if (t >= n_here)
            slots[t] = -3;
        else if (with_bad && kt_chance(k, 8))
            slots[t] = kt_chance(k, 3) ? n_slots + (int64_t)rnd_below(&k->r, 3) : strange[rnd_below(&k->r, 6)];
        *ret_bad += slots[t] >= n_slots;
    }
    return slots;
}
