#include "tests/kernels/kt_gathers.h"

static bool gathered(kt *k, const kt_gather_op *op, kt_gather *g)
{
    const uint32_t bad = kt_word_value(k, g->word);

    for (uint32_t r = 0; r < g->list.args.n_rows; r++)
        if (g->list.want[r].token)
            op->expect(g, r, g->list.want[r]);
    if (bad != g->list.bad)
        return kt_fail(k, "%u bad rows counted, not %u", bad, g->list.bad);
    for (uint32_t i = 0; i < g->n_out; i++)
        if (!kt_same(k, &g->out[i].buf))
            return false;
    return kt_same(k, &g->pool.buf);
}

static void make(kt *k, const kt_gather_op *op, kt_gather *g, const kt_shape *s, uint32_t n_seqs, uint32_t max_len,
                 bool with_bad)
{
    kt_shape fitted = *s;

    if (op->fit != NULL)
        op->fit(&fitted);
    *g = (kt_gather){.pool = kt_pool_make(k, &fitted), .word = kt_word(k)};
    g->list = kt_list_make(k, &g->pool, n_seqs, max_len, with_bad);
    g->view = kt_view(k, &g->pool, s->layer, 0);
    op->make(k, g);
    kt_upload(k, &g->pool.buf);
    for (uint32_t i = 0; i < g->n_out; i++)
        kt_upload(k, &g->out[i].buf);
}

bool kt_gather_shape(kt *k, const kt_gather_op *op, const kt_shape *s, uint32_t n_seqs, uint32_t max_len, bool with_bad)
{
    kt_gather g;
    kvs_err err = {.msg = ""};

    make(k, op, &g, s, n_seqs, max_len, with_bad);
    if (op->launch(k, &g, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return gathered(k, op, &g);
}

bool kt_gather_random(kt *k, const kt_gather_op *op)
{
    const kt_shape s = op->shape(k, k->where == KT_CPU ? 1 << 19 : 3 << 20);

    return kt_gather_shape(k, op, &s, 1 + (uint32_t)rnd_below(&k->r, 9), 1 + (uint32_t)rnd_below(&k->r, 90),
                           kt_chance(k, 2));
}

bool kt_gather_every_layer(kt *k, const kt_gather_op *op)
{
    static const uint32_t layers[] = {1, 3, 61};

    for (int l = 0; l < 3; l++)
        for (int at = 0; at < 3; at++) {
            kt_shape s = kt_shape_plain(op->format, op->row_bytes, 4, 5);

            s.n_layers = layers[l];
            s.layer = at == 0 ? 0 : at == 1 ? layers[l] / 2 : layers[l] - 1;
            if (!kt_gather_shape(k, op, &s, 3, 10, true))
                return false;
        }
    return true;
}

bool kt_gather_far(kt *k, const kt_gather_op *op)
{
    const kt_shape s = kt_shape_far(op->format, op->row_bytes, 16);

    return kt_gather_shape(k, op, &s, 8, 150, true);
}

bool kt_gather_nothing(kt *k, const kt_gather_op *op)
{
    const kt_shape s = kt_shape_plain(op->format, op->row_bytes, 16, 3);

    return kt_gather_shape(k, op, &s, 0, 1, false) && kt_gather_shape(k, op, &s, 3, 0, false);
}

bool kt_gather_replayed(kt *k, const kt_gather_op *op)
{
    kt_shape s = kt_shape_plain(op->format, op->row_bytes, 16, 9);
    kvs_err err = {.msg = ""};
    kt_graph graph;
    kt_gather g;

    s.n_layers = 3;
    s.layer = 2;
    make(k, op, &g, &s, 5, 60, false);
    if (op->launch(k, &g, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    if (!gathered(k, op, &g) || !kt_graph_make(k, op->launch, &g, &graph))
        return false;
    for (int round = 0; round < 3; round++) { /* rows keep what an earlier round wrote: so does `want` */
        kt_list_refill(k, &g.pool, &g.list, round > 0);
        if (!kt_graph_run(k, &graph) || !gathered(k, op, &g))
            return false;
    }
    return true;
}
