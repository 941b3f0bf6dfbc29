#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/mla_tile.h"
#include "proto/layout.h"
#include "tests/support/mla_case.h"
#include "kernels/mla_oracle.h"
#include "tests/support/random.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { SLOW = 1 };
#else
enum { SLOW = 0 };
#endif

static void open_case(mla_case *c, const mla_shape *s)
{
    cr_assert(mla_case_init(c, s));
}

static void run(mla_case *c)
{
    kvs_err err = {KVS_OK, ""};

    cr_assert_eq(mla_case_run(c, &err), KVS_OK, "%s", err.msg);
    cr_assert(mla_case_guards_hold(c));
    cr_assert_eq(c->result.kernel, KVS_KERNEL_MLA_DECODE_C);
}

static void judge(const mla_case *c)
{
    char text[ORACLE_TEXT_BYTES];

    cr_assert(oracle_judge(&c->args, text), "h_q %u, s_q %u, P %u, parts %u: %s", c->shape.h_q, c->shape.s_q,
              c->shape.tokens_per_block, c->args.parts, text);
}

static void run_and_judge(const mla_shape *s)
{
    mla_case c;

    open_case(&c, s);
    run(&c);
    cr_assert_eq(c.result.bad, 0);
    judge(&c);
    mla_case_fini(&c);
}

static float lse_at(const mla_case *c, uint64_t t, uint64_t h)
{
    float f;

    memcpy(&f, c->args.lse.base + t * c->args.lse.token_stride + h * c->args.lse.head_stride, sizeof f);
    return f;
}

/* out of a row is all zero bytes and its lse -inf. */
static bool is_empty_row(const mla_case *c, uint64_t t, uint64_t h)
{
    const uint8_t *row = c->args.out.base + t * c->args.out.token_stride + h * c->args.out.head_stride;

    for (int i = 0; i < KVS_MLA_LATENT * 2; i++)
        if (row[i] != 0)
            return false;
    return lse_at(c, t, h) == -INFINITY;
}

/* --- right numbers
 * ---------------------------------------------------------------------------------------------- */

Test(mla_decode, lengths_around_a_page)
{
    for (uint32_t format = KVS_FORMAT_mla_bf16; format <= KVS_FORMAT_mla_fp16; format++) {
        mla_shape s = {.seed = 1,
                       .format = format,
                       .n_seqs = 9,
                       .h_q = 3,
                       .spare_blocks = 2,
                       .len = {0, 1, 15, 16, 17, 31, 33, 100, 2}};
        mla_case c;

        open_case(&c, &s);
        run(&c);
        judge(&c);
        for (uint32_t h = 0; h < 3; h++)
            cr_assert(is_empty_row(&c, 0, h));
        mla_case_fini(&c);
    }
}

Test(mla_decode, pages_of_1_16_64_and_256_tokens)
{
    const uint32_t sizes[] = {1, 16, 64, 256};

    for (int i = 0; i < 4; i++) {
        int32_t p = (int32_t)sizes[i];
        mla_shape s = {.seed = 2,
                       .tokens_per_block = sizes[i],
                       .n_seqs = 6,
                       .h_q = 2,
                       .n_layers = 2,
                       .layer = 1,
                       .len = {p - 1, p, p + 1, 2 * p, 300, 1}};

        run_and_judge(&s);
    }
}

Test(mla_decode, head_counts)
{
    const uint32_t heads[] = {1, 2, 8, 16, 20, 64, 65, 96, 128};

    for (int i = 0; i < 9; i++) {
        mla_shape s = {.seed = 3,
                       .h_q = heads[i],
                       .n_seqs = 2,
                       .len = {37, 65},
                       .operand_pad = 3,
                       .format = KVS_FORMAT_mla_bf16 + (uint32_t)i % 2};

        run_and_judge(&s);
    }
}

Test(mla_decode, causal_queries_of_1_to_8_tokens)
{
    for (uint32_t s_q = 1; s_q <= 8; s_q++) {
        mla_shape s = {.seed = 4, .s_q = s_q, .h_q = 16, .n_seqs = 5, .parts = 3, .len = {40, 7, 3, 0, 1}};
        mla_case c;

        open_case(&c, &s);
        run(&c);
        judge(&c);
        /* The last sequence has one token: only the last query sees it. */
        for (uint32_t j = 0; j < s_q; j++)
            cr_assert_eq(is_empty_row(&c, 4 * s_q + j, 0), j + 1 < s_q);
        mla_case_fini(&c);
    }
}

