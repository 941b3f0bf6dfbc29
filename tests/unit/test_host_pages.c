#include "kernels/host_pages.h"

#include <criterion/criterion.h>
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "proto/cpus.h"

enum { PAGE = 4096, PAGES = 24000 }; /* five threads' shares, more than four windows */
#define BYTES ((uint64_t)PAGES * PAGE)

/* How many processors this process may use, and what became of the threads that it wanted. */
static unsigned cpus;
static int n_threads;
static bool no_threads;
static uint8_t *p;

unsigned cpus_usable(void)
{
    return cpus;
}

int pthread_create(pthread_t *ret, const pthread_attr_t *attr, void *(*fn)(void *), void *arg)
{
    int (*real)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);
    void *found = dlsym(RTLD_NEXT, "pthread_create");

    memcpy(&real, &found, sizeof real);
    if (no_threads)
        return EAGAIN;
    n_threads++;
    return real(ret, attr, fn, arg);
}

static void setup(void)
{
    cpus = 1;
    n_threads = 0;
    int fd = memfd_create("pages", MFD_CLOEXEC);

    cr_assert(fd >= 0 && ftruncate(fd, (off_t)BYTES) == 0);
    p = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert(p != MAP_FAILED);
    (void)close(fd);
}

TestSuite(host_pages, .init = setup);

Test(host_pages, counts_what_has_no_memory)
{
    cr_assert_eq(kvs_pages_absent(p, BYTES), BYTES);
    p[5 * PAGE] = 1;
    p[8500 * PAGE + 7] = 1;
    cr_assert_eq(kvs_pages_absent(p, BYTES), (uint64_t)(PAGES - 2) * PAGE);
    cr_assert_eq(kvs_pages_absent(p + 5 * PAGE + 100, 10), 0, "a part of a page is that page");
    cr_assert_eq(kvs_pages_absent(p + 5 * PAGE + 100, PAGE), PAGE);
    cr_assert_eq(kvs_pages_absent(NULL, 10), 0);
    cr_assert_eq(kvs_pages_absent(p, 0), 0);
}

Test(host_pages, makes_them_and_keeps_their_content)
{
    kvs_err err = {.msg = ""};

    p[77] = 5;
    cr_assert_eq(kvs_pages_make(p, BYTES, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(kvs_pages_absent(p, BYTES), 0);
    cr_assert_eq(p[77], 5);
    cr_assert_eq(p[78], 0);
    cr_assert_eq(kvs_pages_make(p, BYTES, &err), KVS_OK);
    p[77] = 6;
    cr_assert_eq(p[77], 6);
    cr_assert_eq(kvs_pages_make(p, UINT64_MAX, &err), KVS_E_INVALID);
}

Test(host_pages, mapping_ahead_allocates_nothing_and_stops_where_something_is_absent)
{
    cr_assert_eq(kvs_pages_map(p, BYTES), 0);
    cr_assert_eq(kvs_pages_absent(p, BYTES), BYTES);
    cr_assert_eq(kvs_pages_make(p, 5000 * PAGE, NULL), KVS_OK);
    cr_assert_eq(kvs_pages_map(p, BYTES), 4096 * PAGE, "a window has all, the next one has not");
    cr_assert_eq(kvs_pages_map(p + 100, 2000 * PAGE), 2000 * PAGE);
    cr_assert_eq(kvs_pages_absent(p, BYTES), (uint64_t)(PAGES - 5000) * PAGE);
    cr_assert_eq(munmap(p, BYTES), 0);
    cr_assert_eq(kvs_pages_map(p, BYTES), 0, "no memory at all any more");
    cr_assert_eq(kvs_pages_map(NULL, 5), 0);
}

Test(host_pages, are_made_by_as_many_threads_as_there_are_processors_to_use)
{
    p[0] = p[BYTES - 1] = 5;
    cpus = 3;
    cr_assert_eq(kvs_pages_make(p, BYTES, NULL), KVS_OK);
    cr_assert_eq(n_threads, 2, "and the caller");
    cr_assert_eq(kvs_pages_absent(p, BYTES), 0);
    cr_assert(p[0] == 5 && p[BYTES - 1] == 5 && p[BYTES / 2] == 0);
    cpus = 64;
    cr_assert_eq(kvs_pages_make(p, BYTES / 2, NULL), KVS_OK);
    cr_assert_eq(n_threads, 2 + 1, "less than 16 MiB are not worth a thread");
    cr_assert_eq(kvs_pages_make(p, BYTES, NULL), KVS_OK);
    cr_assert_eq(n_threads, 2 + 1 + 3, "more than four only wait for each other");
    cr_assert_eq(kvs_pages_make(p + 5, 7 * PAGE, NULL), KVS_OK);
    cpus = 1;
    cr_assert_eq(kvs_pages_make(p, BYTES, NULL), KVS_OK);
    cr_assert_eq(n_threads, 2 + 1 + 3, "a few pages, or one processor: no thread");
}

Test(host_pages, are_all_made_and_mapped_where_no_thread_starts)
{
    no_threads = true;
    cpus = 4;
    cr_assert_eq(kvs_pages_make(p, BYTES, NULL), KVS_OK);
    cr_assert_eq(kvs_pages_absent(p, BYTES), 0);
    cr_assert_eq(kvs_pages_map(p, BYTES), BYTES);
}

Test(host_pages, mapped_by_threads_count_up_to_the_first_that_is_absent)
{
    const uint64_t hole = 9000 * PAGE; /* in the second of four shares of 6,000 */
    int fd = memfd_create("pages", MFD_CLOEXEC);
    uint8_t *q;

    cpus = 4;
    cr_assert(fd >= 0 && ftruncate(fd, (off_t)BYTES) == 0);
    q = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    cr_assert(q != MAP_FAILED);
    cr_assert_eq(kvs_pages_make(q, hole, NULL), KVS_OK);
    cr_assert_eq(kvs_pages_make(q + hole + PAGE, BYTES - hole - PAGE, NULL), KVS_OK);
    cr_assert_eq(kvs_pages_map(q, BYTES), 6000 * PAGE, "the hole's window has not all");
    cr_assert_eq(kvs_pages_map(q + PAGE, hole - PAGE), hole - PAGE);
    q[hole] = 1;
    n_threads = 0;
    cr_assert_eq(kvs_pages_map(q, BYTES), BYTES);
    cr_assert_eq(n_threads, 3);
    (void)close(fd);
}

Test(host_pages, that_cannot_be_had_are_no_space)
{
    kvs_err err = {.msg = ""};

    cpus = 4;
    cr_assert_eq(munmap(p + BYTES / 4 * 3, BYTES / 4), 0); /* nothing there for the last share to make */
    cr_assert_eq(kvs_pages_make(p, BYTES, &err), KVS_E_NO_SPACE, "%s", err.msg);
    cr_assert(strstr(err.msg, "host_register: 98304000 bytes") != NULL, "%s", err.msg);
}
