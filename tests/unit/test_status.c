#include "proto/status.h"

#include <criterion/criterion.h>
#include <string.h>

Test(status, names_every_code)
{
#define X(name, value, text)                                                                                           \
    cr_assert_str_eq(kvs_status_name((kvs_status)(value)), #name);                                                     \
    cr_assert_str_eq(kvs_status_text((kvs_status)(value)), text);
    KVS_STATUS_MAP(X)
#undef X
}

Test(status, has_an_answer_for_a_code_of_a_newer_peer)
{
    cr_assert_str_eq(kvs_status_name((kvs_status)9999), "E_UNKNOWN");
    cr_assert_str_eq(kvs_status_text((kvs_status)9999), "a status of a newer protocol");
}

Test(status, numbers_are_dense_so_that_none_was_renumbered_by_accident)
{
    int next = 0;

#define X(name, value, text)                                                                                           \
    cr_assert_eq(value, next, #name " is %d where %d comes next", value, next);                                        \
    next++;
    KVS_STATUS_MAP(X)
#undef X
    cr_assert_eq(KVS_E_STALE, 23);
}

Test(status, fail_records_code_and_text)
{
    kvs_err err = {0};

    cr_assert_eq(kvs_fail(&err, KVS_E_RANGE, "slot: %d is outside 0..%d", 7, 3), KVS_E_RANGE);
    cr_assert_eq(err.status, KVS_E_RANGE);
    cr_assert_str_eq(err.msg, "slot: 7 is outside 0..3");
}

Test(status, fail_takes_no_place_to_write_to)
{
    cr_assert_eq(kvs_fail(NULL, KVS_E_BUSY, "unused %d", 1), KVS_E_BUSY);
}

Test(status, fail_cuts_a_long_text_and_closes_it)
{
    char text[2 * KVS_ERR_MSG_BYTES];
    kvs_err err;

    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    memset(&err, 0xff, sizeof err);
    cr_assert_eq(kvs_fail(&err, KVS_E_SYS, "%s", text), KVS_E_SYS);
    cr_assert_eq(strlen(err.msg), KVS_ERR_MSG_BYTES - 1);
}