Test(mla_decode, a_query_does_not_see_a_nan_that_lies_behind_it)
{
    mla_shape s = {.seed = 5, .s_q = 4, .h_q = 2, .len = {20}};
    mla_case c;

    open_case(&c, &s);
    mla_case_put(&c, mla_case_row(&c, 0, 19), 5, (double)NAN);
    run(&c);
    for (uint32_t j = 0; j < 4; j++)
        for (uint32_t i = 0; i < KVS_MLA_LATENT; i++) {
            uint16_t bits;

            memcpy(&bits, c.args.out.base + j * c.args.out.token_stride + 2 * i, sizeof bits);
            cr_assert_eq(!isnan(oracle_value(c.shape.format, bits)), j < 3, "query %u, value %u", j, i);
        }
    cr_assert(isfinite(lse_at(&c, 2, 1)));
    cr_assert(isnan(lse_at(&c, 3, 0)), "the last one sees it and says so");
    mla_case_fini(&c);
}

Test(mla_decode, parts_of_1_4_8_and_more_than_tokens_agree)
{
    const uint32_t parts[] = {1, 4, 8, 64, 256};

    for (int i = 0; i < 5; i++) {
        mla_shape s = {.seed = 6, .parts = parts[i], .h_q = 4, .n_seqs = 4, .len = {5, 63, 200, 0}};
        mla_case c;

        open_case(&c, &s);
        run(&c);
        cr_assert_eq(c.result.parts, parts[i]);
        judge(&c);
        mla_case_fini(&c);
    }
}

/* The parts are ranges of ceil(len / parts): each alone, merged by hand, gives the bits of the whole. */
Test(mla_decode, parts_are_equal_ranges_merged_in_order)
{
    for (int32_t len = 47; len <= 48; len++) {
        mla_shape s = {.seed = 25, .tokens_per_block = 8, .h_q = 128, .parts = 2, .q_scale = 4, .len = {len}};
        float whole[128], merged[128], none = 0;
        mla_case c;

        open_case(&c, &s);
        run(&c);
        memcpy(whole, c.args.lse.base, sizeof whole);
        c.args.parts = 1;
        c.lens[0] = 24;
        run(&c);
        memcpy(merged, c.args.lse.base, sizeof merged);
        c.args.block_table += 3;
        c.args.table_width -= 3;
        c.lens[0] = len - 24;
        run(&c);
        for (uint32_t h = 0; h < 128; h++)
            kvs_merge_states(&none, &merged[h], &none, lse_at(&c, 0, h), 0);
        cr_assert_eq(memcmp(merged, whole, sizeof merged), 0, "length %d", len);
        mla_case_fini(&c);
    }
}

/* Logits of up to about 40 in either direction, and one token far above the rest. */
Test(mla_decode, one_token_may_dominate_at_any_place)
{
    const uint32_t places[] = {0, 70, 143};

    for (int i = 0; i < 3; i++)
        for (uint32_t parts = 1; parts <= 5; parts += 4) {
            mla_shape s = {.seed = 7, .h_q = 2, .parts = parts, .q_scale = 9, .len = {144}};
            mla_case c;
            uint8_t *row;

            open_case(&c, &s);
            row = mla_case_row(&c, 0, places[i]);
            for (uint32_t k = 0; k < 576; k++) { /* along the first head's query */
                const uint8_t *q = k < 512 ? c.q_nope + 2 * k : c.q_pe + 2 * (k - 512);
                uint16_t bits;

                memcpy(&bits, q, sizeof bits);
                mla_case_put(&c, row, k, oracle_value(c.shape.format, bits) / 45);
            }
            run(&c);
            cr_assert(lse_at(&c, 0, 0) > 30, "lse %f", (double)lse_at(&c, 0, 0));
            judge(&c);
            mla_case_fini(&c);
        }
}

