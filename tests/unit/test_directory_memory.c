#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>

/* The module itself, with an allocator that fails the n-th call. */
static int fail_in; /* 0: never */

static void *failing(void *p)
{
    if (fail_in > 0 && --fail_in == 0) {
        free(p);
        return NULL;
    }
    return p;
}

static void *failing_realloc(void *p, size_t n)
{
    if (fail_in > 0 && --fail_in == 0)
        return NULL;
    return realloc(p, n);
}

#define malloc(n)     failing(malloc(n))
#define calloc(n, m)  failing(calloc(n, m))
#define realloc(p, n) failing_realloc(p, n)
#include "daemon/directory.c"
#undef malloc
#undef calloc
#undef realloc

#include "tests/support/dir_fixture.h"

static fixture f;

Test(directory_memory, reports_each_allocation_that_fails_when_it_is_made)
{
    directory_config c;
    directory *d = NULL;
    int n = 0;

    fixture_init(&f, 4, 4);
    c = (directory_config){.pool = f.pool, .evict = &evict_lru};
    do {
        kvs_err err = {0};

        fail_in = ++n;
        if (directory_create(&d, &c, &err) != KVS_OK)
            cr_assert(d == NULL && err.status == KVS_E_NO_MEMORY, "allocation %d", n);
    } while (d == NULL && n < 10);
    fail_in = 0;
    cr_assert_eq(n, 6, "its struct, extents, tenants, chains and scratch can fail");
    directory_destroy(d);
    fixture_fini(&f);
}

Test(directory_memory, reports_each_allocation_that_fails_when_a_namespace_is_opened)
{
    static kvs_plane planes[2];
    uint8_t canon[4096];
    kvs_namespace desc;
    size_t len = 0;
    uint32_t ns = 0;
    /* The list; its text, the list having grown; its entry; its planes; last the shrinking of these, which
     * may fail. */
    static const int fails[] = {1, 3, 1, 3, 4};

    fixture_init(&f, 4, 4);
    for (uint32_t i = 1; i < 16; i++) { /* so that the list itself must grow with the next one */
        char name[8] = {'m', (char)('a' + i)};

        (void)fixture_open(&f, 1, name, 2);
    }
    cr_assert_eq(kvs_namespace_mla("last", "w", KVS_FORMAT_mla_bf16, 2, 1, planes, &desc, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_encode(&desc, canon, sizeof canon, &len, NULL), KVS_OK);
    for (uint32_t i = 0; i < sizeof fails / sizeof fails[0]; i++) {
        bool last = i + 1 == sizeof fails / sizeof fails[0];

        fail_in = fails[i];
        cr_assert_eq(directory_open(f.dir, 1, canon, len, &ns, NULL), last ? KVS_OK : KVS_E_NO_MEMORY, "try %u", i);
        cr_assert_eq(fail_in, 0);
        cr_assert_eq(directory_n_namespaces(f.dir), last ? 17 : 16);
    }
    cr_assert_eq(fixture_store(&f, ns, 1, 1, 0, 0), 1);
    fixture_fini(&f);
}

Test(directory_memory, opens_no_more_namespaces_than_there_are_numbers)
{
    kvs_err err = {0};
    char model[16];

    fixture_init_alone(&f, 4, 4);
    for (uint32_t i = 1; i < DIRECTORY_MAX_NAMESPACES; i++) {
        (void)snprintf(model, sizeof model, "m%u", i);
        cr_assert_eq(fixture_open(&f, 0, model, 2), i);
    }
    cr_assert_eq(directory_open(f.dir, 0, (const uint8_t *)"x", 1, &(uint32_t){0}, &err), KVS_E_LIMIT);
    cr_assert_gt(strlen(err.msg), 0);
    cr_assert_eq(fixture_open(&f, 0, "m99", 2), 99, "known ones can still be opened");
    fixture_fini(&f);
}
