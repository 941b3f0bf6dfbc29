#include "kernels/host_node.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "kernels/host_memory.h"

Test(host_node, reads_the_kernels_lists)
{
    static const struct {
        const char *list;
        int32_t node;
        bool found;
        uint32_t n;
    } cases[] = {
        {"0", 0, true, 1},        {"0", 1, false, 1},    {"0-1", 1, true, 2},   {"0-1,4", 4, true, 3},
        {"0-1,4", 3, false, 3},   {"0,2-5", 4, true, 5}, {"", 0, false, 0},     {"x", 0, false, 0},
        {"0-99999", 5, false, 0}, {"7-3", 5, false, 0},  {"0-1", -1, false, 2}, {"1023", 1023, true, 1},
    };

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        uint32_t n = 99;

        cr_assert_eq(kvs_host_node_in(cases[i].list, cases[i].node, &n), cases[i].found, "case %zu", i);
        cr_assert_eq(n, cases[i].n, "case %zu: %u", i, n);
    }
}

static uint32_t nodes_here(void)
{
    char list[64] = "";
    uint32_t n = 0;
    FILE *f = fopen("/sys/devices/system/node/has_memory", "re");

    if (f != NULL && fgets(list, sizeof list, f) == NULL)
        list[0] = '\0';
    if (f != NULL)
        (void)fclose(f);
    (void)kvs_host_node_in(list, 0, &n);
    return n;
}

Test(host_node, a_missing_node_is_refused_and_a_single_one_ignores_the_number)
{
    kvs_err err = {.msg = ""};
    kvs_status s = kvs_host_node_check(KVS_NODES_MAX - 1, &err);

    cr_assert_eq(kvs_host_node_check(KVS_NODE_ANY, NULL), KVS_OK);
    cr_assert_eq(s, nodes_here() > 1 ? KVS_E_CONFIG : KVS_OK, "%s", err.msg);
    cr_assert(s == KVS_OK || strstr(err.msg, "node 1023 has no memory here") != NULL, "%s", err.msg);
}

Test(host_node, placed_pages_keep_what_is_in_them)
{
    uint64_t bytes = 1 << 20;
    uint8_t *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    kvs_err err = {.msg = ""};

    cr_assert(p != MAP_FAILED);
    p[5] = 7;
    cr_assert_eq(kvs_host_node_place(p, bytes, 0, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_host_node_place(p, bytes, KVS_NODES_MAX - 1, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(p[5], 7);
    cr_assert_eq(p[bytes - 1], 0);
    (void)munmap(p, bytes);
}

Test(host_node, memory_that_is_not_there_is_refused_with_what_to_do)
{
    kvs_err err = {.msg = ""};

    cr_assert_eq(kvs_host_want("pool", UINT64_C(1) << 50, &err), KVS_E_NO_SPACE);
    cr_assert(strstr(err.msg, "pool: 1125899906842624 bytes wanted") != NULL, "%s", err.msg);
    cr_assert(strstr(err.msg, "ask for less") != NULL, "%s", err.msg);
    cr_assert_eq(kvs_host_want("pool", 0, NULL), KVS_OK);
}