Test(mla_decode, equal_logits_give_the_mean)
{
    mla_shape s = {.seed = 8, .h_q = 1, .len = {100}};
    mla_case c;

    open_case(&c, &s);
    memset(c.q_nope, 0, 1024);
    memset(c.q_pe, 0, 128);
    run(&c);
    judge(&c);
    cr_assert(fabs((double)lse_at(&c, 0, 0) - log(100)) < 1e-6);
    mla_case_fini(&c);
}

Test(mla_decode, several_hundred_random_shapes)
{
    const uint32_t pages[] = {1, 3, 16, 64, 256}, heads[] = {1, 2, 5, 8, 16};
    rnd r = rnd_open("random shapes", 20260901);

    for (int i = 0; i < (SLOW ? 60 : 400); i++) {
        mla_shape s = {.seed = rnd_u64(&r) >> 8,
                       .format = KVS_FORMAT_mla_bf16 + (uint32_t)rnd_below(&r, 2),
                       .n_layers = 1 + (uint32_t)rnd_below(&r, 3),
                       .tokens_per_block = pages[rnd_below(&r, 5)],
                       .row_pad = 16 * (uint32_t)rnd_below(&r, 3),
                       .page_pad = 16 * (uint32_t)rnd_below(&r, 5),
                       .slot_pad = 16 * rnd_below(&r, 9),
                       .n_seqs = 1 + (uint32_t)rnd_below(&r, 4),
                       .s_q = 1 + (uint32_t)(rnd_below(&r, 3) == 0 ? rnd_below(&r, 8) : 0),
                       .h_q = heads[rnd_below(&r, 5)],
                       .parts = (uint32_t)rnd_below(&r, 12),
                       .fixed_split = (uint32_t)rnd_below(&r, 2),
                       .spare_blocks = (uint32_t)rnd_below(&r, 4),
                       .table_spare = (uint32_t)rnd_below(&r, 4),
                       .operand_pad = (uint32_t)rnd_below(&r, 9)};

        s.layer = (uint32_t)rnd_below(&r, s.n_layers);
        for (uint32_t n = 0; n < s.n_seqs; n++)
            s.len[n] = (int32_t)(rnd_below(&r, 4) == 0 ? rnd_below(&r, 300) : rnd_below(&r, 40));
        run_and_judge(&s);
    }
}

/* --- the same bits
 * ---------------------------------------------------------------------------------------------- */

/* A layout of the same data gives the bits of the plain one: one layer, one page after the other. */
static void same_as_contiguous(mla_shape s)
{
    mla_shape plain = s;
    mla_case a, b;

    plain.n_layers = 1;
    plain.layer = plain.row_pad = plain.page_pad = plain.operand_pad = plain.spare_blocks = plain.table_spare = 0;
    plain.slot_pad = 0;
    plain.block_order = true;
    open_case(&a, &plain);
    open_case(&b, &s);
    run(&a);
    run(&b);
    cr_assert(mla_case_same_bits(&a, &b), "layer %u of %u", s.layer, s.n_layers);
    judge(&a);
    mla_case_fini(&a);
    mla_case_fini(&b);
}

Test(mla_decode, strided_is_contiguous_bit_for_bit)
{
    const uint32_t layers[][2] = {{1, 0}, {3, 0}, {3, 1}, {3, 2}, {61, 0}, {61, 30}, {61, 60}};

    for (int i = 0; i < 7; i++)
        for (uint32_t parts = 0; parts <= 4; parts += 2)
            same_as_contiguous((mla_shape){.seed = 9,
                                           .n_layers = layers[i][0],
                                           .layer = layers[i][1],
                                           .parts = parts,
                                           .tokens_per_block = 16,
                                           .n_seqs = 3,
                                           .s_q = 2,
                                           .h_q = 4,
                                           .len = {33, 70, 16},
                                           .slot_pad = 16 * 13,
                                           .page_pad = 48,
                                           .row_pad = 16,
                                           .spare_blocks = 3,
                                           .operand_pad = 5});
}

Test(mla_decode, page_size_does_not_change_a_bit)
{
    const uint32_t sizes[] = {1, 5, 16, 64, 256};
    mla_case first, c;

    for (int i = 0; i < 5; i++) {
        mla_shape s = {.seed = 10, .tokens_per_block = sizes[i], .n_seqs = 2, .h_q = 8, .parts = 4, .len = {130, 77}};

        open_case(i == 0 ? &first : &c, &s);
        run(i == 0 ? &first : &c);
        if (i == 0)
            continue;
        cr_assert(mla_case_same_bits(&first, &c), "P %u", sizes[i]);
        mla_case_fini(&c);
    }
    mla_case_fini(&first);
}

