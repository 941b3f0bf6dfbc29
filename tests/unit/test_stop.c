/* Calls in C that are stopped.  Where that is to happen on the way, the flag lies where the call itself writes a 1. */
#include <criterion/criterion.h>
#include <string.h>

#include "kernels/mla_extend.h"
#include "kernels/stop.h"
#include "proto/layout.h"
#include "tests/support/mla_case.h"

enum { ROW = 1152, SLOTS = 64, TOKENS = 5 };
#define HALF 0.50390625 /* 0x3f01 in bf16: its first byte in memory is a 1 */

static const bool set = true, clear = false;
static kvs_err err;

Test(stop, is_asked_by_a_flag)
{
    cr_assert(!kvs_is_stopped(NULL));
    cr_assert(!kvs_is_stopped(&clear));
    cr_assert(kvs_is_stopped(&set));
}

static uint8_t pool[SLOTS * ROW] __attribute__((aligned(16))), rows[TOKENS * ROW] __attribute__((aligned(16)));
static const int64_t slots[TOKENS] = {9, -1, 4, 5, 6};

static kvs_mla_write_args write_of_ones(const bool *stop)
{
    memset(pool, 0, sizeof pool);
    memset(rows, 1, sizeof rows);
    return (kvs_mla_write_args){.view = {pool, 16 * ROW, 16 * ROW, SLOTS / 16, 16, ROW, KVS_FORMAT_mla_bf16},
                                .kv_c = rows,
                                .k_pe = rows + 1024,
                                .kv_c_stride = ROW,
                                .k_pe_stride = ROW,
                                .slot_mapping = slots,
                                .n_tokens = TOKENS,
                                .stop = stop};
}

static uint32_t rows_written(void)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < SLOTS; i++)
        n += memcmp(pool + (size_t)i * ROW, rows, ROW) == 0;
    return n;
}

Test(stop, ends_a_write_between_two_tokens)
{
    kvs_mla_write_args a = write_of_ones(&set);
    uint32_t bad = 77;

    cr_assert_eq(kvs_mla_write(&a, &bad, &err), KVS_E_CANCELLED);
    cr_assert_str_eq(err.msg, "stopped at token 0 of 5");
    cr_assert_eq(rows_written(), 0);
    a = write_of_ones((const bool *)pool + 4 * ROW + 700);
    cr_assert_eq(kvs_mla_write(&a, &bad, &err), KVS_E_CANCELLED);
    cr_assert_str_eq(err.msg, "stopped at token 3 of 5");
    cr_assert_eq(rows_written(), 2);
    cr_assert_eq(bad, 77);
    a = write_of_ones(&clear);
    cr_assert_eq(kvs_mla_write(&a, &bad, &err), KVS_OK);
    cr_assert_eq(rows_written(), 4);
    cr_assert_eq(bad, 0);
}

/* Three sequences whose values are all the same: so is what comes out. */
static void open_case(mla_case *c)
{
    const mla_shape s = {.seed = 3, .h_q = 70, .n_seqs = 3, .s_q = 2, .parts = 1, .len = {20, 33, 7}};

    cr_assert(mla_case_init(c, &s));
    for (uint32_t seq = 0; seq < s.n_seqs; seq++)
        for (uint32_t t = 0; t < (uint32_t)s.len[seq]; t++)
            for (uint32_t i = 0; i < KVS_MLA_LATENT + KVS_MLA_ROPE; i++)
                mla_case_put(c, mla_case_row(c, seq, t), i, HALF);
}

static const uint8_t *out_at(const mla_case *c, uint64_t token, uint64_t head)
{
    return c->args.out.base + token * c->args.out.token_stride + head * c->args.out.head_stride;
}

static kvs_status decode(mla_case *c, const bool *stop)
{
    for (uint64_t t = 0; t < 6; t++)
        for (uint64_t h = 0; h < 70; h++)
            memset(c->args.out.base + t * c->args.out.token_stride + h * c->args.out.head_stride, 0, 1024);
    c->args.stop = stop;
    return kvs_mla_decode(&c->args, c->workspace, c->workspace_bytes, &c->result, &err);
}

static kvs_status extend(mla_case *c, const bool *stop)
{
    static const int32_t starts[4] = {0, 2, 4, 6};
    const kvs_mla_extend_args a = {.view = c->args.view,
                                   .q_nope = c->args.q_nope,
                                   .q_pe = c->args.q_pe,
                                   .out = c->args.out,
                                   .lse = c->args.lse,
                                   .q_start = starts,
                                   .seq_len = c->args.seq_len,
                                   .block_table = c->args.block_table,
                                   .table_stride = c->args.table_stride,
                                   .n_seqs = 3,
                                   .n_tokens = 6,
                                   .table_width = c->args.table_width,
                                   .h_q = 70,
                                   .parts = 1,
                                   .sm_scale = c->args.sm_scale,
                                   .stop = stop};

    (void)decode(c, &set); /* clears the outputs */
    return kvs_mla_extend(&a, c->workspace, c->workspace_bytes, &c->result, &err);
}

/* Which of the 6 x 70 rows of results there are. */
static uint32_t results(const mla_case *c)
{
    uint32_t n = 0;

    for (uint64_t t = 0; t < 6; t++)
        for (uint64_t h = 0; h < 70; h++)
            n += *out_at(c, t, h) == 1;
    return n;
}

static void ends_between_groups(kvs_status (*attend)(mla_case *c, const bool *stop))
{
    mla_case c;

    open_case(&c);
    cr_assert_eq(attend(&c, &clear), KVS_OK, "%s", err.msg);
    cr_assert_eq(results(&c), 6 * 70);
    cr_assert_eq(attend(&c, &set), KVS_E_CANCELLED);
    cr_assert_str_eq(err.msg, "stopped at sequence 0 of 3");
    cr_assert_eq(results(&c), 0);
    cr_assert_eq(attend(&c, (const bool *)out_at(&c, 2, 0)), KVS_E_CANCELLED);
    cr_assert_str_eq(err.msg, "stopped at sequence 1 of 3");
    cr_assert_eq(results(&c), 2 * 70 + 64, "the first group of 64 rows of the second sequence, and no more");
    mla_case_fini(&c);
}

Test(stop, ends_a_decode_between_two_groups_of_rows)
{
    ends_between_groups(decode);
}

Test(stop, ends_an_extend_between_two_groups_of_rows)
{
    ends_between_groups(extend);
}
