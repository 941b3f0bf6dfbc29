/* index_convert: token ids of requests into indices of the cache. */
#include <string.h>

#include "kernels/index_convert.h"
#include "proto/layout.h"
#include "tests/kernels/kt_ops.h"
#include "tests/kernels/kt_pool.h"

typedef struct problem {
    kvs_index_convert_args args;
    kt_buf out;
    uint32_t bytes; /* of an entry */
    uint32_t *word;
    int32_t *request, *tokens, *table, *workspace; /* the test's copies */
} problem;

/* An id: of any token, at the edges of pages, past the table, or none. */
static int32_t any_id(kt *k, const kvs_index_convert_args *a)
{
    const int64_t reach = (int64_t)a->table_width * a->view.tokens_per_block;

    switch (rnd_below(&k->r, 10)) {
    case 0:
        return -1 - (int32_t)rnd_below(&k->r, 3);
    case 1:
        return kt_chance(k, 2) ? INT32_MIN : INT32_MAX;
    case 2:
        return (int32_t)(reach - 2 + (int64_t)rnd_below(&k->r, 4));
    case 3:
        return (int32_t)(rnd_below(&k->r, a->table_width + 1) * a->view.tokens_per_block);
    default:
        return (int32_t)rnd_below(&k->r, (uint64_t)reach);
    }
}

/* New contents of every list, in the memory that the arguments name. */
static void fill(kt *k, problem *w)
{
    const kvs_index_convert_args *a = &w->args;
    const uint64_t n_ids = a->n_tokens * a->token_stride, n_entries = a->n_requests * a->table_stride;

    for (uint32_t t = 0; t < a->n_tokens; t++) {
        w->request[t] = kt_chance(k, 10) ? (kt_chance(k, 2) ? -1 : (int32_t)a->n_requests)
                                         : (int32_t)rnd_below(&k->r, a->n_requests);
        w->workspace[t] = kt_chance(k, 2) ? -1 : (int32_t)rnd_below(&k->r, 1 << 30);
    }
    for (uint64_t i = 0; i < n_ids; i++)
        w->tokens[i] = any_id(k, a);
    for (uint64_t i = 0; i < n_entries; i++)
        w->table[i] = kt_chance(k, 8) ? (int32_t)rnd_u64(&k->r) : (int32_t)rnd_below(&k->r, a->view.n_blocks);
    kt_put(k, (void *)(uintptr_t)a->request, w->request, a->n_tokens * sizeof *w->request);
    kt_put(k, (void *)(uintptr_t)a->tokens, w->tokens, n_ids * sizeof *w->tokens);
    kt_put(k, (void *)(uintptr_t)a->block_table, w->table, n_entries * sizeof *w->table);
    if (a->workspace != NULL)
        kt_put(k, (void *)(uintptr_t)a->workspace, w->workspace, a->n_tokens * sizeof *w->workspace);
}

static void make(kt *k, problem *w, uint32_t n_tokens, uint32_t topk, bool physical)
{
    static const uint32_t pages[] = {1, 16, 64, 100}, rows[] = {576, 656, 1152};
    kvs_index_convert_args *a;
    const uint32_t page = KT_PICK(k, pages), row = KT_PICK(k, rows);

    *w = (problem){.bytes = physical ? 8 : 4, .word = kt_word(k)};
    a = &w->args;
    a->view = (kvs_view){.base = kt_alloc(k, 16), /* never looked at */
                         .block_stride = (uint64_t)row * page * 61 + (uint64_t)row * rnd_below(&k->r, 100),
                         .page_bytes = (uint64_t)page * row,
                         .n_blocks = 2 + (uint32_t)rnd_below(&k->r, 100000),
                         .tokens_per_block = page,
                         .row_bytes = row,
                         .format = KVS_FORMAT_raw};
    kt_mutate(k, &a->view, 0);
    a->n_tokens = n_tokens;
    a->topk = topk;
    a->n_requests = 1 + (uint32_t)rnd_below(&k->r, 5);
    a->table_width = 1 + (uint32_t)rnd_below(&k->r, 40);
    a->token_stride = topk + rnd_below(&k->r, 4);
    a->table_stride = a->table_width + rnd_below(&k->r, 4);
    a->out_stride = topk + rnd_below(&k->r, 4);
    a->request = kt_alloc(k, (n_tokens + 1) * sizeof *a->request);
    a->tokens = kt_alloc(k, (n_tokens * a->token_stride + 1) * sizeof *a->tokens);
    a->block_table = kt_alloc(k, a->n_requests * a->table_stride * sizeof *a->block_table);
    a->workspace = physical && kt_chance(k, 2) ? kt_alloc(k, (n_tokens + 1) * sizeof *a->workspace) : NULL;
    w->request = kt_host(k, (n_tokens + 1) * sizeof *w->request);
    w->workspace = kt_host(k, (n_tokens + 1) * sizeof *w->workspace);
    w->tokens = kt_host(k, (n_tokens * a->token_stride + 1) * sizeof *w->tokens);
    w->table = kt_host(k, a->n_requests * a->table_stride * sizeof *w->table);
    w->out = kt_buf_make(k, "indices", n_tokens * a->out_stride * w->bytes + 64);
    a->physical = physical ? (kvs_physical_row *)(void *)w->out.dev : NULL;
    a->logical = physical ? NULL : (kvs_logical_index *)(void *)w->out.dev;
    fill(k, w);
    kt_upload(k, &w->out);
}