/* The first sequence of a batch gives what it gives alone. */
static void same_in_company(uint32_t fixed_split, uint32_t parts, uint32_t table_spare)
{
    mla_shape alone = {.seed = 11,
                       .h_q = 16,
                       .s_q = 2,
                       .parts = parts,
                       .fixed_split = fixed_split,
                       .len = {90},
                       .table_spare = 200 - 6};
    mla_shape batch = alone;
    mla_case a, b;

    batch.n_seqs = 4;
    batch.len[1] = 0;
    batch.len[2] = 3000;
    batch.len[3] = 5;
    batch.table_spare = table_spare;
    open_case(&a, &alone);
    open_case(&b, &batch);
    cr_assert_eq(a.args.table_width, b.args.table_width);
    run(&a);
    run(&b);
    cr_assert_eq(a.result.parts, b.result.parts);
    cr_assert_eq(memcmp(a.args.out.base, b.args.out.base, a.out_bytes), 0);
    cr_assert_eq(memcmp(a.args.lse.base, b.args.lse.base, a.lse_bytes), 0);
    mla_case_fini(&a);
    mla_case_fini(&b);
}

Test(mla_decode, a_row_does_not_depend_on_its_neighbours)
{
    same_in_company(0, 7, 200 - 188);
    same_in_company(1, 0, 200 - 188);
}

Test(mla_decode, automatic_parts_follow_the_longest_length_or_the_table)
{
    mla_shape s = {.seed = 12, .n_seqs = 2, .len = {1, 1}, .tokens_per_block = 64, .table_spare = 63};
    mla_case c;

    open_case(&c, &s);
    run(&c);
    cr_assert_eq(c.result.parts, 1);
    c.args.fixed_split = 1; /* 64 * 64 tokens */
    run(&c);
    cr_assert_eq(c.result.parts, 4);
    mla_case_fini(&c);
    s.len[1] = 2049;
    open_case(&c, &s);
    run(&c);
    cr_assert_eq(c.result.parts, 3);
    c.lens[1] = -5; /* a bad length is no length */
    run(&c);
    cr_assert_eq(c.result.parts, 1);
    mla_case_fini(&c);
}

Test(mla_decode, padding_rows_and_other_heads_change_nothing)
{
    mla_shape few = {.seed = 13, .h_q = 1, .n_seqs = 1, .parts = 2, .len = {50}}, many = few;
    mla_case a, b;

    many.h_q = 128;
    many.n_seqs = 3;
    open_case(&a, &few);
    open_case(&b, &many);
    run(&a);
    run(&b);
    cr_assert_eq(memcmp(a.args.out.base, b.args.out.base, 1024), 0);
    cr_assert_eq(lse_at(&a, 0, 0), lse_at(&b, 0, 0));
    cr_assert(is_empty_row(&b, 1, 127) && is_empty_row(&b, 2, 0));
    mla_case_fini(&a);
    mla_case_fini(&b);
}

Test(mla_decode, fifty_runs_give_one_hash)
{
    mla_shape s = {.seed = 14, .h_q = 20, .s_q = 2, .n_seqs = 2, .parts = 4, .len = {65, 130}};
    mla_case c;
    uint64_t first = 0;

    open_case(&c, &s);
    for (int i = 0; i < 50; i++) {
        run(&c);
        first = i == 0 ? mla_case_hash(&c) : first;
        cr_assert_eq(mla_case_hash(&c), first);
    }
    mla_case_fini(&c);
}

