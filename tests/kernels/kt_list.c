#include "tests/kernels/kt_list.h"

#include <string.h>

/* What the lists hold, on the test's side. */
typedef struct contents {
    int32_t *starts, *first, *table;
} contents;

static int32_t bad_id(kt *k, const kt_pool *p)
{
    static const int32_t strange[] = {-1, INT32_MIN, INT32_MAX};

    return kt_chance(k, 2) ? strange[rnd_below(&k->r, 3)] : (int32_t)(p->shape.n_blocks + rnd_below(&k->r, 2));
}

/* Rows start..end-1 are tokens first.. of the sequence: fill its row of the table and the places. */
static void walk(kt *k, const kt_pool *p, kt_list *l, contents *c, uint32_t seq, bool with_bad)
{
    const kvs_gather_list *g = &l->args;
    const uint32_t tokens = p->shape.tokens;
    const int32_t end = g->open_end && seq + 1 == g->n_seqs ? (int32_t)g->n_rows : c->starts[seq + 1];
    int32_t *table = c->table + seq * g->table_stride;

    for (uint64_t i = 0; i < g->table_stride; i++)
        table[i] = (int32_t)rnd_u64(&k->r); /* garbage, to be seen if it is read */
    for (int32_t row = c->starts[seq], last = -1; row < end; row++) {
        const int64_t token = (int64_t)(c->first != NULL ? c->first[seq] : 0) + row - c->starts[seq];
        kt_place *w = &l->want[row];

        *w = (kt_place){false, 0, 0};
        if (token >= 0 && token / tokens < g->table_width) {
            const int32_t page = (int32_t)(token / tokens);

            if (page != last)
                table[page] = with_bad && kt_chance(k, 6) ? bad_id(k, p) : (int32_t)kt_block(k, p);
            last = page;
            *w = (kt_place){table[page] >= 0 && (uint32_t)table[page] < p->shape.n_blocks, (uint32_t)table[page],
                            (uint32_t)(token % tokens)};
        }
        l->bad += !w->token;
    }
}

/* Lengths, starts and tables; every length is at most l->max_len but with an open end that of the last. */
static void fill(kt *k, const kt_pool *p, kt_list *l, bool with_bad)
{
    const kvs_gather_list *g = &l->args;
    const uint64_t reach = (uint64_t)g->table_width * p->shape.tokens;
    const uint32_t edges[] = {0, 1, p->shape.tokens - 1, p->shape.tokens, p->shape.tokens + 1};
    contents c = {kt_host(k, (g->n_seqs + 1ull) * sizeof *c.starts),
                  g->first_token != NULL ? kt_host(k, (g->n_seqs + 1ull) * sizeof *c.first) : NULL,
                  kt_host(k, (g->n_seqs * g->table_stride + 1) * sizeof *c.table)};
    uint32_t row = kt_chance(k, 3) ? (uint32_t)rnd_below(&k->r, g->n_rows + 1) / 4 : 0;

    memset(l->want, 0, g->n_rows * sizeof *l->want);
    l->bad = 0;
    for (uint32_t s = 0; s < g->n_seqs; s++) {
        uint32_t len = kt_chance(k, 3) ? KT_PICK(k, edges) : (uint32_t)rnd_below(&k->r, l->max_len + 1);

        len = len > l->max_len ? l->max_len : len;
        len = len > g->n_rows - row ? g->n_rows - row : len;
        c.starts[s] = (int32_t)row;
        if (c.first != NULL) /* a token that is there, or with_bad any */
            c.first[s] = (int32_t)rnd_below(&k->r, reach > len ? reach - len + 1 : 1);
        if (c.first != NULL && with_bad && kt_chance(k, 5))
            c.first[s] = kt_chance(k, 2) ? INT32_MAX - (int32_t)rnd_below(&k->r, 5) : -(int32_t)rnd_below(&k->r, 70);
        row += len;
    }
    c.starts[g->n_seqs] = (int32_t)row;
    for (uint32_t s = 0; s < g->n_seqs; s++)
        walk(k, p, l, &c, s, with_bad);
    kt_put(k, (void *)(uintptr_t)g->row_starts, c.starts, (g->n_seqs + (g->open_end ? 0ull : 1)) * sizeof *c.starts);
    if (c.first != NULL)
        kt_put(k, (void *)(uintptr_t)g->first_token, c.first, g->n_seqs * sizeof *c.first);
    kt_put(k, (void *)(uintptr_t)g->block_table, c.table, g->n_seqs * g->table_stride * sizeof *c.table);
}

kt_list kt_list_make(kt *k, const kt_pool *p, uint32_t n_seqs, uint32_t max_len, bool with_bad)
{
    const uint32_t width = 1 + max_len / p->shape.tokens + (uint32_t)rnd_below(&k->r, 3);
    kt_list l = {.max_len = max_len};
    kvs_gather_list *g = &l.args;

    g->n_seqs = n_seqs;
    g->open_end = kt_chance(k, 3) && n_seqs > 0;
    g->table_width = width;
    g->table_stride = width + rnd_below(&k->r, 4);
    g->n_rows = (uint32_t)rnd_below(&k->r, (uint64_t)n_seqs * max_len + 20);
    g->row_starts = kt_alloc(k, ((uint64_t)n_seqs + 1) * sizeof *g->row_starts);
    g->first_token = kt_chance(k, 2) ? kt_alloc(k, ((uint64_t)n_seqs + 1) * sizeof *g->first_token) : NULL;
    g->block_table = kt_alloc(k, (n_seqs * g->table_stride + 1) * sizeof *g->block_table);
    l.want = kt_host(k, (g->n_rows + 1ull) * sizeof *l.want);
    fill(k, p, &l, with_bad);
    return l;
}

void kt_list_refill(kt *k, const kt_pool *p, kt_list *l, bool with_bad)
{
    fill(k, p, l, with_bad);
}

kt_rows kt_rows_make(kt *k, const char *name, uint32_t n_rows, uint64_t row_bytes, uint32_t align)
{
    const uint64_t step = kt_chance(k, 2) ? 16 : align;
    kt_rows r = {.front = step * rnd_below(&k->r, 9)};

    r.stride = (row_bytes + step - 1) / step * step + step * rnd_below(&k->r, 4);
    r.buf = kt_buf_make(k, name, r.front + n_rows * r.stride + 64);
    return r;
}

uint8_t *kt_rows_dev(const kt_rows *r)
{
    return r->buf.dev + r->front;
}

uint8_t *kt_rows_want(const kt_rows *r, uint32_t row)
{
    return r->buf.want + r->front + row * r->stride;
}