/* The index of one id, by hand; *ret_bad: it has no place. */
static int64_t index_of(const problem *w, uint32_t t, int32_t id, bool *ret_bad)
{
    const kvs_index_convert_args *a = &w->args;
    const int64_t page = id / (int64_t)a->view.tokens_per_block, token = id % (int64_t)a->view.tokens_per_block,
                  rows = (int64_t)(a->view.block_stride / a->view.row_bytes);
    int64_t block;

    *ret_bad = false;
    if (id < 0)
        return -1;
    if (a->workspace != NULL && w->workspace[t] >= 0)
        return (int64_t)w->workspace[t] + id;
    *ret_bad = true;
    if (w->request[t] < 0 || w->request[t] >= (int64_t)a->n_requests || page >= (int64_t)a->table_width)
        return -1;
    block = w->table[(uint64_t)w->request[t] * a->table_stride + (uint64_t)page];
    if (block < 0 || block >= (int64_t)a->view.n_blocks)
        return -1;
    *ret_bad = false;
    return a->physical != NULL ? block * rows + token : block * a->view.tokens_per_block + token;
}

static bool converted(kt *k, problem *w)
{
    const kvs_index_convert_args *a = &w->args;
    const uint32_t got = kt_word_value(k, w->word);
    uint32_t want = 0;

    for (uint32_t t = 0; t < a->n_tokens; t++)
        for (uint32_t i = 0; i < a->topk; i++) {
            bool bad;
            const int64_t at = index_of(w, t, w->tokens[t * a->token_stride + i], &bad);
            const int32_t small = (int32_t)at;

            memcpy(w->out.want + (t * a->out_stride + i) * w->bytes,
                   a->physical != NULL ? (const void *)&at : (const void *)&small, w->bytes);
            want += bad;
        }
    if (got != want)
        return kt_fail(k, "%u bad ids counted, not %u", got, want);
    return kt_same(k, &w->out);
}

static kvs_status launch(kt *k, void *problem_, kvs_err *err)
{
    problem *w = problem_;

    return KT_RUN(k, err, kvs_index_convert(&w->args, w->word, err),
                  kvs_index_convert_cuda(&w->args, w->word, k->stream, err));
}

static bool convert(kt *k, uint32_t n_tokens, uint32_t topk, bool physical)
{
    kvs_err err = {.msg = ""};
    problem w;

    make(k, &w, n_tokens, topk, physical);
    if (launch(k, &w, &err) != KVS_OK)
        return kt_fail(k, "%s", err.msg);
    return converted(k, &w);
}

static bool random_shape(kt *k)
{
    return convert(k, (uint32_t)rnd_below(&k->r, 30), (uint32_t)rnd_below(&k->r, 100), kt_chance(k, 2));
}

static bool long_lists(kt *k)
{
    return convert(k, 3, 2048, true) && convert(k, 3, 2048, false);
}

static bool replayed_with_other_lists(kt *k)
{
    kt_graph g;
    problem w;

    make(k, &w, 20, 64, true);
    if (!kt_graph_make(k, launch, &w, &g))
        return false;
    for (int round = 0; round < 3; round++) {
        fill(k, &w);
        if (!kt_graph_run(k, &g) || !converted(k, &w))
            return false;
    }
    return true;
}

static bool refused(kt *k, problem *w, const kvs_index_convert_args *good, kvs_status want, const char *text)
{
    kvs_err err = {.msg = ""};
    const kvs_status s = launch(k, w, &err);

    w->args = *good;
    return (s == want && strstr(err.msg, text) != NULL) || kt_fail(k, "not refused as \"%s\": %s", text, err.msg);
}

static bool refusals(kt *k)
{
    kvs_index_convert_args good;
    bool all = true;
    problem w;

    make(k, &w, 4, 8, true);
    good = w.args;
    w.args.view.block_stride += 16;
    all &= refused(k, &w, &good, KVS_E_UNSUPPORTED, "is no whole number of rows");
    w.args.physical = NULL;
    all &= refused(k, &w, &good, KVS_E_INVALID, "neither");
    w.args.logical = (kvs_logical_index *)(void *)w.out.dev;
    all &= refused(k, &w, &good, KVS_E_INVALID, "each");
    w.args.physical = NULL;
    w.args.logical = (kvs_logical_index *)(void *)w.out.dev;
    w.args.workspace = w.args.request;
    all &= refused(k, &w, &good, KVS_E_INVALID, "workspace: its rows are physical");
    w.args.token_stride = 7;
    all &= refused(k, &w, &good, KVS_E_INVALID, "tokens stride: 28");
    w.args.out_stride = UINT64_MAX;
    all &= refused(k, &w, &good, KVS_E_LIMIT, "physical: ");
    w.args.block_table = NULL;
    all &= refused(k, &w, &good, KVS_E_INVALID, "block_table: no memory");
    return all && kt_same(k, &w.out);
}

static const kt_fixed fixed[] = {{"long lists", long_lists, false},
                                 {"replayed with other lists", replayed_with_other_lists, false},
                                 {"bad arguments are refused", refusals, false}};

const kt_op kt_op_index_convert = {.name = "index_convert",
                                   .equality = "equal",
                                   .fixed = fixed,
                                   .n_fixed = sizeof fixed / sizeof *fixed,
                                   .random = random_shape,
                                   .n_cpu = 200,
                                   .n_cuda = 800,
                                   .n_subset = 12};