static mla_group *random_group(uint64_t seed, uint8_t rows[MLA_TILE][2 * MLA_ROW])
{
    mla_group *g =
        aligned_alloc(MLA_VECTOR_BYTES, (sizeof *g + MLA_VECTOR_BYTES - 1) / MLA_VECTOR_BYTES * MLA_VECTOR_BYTES);
    rnd r = {seed};

    cr_assert(g != NULL);
    memset(g, 0, sizeof *g);
    g->n_rows = 61;
    g->n_tokens = 14;
    g->sm_scale = 0.3f;
    for (int t = 0; t < MLA_TILE; t++) {
        for (int i = 0; i < MLA_ROW; i++) {
            uint16_t bits = oracle_bits(KVS_FORMAT_mla_bf16, rnd_normal(&r));

            memcpy(&rows[t][2 * i], &bits, sizeof bits);
        }
        g->src[t] = t == 5 ? NULL : rows[t];
    }
    for (uint32_t row = 0; row < g->n_rows; row++) {
        for (int i = 0; i < MLA_ROW; i++)
            g->q[row][i] = (float)rnd_normal(&r);
        for (int i = 0; i < KVS_MLA_LATENT; i++)
            g->acc[row][i] = (float)rnd_normal(&r);
        g->max[row] = row % 3 == 0 ? -INFINITY : (float)rnd_normal(&r);
        g->sum[row] = row % 3 == 0 ? 0.0f : 2.5f;
        g->visible[row] = row % 15;
    }
    return g;
}

Test(mla_decode, every_instruction_set_gives_the_same_bits)
{
    const mla_tile_variant *v;
    size_t n = mla_tile_variants(&v);
    static uint8_t rows[MLA_TILE][2 * MLA_ROW];

    cr_assert(n >= 1);
    for (uint64_t seed = 1; seed < 6; seed++) {
        mla_group *first = random_group(seed, rows);

        first->format = seed % 2 ? KVS_FORMAT_mla_fp16 : KVS_FORMAT_mla_bf16;
        first->is_fp16 = seed % 2;
        v[n - 1].step(first);
        for (size_t i = 0; i + 1 < n; i++) {
            mla_group *g = random_group(seed, rows);

            g->format = first->format;
            g->is_fp16 = seed % 2;
            v[i].step(g);
            cr_assert_eq(memcmp(g->acc, first->acc, sizeof g->acc), 0, "%s", v[i].name);
            cr_assert_eq(memcmp(g->max, first->max, sizeof g->max), 0, "%s", v[i].name);
            cr_assert_eq(memcmp(g->sum, first->sum, sizeof g->sum), 0, "%s", v[i].name);
            free(g);
        }
        free(first);
    }
}

/* --- far and bad addresses
 * -------------------------------------------------------------------------------------- */

/* 61 layers of 64 tokens: block 954 is the last below 2^31 values, 955 the first above, 999 lies beyond 2^32
 * bytes. */
Test(mla_decode, reaches_blocks_beyond_32_bits)
{
    const uint64_t slot = 61 * 73728, bytes = slot * 1000;
    const int32_t far[] = {954, 955, 999};
    mla_shape s = {.seed = 15, .tokens_per_block = 64, .n_seqs = 3, .h_q = 2, .len = {64, 64, 64}};
    uint8_t *pool = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mla_case near_case, far_case;

    cr_assert(pool != MAP_FAILED);
    open_case(&near_case, &s);
    open_case(&far_case, &s);
    memset(pool, 0xFF, slot); /* block 0: what a wrapped product finds */
    for (uint32_t i = 0; i < 3; i++) {
        uint64_t row = i * far_case.args.table_stride;

        memcpy(pool + (uint64_t)far[i] * slot + 60 * 73728, mla_case_row(&near_case, i, 0), 73728);
        far_case.table[row] = far[i];
    }
    far_case.args.view = (kvs_view){pool + 60 * 73728, slot, 73728, 1000, 64, 1152, KVS_FORMAT_mla_bf16};
    run(&near_case);
    run(&far_case);
    cr_assert_eq(far_case.result.bad, 0);
    cr_assert(mla_case_same_bits(&near_case, &far_case));
    judge(&far_case);
    mla_case_fini(&near_case);
    mla_case_fini(&far_case);
    (void)munmap(pool, bytes);
}

Test(mla_decode, bad_table_entries_are_skipped_and_counted)
{
    mla_shape s = {.seed = 16, .h_q = 4, .s_q = 2, .n_seqs = 3, .parts = 3, .len = {70, 33, 16}};
    mla_case c;
    uint64_t w;

    open_case(&c, &s);
    w = c.args.table_stride;
    c.table[0] = -1;
    c.table[3] = (int32_t)c.args.view.n_blocks;
    c.table[w + 2] = INT32_MIN;
    c.table[2 * w] = INT32_MAX; /* the whole of the third sequence */
    run(&c);
    cr_assert_eq(c.result.bad, 4);
    judge(&c);
    cr_assert(is_empty_row(&c, 4, 0) && is_empty_row(&c, 5, 3));
    mla_case_fini(&c);
}

