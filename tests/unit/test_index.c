#include <criterion/criterion.h>

#include "kernels/index.h"
#include "proto/layout.h"

_Static_assert(!__builtin_types_compatible_p(kvs_logical_index, kvs_physical_row), "two kinds of index, two types");
_Static_assert(!__builtin_types_compatible_p(kvs_logical_index, int32_t), "a plain number is no index");
_Static_assert(sizeof(kvs_logical_index) == 4, "lists of indices are lists of int32");

/* Three layers of 64 tokens of 656 bytes: 192 rows from block to block. */
static kvs_view a_view(void)
{
    return (kvs_view){.block_stride = UINT64_C(3) * 64 * 656,
                      .page_bytes = UINT64_C(64) * 656,
                      .n_blocks = 10,
                      .tokens_per_block = 64,
                      .row_bytes = 656,
                      .format = KVS_FORMAT_fp8_ds_mla};
}

Test(index, a_physical_row_counts_the_rows_of_the_stride_and_not_the_tokens_of_a_page)
{
    const kvs_view v = a_view();

    cr_assert_eq(kvs_physical_rows_a_block(&v), 192);
    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){70}).at, 192 + 6);
    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){639}).at, 9 * 192 + 63);
    cr_assert_eq(kvs_physical_rows(&v), 9 * 192 + 64, "the last block ends where its page does");
}

Test(index, every_index_comes_back_and_rows_between_the_pages_are_no_tokens)
{
    const kvs_view v = a_view();
    int64_t seen = 0;

    for (int32_t i = 0; i < 640; i++)
        cr_assert_eq(kvs_logical_of_physical(&v, kvs_physical_of_logical(&v, (kvs_logical_index){i})).at, i);
    for (int64_t r = -1; r < 2000; r++) {
        const kvs_logical_index i = kvs_logical_of_physical(&v, (kvs_physical_row){r});

        seen += i.at >= 0;
        cr_assert(i.at == -1 || kvs_physical_of_logical(&v, i).at == r, "row %ld", (long)r);
    }
    cr_assert_eq(seen, 640);
}

Test(index, what_is_no_token_stays_none)
{
    kvs_view v = a_view();

    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){-1}).at, -1);
    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){INT32_MIN}).at, -1);
    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){640}).at, -1);
    cr_assert_eq(kvs_logical_of(&v, 10, 0).at, -1);
    cr_assert_eq(kvs_logical_of(&v, 0, 64).at, -1);
    cr_assert_eq(kvs_logical_of(&v, 9, 63).at, 639);
    v.n_blocks = 0;
    cr_assert_eq(kvs_physical_rows(&v), 0);
    cr_assert_not(kvs_logical_is_good(&v, (kvs_logical_index){0}));
}

/* A pool of mixed pages: 50 432 bytes are 76.9 rows of 656. */
Test(index, a_stride_that_is_no_whole_number_of_rows_has_no_physical_rows)
{
    kvs_view v = a_view();

    v.block_stride = 50432;
    cr_assert_eq(kvs_physical_rows_a_block(&v), 0);
    cr_assert_eq(kvs_physical_rows(&v), 0);
    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){0}).at, -1);
    cr_assert_eq(kvs_logical_of_physical(&v, (kvs_physical_row){0}).at, -1);
}

Test(index, products_are_64_bit_and_an_index_above_int32_cannot_be_said)
{
    kvs_view v = a_view();

    v.n_blocks = UINT32_C(1) << 26; /* 2^32 tokens */
    v.block_stride = UINT64_C(61) * 64 * 656;
    cr_assert_eq(kvs_logical_indices(&v), UINT64_C(1) << 32);
    cr_assert_eq(kvs_logical_of(&v, (1u << 25) - 1, 63).at, INT32_MAX);
    cr_assert_eq(kvs_logical_of(&v, 1u << 25, 0).at, -1);
    cr_assert_eq(kvs_physical_of_logical(&v, (kvs_logical_index){INT32_MAX}).at,
                 INT64_C(61) * 64 * ((INT64_C(1) << 25) - 1) + 63);
    cr_assert_eq(kvs_logical_of_physical(&v, (kvs_physical_row){INT64_C(61) * 64 * (INT64_C(1) << 25)}).at, -1);
}
