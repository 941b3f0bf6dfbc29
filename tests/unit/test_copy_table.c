/* The file that calibration leaves for the daemon. */
#include "config/copy_table.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char folder[64];

static void setup(void)
{
    strcpy(folder, "/tmp/kvs-table-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void teardown(void)
{
    char command[128];

    (void)snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

TestSuite(copy_table, .init = setup, .fini = teardown);

static copy_table some(void)
{
    copy_table t = {.card = "Fake \"9\"", .date = "2026-11-30", .driver_version = 13000, .n = {2, 1}};

    for (int i = 0; i < 16; i++)
        t.uuid[i] = (uint8_t)(i * 17);
    t.rows[0][0] = (copy_row){4608, 2.5, 48, 2.25, 27, 0.97, 0.45, 32};
    t.rows[0][1] = (copy_row){73728, 34, 51, 33, 28, 0.97, 0.45, 16};
    t.rows[1][0] = (copy_row){4608, 10, 48, 0, 0, 0, 0, 8};
    t.n_peers = 2;
    t.peers[0] = (copy_peer){{1, 2, 3}, 362.5};
    t.peers[1] = (copy_peer){{4}, 31};
    return t;
}

static bool same(const copy_table *a, const copy_table *b)
{
    if (strcmp(a->card, b->card) != 0 || strcmp(a->date, b->date) != 0 || memcmp(a->uuid, b->uuid, 16) != 0 ||
        a->driver_version != b->driver_version)
        return false;
    for (int d = 0; d < 2; d++)
        for (uint32_t i = 0; i < a->n[d] || i < b->n[d]; i++)
            if (memcmp(&a->rows[d][i], &b->rows[d][i], offsetof(copy_row, kernel_blocks) + 4) != 0)
                return false;
    for (uint32_t i = 0; i < a->n_peers || i < b->n_peers; i++)
        if (memcmp(a->peers[i].uuid, b->peers[i].uuid, 16) != 0 || a->peers[i].gbs < b->peers[i].gbs ||
            a->peers[i].gbs > b->peers[i].gbs)
            return false;
    return true;
}

Test(copy_table, comes_back_as_it_was_written)
{
    copy_table t = some(), got;
    kvs_err err = {0};

    cr_assert_eq(copy_table_write(folder, &t, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(copy_table_read(folder, t.uuid, &got, &err), KVS_OK, "%s", err.msg);
    cr_assert(same(&t, &got));
    t.rows[0][0].engine = 3;
    cr_assert_eq(copy_table_write(folder, &t, &err), KVS_OK, "it is replaced");
    cr_assert_eq(copy_table_read(folder, t.uuid, &got, &err), KVS_OK);
    cr_assert_eq(got.rows[0][0].engine, 3);
}

Test(copy_table, of_each_card_is_a_file_of_its_own)
{
    copy_table a = some(), b = some(), got;
    kvs_err err = {0};
    char from[160], to[160];

    b.uuid[15] = 1;
    cr_assert_eq(copy_table_write(folder, &a, &err), KVS_OK);
    cr_assert_eq(copy_table_read(folder, b.uuid, &got, &err), KVS_E_NOT_FOUND);
    cr_assert(strstr(err.msg, folder) != NULL, "%s", err.msg);
    (void)snprintf(from, sizeof from, "%s/copies-00112233445566778899aabbccddeeff.json", folder);
    (void)snprintf(to, sizeof to, "%s/copies-00112233445566778899aabbccddee01.json", folder);
    cr_assert_eq(rename(from, to), 0, "the name says whose it is");
    cr_assert_eq(copy_table_read(folder, b.uuid, &got, &err), KVS_E_CONFIG);
    cr_assert(strstr(err.msg, "another card") != NULL, "%s", err.msg);
}

Test(copy_table, says_which_file_it_could_not_write)
{
    copy_table t = some();
    kvs_err err = {0};

    cr_assert_eq(copy_table_write("/proc/no/such", &t, &err), KVS_E_SYS);
    cr_assert(strstr(err.msg, "/proc/no/such") != NULL, "%s", err.msg);
}

Test(copy_table, tells_the_link_and_each_other_card)
{
    copy_table t = some();

    cr_assert_eq(copy_table_link(&t), 34); /* of the longest pieces */
    cr_assert_eq(copy_table_peer(&t, t.peers[1].uuid), 31);
    cr_assert_eq(copy_table_peer(&t, t.uuid), 0);
    t.n[0] = 0;
    cr_assert_eq(copy_table_link(&t), 0);
}

#define HEAD                                                                                                           \
    "{\"format\":1,\"card\":\"c\",\"uuid\":\"00112233445566778899aabbccddeeff\",\"driver_version\":1,\"date\":\"d\","
#define RATES                                                                                                          \
    "\"engine\":1,\"kernel\":2,\"beside_engine\":3,\"beside_kernel\":4,\"left_by_engine\":0.5,\"left_by_kernel\":0.5"
#define ROW(n) "{\"piece_bytes\":" n ",\"kernel_blocks\":16," RATES "}"

static void refuse(const char *text, const char *why)
{
    copy_table t = {.driver_version = 77};
    kvs_err err = {0};

    cr_assert_eq(copy_table_parse(text, strlen(text), &t, &err), KVS_E_CONFIG, "%s", text);
    cr_assert(strstr(err.msg, why) != NULL, "%s: %s", text, err.msg);
    cr_assert_eq(t.driver_version, 77, "nothing is written");
}

#define ONE "00112233445566778899aabbccddee01"

static void refuse_peers(const char *peers, const char *why)
{
    char text[2048];

    (void)snprintf(text, sizeof text, HEAD "\"load\":[" ROW("16") "],\"store\":[" ROW("16") "],\"peers\":[%s]}", peers);
    refuse(text, why);
}

Test(copy_table, is_refused_with_the_member_at_fault)
{
    copy_table t;
    const char *good = HEAD "\"load\":[" ROW("16") "],\"store\":[" ROW("16") "," ROW("17") "]}";

    cr_assert_eq(copy_table_parse(good, strlen(good), &t, NULL), KVS_OK);
    cr_assert_eq(t.n[1], 2);
    refuse("[]", "expected an object");
    refuse("{", "line 1");
    refuse("{}", "format: is missing");
    refuse("{\"format\":2}", "format: 2 is no whole number of 1..1");
    refuse("{\"format\":1,\"card\":5}", "card: expected a string");
    refuse("{\"format\":1,\"card\":\"c\",\"uuid\":\"00\"}", "uuid: expected 32 digits");
    refuse("{\"format\":1,\"card\":\"c\",\"uuid\":\"0011223344556677x899aabbccddeeff\"}", "uuid: expected 32 digits");
    refuse(HEAD "\"load\":[" ROW("16") "]}", "store: is missing");
    refuse(HEAD "\"load\":[],\"store\":[]}", "load: 0 rows are not 1..12");
    refuse(HEAD "\"load\":[" ROW("16") "],\"store\":[" ROW("16") "],\"peers\":3}", "peers: expected an array");
    refuse(HEAD "\"load\":[" ROW("16") "],\"store\":[" ROW("16") "],\"peers\":[1]}", "peer: expected an object");
    refuse(HEAD "\"load\":[" ROW("16") "],\"store\":[" ROW("16") "],\"peers\":[{\"gbs\":1}]}", "uuid: is missing");
    refuse(HEAD "\"load\":[" ROW("16") "],\"store\":[" ROW("16") "],\"peers\":[{\"uuid\":"
                                                                 "\"00112233445566778899aabbccddee01\",\"gbs\":-1}]}",
           "gbs: -1 is outside 0..");
    refuse_peers("{\"uuid\":\"00112233445566778899aabbccddeeff\",\"gbs\":1}", "the card itself");
    refuse_peers("{\"uuid\":\"" ONE "\",\"gbs\":1},{\"uuid\":\"" ONE "\",\"gbs\":2}", "two have the same uuid");
    refuse_peers("{\"uuid\":\"" ONE "\",\"gbs\":1e999}", "");
    refuse_peers("{\"uuid\":\"" ONE "\",\"gbs\":100001}", "gbs: 100001 is outside 0..");
    refuse_peers("{\"uuid\":\"" ONE "\",\"gbs\":\"1\"}", "gbs: expected a number");
    refuse_peers("{\"uuid\":\"" ONE "\",\"gbs\":null}", "gbs: expected a number");
    refuse_peers("{\"uuid\":\"" ONE "\"}", "gbs: is missing");
    refuse_peers("{\"uuid\":\"0011223344556677889900BBCCDDEEFF\",\"gbs\":1}", "uuid: expected 32 digits");
    refuse_peers("null", "peer: expected an object");
    refuse_peers("[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[],[]", "peers: 17 are more than 16");
    refuse(HEAD "\"load\":[" ROW("16") "," ROW("16") "],\"store\":[]}", "load: rows are not in order");
    refuse(HEAD "\"load\":[7],\"store\":[]}", "row: expected an object");
    refuse(HEAD "\"load\":[" ROW("0") "],\"store\":[]}", "piece_bytes: 0 is no whole number");
    refuse(HEAD "\"load\":[{\"piece_bytes\":16,\"kernel_blocks\":0}]}", "kernel_blocks: 0 is no whole number");
    refuse(HEAD "\"load\":[{\"piece_bytes\":16,\"kernel_blocks\":1,\"engine\":-1}]}", "engine: -1 is outside");
    refuse(HEAD "\"load\":[{\"piece_bytes\":16,\"kernel_blocks\":1,\"engine\":1,\"kernel\":1e6}]}", "kernel: 1000000");
}