Test(mla_decode, bad_lengths_are_empty_and_counted)
{
    const int32_t lens[] = {-1, INT32_MIN, 5 * 16 + 1, INT32_MAX};
    mla_shape s = {.seed = 17, .h_q = 2, .n_seqs = 5, .len = {80, 80, 80, 80, 80}};
    mla_case c;

    open_case(&c, &s);
    memcpy(c.lens, lens, sizeof lens);
    run(&c);
    cr_assert_eq(c.result.bad, 4);
    judge(&c);
    for (uint32_t i = 0; i < 4; i++)
        cr_assert(is_empty_row(&c, i, 1));
    cr_assert(isfinite(lse_at(&c, 4, 1)));
    mla_case_fini(&c);
}

Test(mla_decode, one_block_may_serve_several_sequences)
{
    mla_shape s = {.seed = 18, .h_q = 2, .n_seqs = 2, .len = {32, 32}};
    mla_case c;

    open_case(&c, &s);
    c.table[c.args.table_stride] = c.table[0];
    c.table[1] = c.table[0];
    run(&c);
    judge(&c);
    mla_case_fini(&c);
}

Test(mla_decode, no_sequences_and_no_table_are_no_work)
{
    mla_shape s = {.seed = 19, .h_q = 2, .n_seqs = 2, .len = {0, 0}};
    mla_case c;

    open_case(&c, &s);
    cr_assert_eq(c.args.table_width, 0);
    c.args.block_table = NULL;
    c.args.view.n_blocks = 0;
    run(&c);
    cr_assert_eq(c.result.bad, 0);
    cr_assert(is_empty_row(&c, 0, 0) && is_empty_row(&c, 1, 1));
    c.lens[1] = 1;
    run(&c);
    cr_assert_eq(c.result.bad, 1);
    c.args.n_seqs = c.shape.n_seqs = 0;
    c.args.q_nope.base = c.args.q_pe.base = NULL;
    c.args.seq_len = NULL;
    run(&c); /* the guards cover all of out and lse now */
    mla_case_fini(&c);
}

/* --- refusals
 * --------------------------------------------------------------------------------------------------- */

static void refuses(const mla_case *good, kvs_mla_decode_args a, kvs_status status, const char *text)
{
    mla_case c = *good;
    kvs_err err = {KVS_OK, ""};

    c.args = a;
    c.result = (kvs_mla_decode_result){1234, 0, 0};
    cr_assert_eq(mla_case_run(&c, &err), status, "%s: %s", text, err.msg);
    cr_assert(strstr(err.msg, text) != NULL, "'%s' does not say '%s'", err.msg, text);
    cr_assert_eq(c.result.parts, 1234);
    cr_assert_eq(memcmp(c.out, c.untouched_out, c.out_bytes + 2 * MLA_CASE_GUARD), 0);
    cr_assert_eq(memcmp(c.lse, c.untouched_lse, c.lse_bytes + 2 * MLA_CASE_GUARD), 0);
}

#define REFUSES(field, value, status, text)                                                                            \
    do {                                                                                                               \
        kvs_mla_decode_args a_ = c.args;                                                                               \
        a_.field = (value);                                                                                            \
        refuses(&c, a_, (status), (text));                                                                             \
    } while (0)

