#include "tests/kernels/kt_writes.h"

kt_source kt_source_make(kt *k, uint32_t n, uint64_t row_bytes, uint32_t align)
{
    const uint64_t step = kt_chance(k, 2) ? 16 : align;
    kt_source s = {.front = step * rnd_below(&k->r, 9)};

    s.stride = (row_bytes + step - 1) / step * step + step * rnd_below(&k->r, 4);
    s.bytes = s.front + n * s.stride;
    s.all = kt_host(k, s.bytes);
    rnd_bytes(&k->r, s.all, s.bytes);
    s.host = s.all + s.front;
    return s;
}

uint8_t *kt_source_put(kt *k, const kt_source *s)
{
    return (uint8_t *)kt_in(k, s->all, s->bytes) + s->front;
}

/* More slots than tokens: those behind the tokens must never be used. */
static void new_slots(kt *k, kt_write *w, bool with_bad)
{
    const uint32_t spare = 3;

    w->slots = kt_slots(k, &w->pool, w->n + spare, with_bad, &w->bad);
    for (uint32_t t = w->n; t < w->n + spare; t++)
        w->bad -= w->slots[t] >= (int64_t)w->pool.shape.n_blocks * w->pool.shape.tokens;
}

static void make(kt *k, const kt_write_op *op, kt_write *w, const kt_shape *s, uint32_t n, bool with_bad)
{
    kt_shape fitted = *s;

    if (op->fit != NULL)
        op->fit(k, &fitted);
    *w = (kt_write){.pool = kt_pool_make(k, &fitted), .n = n, .word = kt_word(k)};
    new_slots(k, w, with_bad);
    w->dev_slots = kt_in(k, w->slots, (n + 3) * sizeof *w->slots);
    w->view = kt_view(k, &w->pool, s->layer, 0);
    op->make(k, w);
    kt_upload(k, &w->pool.buf);
}

static bool written(kt *k, const kt_write_op *op, kt_write *w)
{
    const uint32_t bad = kt_word_value(k, w->word), tokens = w->pool.shape.tokens;

    for (uint32_t t = 0; t < w->n; t++)
        if (kt_slot_good(&w->pool, w->slots[t]))
            op->expect(w, t, (uint64_t)w->slots[t] / tokens, (uint32_t)((uint64_t)w->slots[t] % tokens));
    if (bad != w->bad)
        return kt_fail(k, "%u bad slots counted, not %u", bad, w->bad);
    return kt_same(k, &w->pool.buf);
}

bool kt_write_shape(kt *k, const kt_write_op *op, const kt_shape *s, uint32_t n, bool with_bad)
{
    kt_write w;
    kvs_err err = {.msg = ""};

    make(k, op, &w, s, n, with_bad);
    if (op->launch(k, &w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return written(k, op, &w);
}

bool kt_write_random(kt *k, const kt_write_op *op)
{
    const kt_shape s = op->shape(k, k->where == KT_CPU ? 1 << 19 : 3 << 20);

    return kt_write_shape(k, op, &s, (uint32_t)rnd_below(&k->r, k->where == KT_CPU ? 60 : 300), kt_chance(k, 2));
}

bool kt_write_every_layer(kt *k, const kt_write_op *op)
{
    static const uint32_t layers[] = {1, 3, 61};

    for (int l = 0; l < 3; l++)
        for (int at = 0; at < 3; at++) {
            kt_shape s = kt_shape_plain(op->format, op->row_bytes, 4, 5);

            s.n_layers = layers[l];
            s.layer = at == 0 ? 0 : at == 1 ? layers[l] / 2 : layers[l] - 1;
            if (!kt_write_shape(k, op, &s, 15, true))
                return false;
        }
    return true;
}

bool kt_write_far(kt *k, const kt_write_op *op)
{
    const kt_shape s = kt_shape_far(op->format, op->row_bytes, 16);

    return kt_write_shape(k, op, &s, 100, true);
}

bool kt_write_nothing(kt *k, const kt_write_op *op)
{
    const kt_shape s = kt_shape_plain(op->format, op->row_bytes, 16, 3);

    return kt_write_shape(k, op, &s, 0, false);
}

bool kt_write_replayed(kt *k, const kt_write_op *op)
{
    kt_shape s = kt_shape_plain(op->format, op->row_bytes, 16, 9);
    kt_graph g;
    kt_write w;

    s.n_layers = 3;
    s.layer = 2;
    make(k, op, &w, &s, 50, false);
    if (!kt_graph_make(k, op->launch, &w, &g))
        return false;
    for (int round = 0; round < 4; round++) {
        new_slots(k, &w, round > 0);
        kt_put(k, (void *)(uintptr_t)w.dev_slots, w.slots, 50 * sizeof *w.slots);
        if (!kt_graph_run(k, &g) || !written(k, op, &w))
            return false;
    }
    return true;
}
