#include "kernels/host_pages.h"

#include <criterion/criterion.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { PAGE = 4096, PAGES = 9000 }; /* more than two windows */

static uint8_t *p;

static void setup(void)
{
    int fd = memfd_create("pages", MFD_CLOEXEC);

    cr_assert(fd >= 0 && ftruncate(fd, (off_t)PAGES * PAGE) == 0);
    p = mmap(NULL, (size_t)PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert(p != MAP_FAILED);
    (void)close(fd);
}

TestSuite(host_pages, .init = setup);

Test(host_pages, counts_what_has_no_memory)
{
    cr_assert_eq(kvs_pages_absent(p, (uint64_t)PAGES * PAGE), (uint64_t)PAGES * PAGE);
    p[5 * PAGE] = 1;
    p[8500 * PAGE + 7] = 1;
    cr_assert_eq(kvs_pages_absent(p, (uint64_t)PAGES * PAGE), (uint64_t)(PAGES - 2) * PAGE);
    cr_assert_eq(kvs_pages_absent(p + 5 * PAGE + 100, 10), 0, "a part of a page is that page");
    cr_assert_eq(kvs_pages_absent(p + 5 * PAGE + 100, PAGE), PAGE);
    cr_assert_eq(kvs_pages_absent(NULL, 10), 0);
    cr_assert_eq(kvs_pages_absent(p, 0), 0);
}

Test(host_pages, makes_them_and_keeps_their_content)
{
    kvs_err err = {.msg = ""};

    p[77] = 5;
    cr_assert_eq(kvs_pages_make(p, (uint64_t)PAGES * PAGE, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_pages_absent(p, (uint64_t)PAGES * PAGE), 0);
    cr_assert_eq(p[77], 5);
    cr_assert_eq(p[78], 0);
    cr_assert_eq(kvs_pages_make(p, (uint64_t)PAGES * PAGE, &err), KVS_OK);
    p[77] = 6;
    cr_assert_eq(p[77], 6);
    cr_assert_eq(kvs_pages_make(p, UINT64_MAX, &err), KVS_E_INVALID);
}

Test(host_pages, mapping_ahead_allocates_nothing_and_stops_where_something_is_absent)
{
    cr_assert_eq(kvs_pages_map(p, (uint64_t)PAGES * PAGE), 0);
    cr_assert_eq(kvs_pages_absent(p, (uint64_t)PAGES * PAGE), (uint64_t)PAGES * PAGE);
    cr_assert_eq(kvs_pages_make(p, 5000 * PAGE, NULL), KVS_OK);
    cr_assert_eq(kvs_pages_map(p, (uint64_t)PAGES * PAGE), 4096 * PAGE, "a window has all, the next one has not");
    cr_assert_eq(kvs_pages_map(p + 100, 2000 * PAGE), 2000 * PAGE);
    cr_assert_eq(kvs_pages_absent(p, (uint64_t)PAGES * PAGE), (uint64_t)(PAGES - 5000) * PAGE);
    cr_assert_eq(munmap(p, (size_t)PAGES * PAGE), 0);
    cr_assert_eq(kvs_pages_map(p, (uint64_t)PAGES * PAGE), 0, "no memory at all any more");
    cr_assert_eq(kvs_pages_map(NULL, 5), 0);
}