Test(mla_decode, refuses_shapes_out_of_range)
{
    mla_shape s = {.seed = 20, .h_q = 2, .s_q = 2, .n_seqs = 2, .len = {20, 30}};
    mla_case c;

    open_case(&c, &s);
    run(&c);
    REFUSES(s_q, 0, KVS_E_INVALID, "s_q: 0");
    REFUSES(s_q, 9, KVS_E_INVALID, "s_q: 9");
    REFUSES(h_q, 0, KVS_E_INVALID, "h_q: 0");
    REFUSES(h_q, 129, KVS_E_INVALID, "h_q: 129");
    REFUSES(parts, 257, KVS_E_INVALID, "parts: 257");
    REFUSES(fixed_split, 2, KVS_E_INVALID, "fixed_split: 2");
    REFUSES(sm_scale, INFINITY, KVS_E_INVALID, "sm_scale");
    REFUSES(sm_scale, NAN, KVS_E_INVALID, "sm_scale");
    REFUSES(view.format, KVS_FORMAT_raw, KVS_E_UNSUPPORTED, "format: 9");
    REFUSES(view.row_bytes, 1136, KVS_E_INVALID, "row_bytes");
    REFUSES(seq_len, NULL, KVS_E_INVALID, "seq_len");
    REFUSES(block_table, NULL, KVS_E_INVALID, "block_table");
    REFUSES(table_stride, 1, KVS_E_INVALID, "block_table stride");
    REFUSES(table_stride, UINT64_MAX / 2, KVS_E_LIMIT, "table_stride");
    mla_case_fini(&c);
}

Test(mla_decode, refuses_operands_that_do_not_fit)
{
    mla_shape s = {.seed = 21, .h_q = 2, .s_q = 2, .n_seqs = 2, .len = {20, 30}};
    mla_case c;

    open_case(&c, &s);
    REFUSES(q_nope.base, NULL, KVS_E_INVALID, "q_nope");
    REFUSES(q_pe.base, c.q_pe + 1, KVS_E_INVALID, "q_pe");
    REFUSES(q_nope.head_stride, 1022, KVS_E_INVALID, "q_nope stride: 1022");
    REFUSES(q_pe.token_stride, 0, KVS_E_INVALID, "q_pe stride: 0");
    REFUSES(out.head_stride, 1025, KVS_E_INVALID, "out");
    REFUSES(out.token_stride, 1024, KVS_E_INVALID, "out: rows overlap");
    REFUSES(lse.base, c.args.lse.base + 2, KVS_E_INVALID, "lse");
    REFUSES(lse.token_stride, 4, KVS_E_INVALID, "lse: rows overlap");
    REFUSES(q_nope.token_stride, UINT64_MAX - 1, KVS_E_LIMIT, "q_nope");
    REFUSES(out.head_stride, UINT64_C(1) << 63, KVS_E_LIMIT, "out");
    mla_case_fini(&c);
}

Test(mla_decode, takes_heads_outermost)
{
    mla_shape s = {.seed = 22, .h_q = 3, .s_q = 2, .n_seqs = 2, .len = {20, 30}};
    mla_case a, b;

    open_case(&a, &s);
    open_case(&b, &s);
    b.args.out.token_stride = 1024;
    b.args.out.head_stride = 4 * 1024;
    b.args.lse.token_stride = 4;
    b.args.lse.head_stride = 16;
    run(&a);
    run(&b);
    cr_assert(mla_case_same_bits(&a, &b));
    mla_case_fini(&a);
    mla_case_fini(&b);
}

Test(mla_decode, refuses_a_workspace_that_is_too_small)
{
    mla_shape s = {.seed = 23, .len = {20}};
    mla_case c;
    kvs_err err;

    open_case(&c, &s);
    cr_assert_eq(kvs_mla_decode(&c.args, c.workspace, c.workspace_bytes - 1, &c.result, &err), KVS_E_LIMIT);
    cr_assert(strstr(err.msg, "workspace") != NULL);
    cr_assert_eq(kvs_mla_decode(&c.args, NULL, UINT64_MAX, &c.result, &err), KVS_E_LIMIT);
    c.args.h_q = 129;
    cr_assert_eq(kvs_mla_decode_workspace(&c.args), 0);
    mla_case_fini(&c);
}

Test(mla_decode, takes_a_workspace_at_any_address)
{
    mla_shape s = {.seed = 24, .h_q = 5, .len = {40}};
    mla_case c;
    uint64_t hash;
    uint8_t *room;

    open_case(&c, &s);
    run(&c);
    hash = mla_case_hash(&c);
    room = malloc(c.workspace_bytes + 64);
    cr_assert(room != NULL);
    for (int i = 0; i < 64; i += 7) {
        cr_assert_eq(kvs_mla_decode(&c.args, room + i, c.workspace_bytes, &c.result, NULL), KVS_OK);
        cr_assert_eq(mla_case_hash(&c), hash);
    }
    free(room);
    mla_case_fini(&c);
}
