#include "kernels/host_pages.h"

#include <errno.h>
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/host_memory.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

enum { WINDOW = 4096 }; /* pages looked at in one mincore call, and mapped in one step of kvs_pages_map */

typedef struct range {
    uint8_t *first;
    uint64_t bytes, page;
} range;

static bool range_of(const void *p, uint64_t bytes, range *ret)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), skip = (uintptr_t)p % page;
    uint64_t end;

    if (p == NULL || bytes == 0 || __builtin_add_overflow((uintptr_t)p, bytes, &end) || end > INTPTR_MAX - page)
        return false;
    *ret = (range){(uint8_t *)(uintptr_t)p - skip, (bytes + skip + page - 1) / page * page, page};
    return true;
}

/* Of at most WINDOW pages.  False: they are no memory. */
static bool count_absent(const range *r, uint64_t at, uint64_t n, uint64_t *ret)
{
    unsigned char seen[WINDOW];

    if (mincore(r->first + at, n * r->page, seen) != 0)
        return false;
    for (uint64_t i = 0; i < n; i++)
        *ret += (seen[i] & 1) == 0 ? r->page : 0;
    return true;
}

static uint64_t window_at(const range *r, uint64_t at)
{
    uint64_t n = (r->bytes - at) / r->page;

    return n < WINDOW ? n : WINDOW;
}

uint64_t kvs_pages_absent(const void *p, uint64_t bytes)
{
    uint64_t absent = 0;
    range r;

    if (!range_of(p, bytes, &r))
        return 0;
    for (uint64_t at = 0; at < r.bytes; at += WINDOW * r.page)
        if (!count_absent(&r, at, window_at(&r, at), &absent))
            return absent;
    return absent;
}

/* For kernels before 5.14.  Adding nothing, atomically, writes to a page without changing what others see in it. */
static void touch(const range *r)
{
    for (uint64_t at = 0; at < r->bytes; at += r->page)
        (void)__atomic_fetch_or(r->first + at, 0, __ATOMIC_RELAXED);
}

kvs_status kvs_pages_make(void *p, uint64_t bytes, kvs_err *err)
{
    uint64_t absent;
    kvs_status s;
    range r;
    int e;

    if (!range_of(p, bytes, &r))
        return kvs_fail(err, KVS_E_INVALID, "host_register: %" PRIu64 " bytes at %p are no range", bytes, p);
    absent = kvs_pages_absent(p, bytes);
    s = kvs_host_want("host_register", absent, err);
    if (s != KVS_OK)
        return s;
    (void)madvise(r.first, r.bytes, MADV_HUGEPAGE); /* where tmpfs may have them: far fewer pages to pin */
    /* Pages that are there are mapped many at a time by reading, and one by one by writing. */
    if (madvise(r.first, r.bytes, absent == 0 ? MADV_POPULATE_READ : MADV_POPULATE_WRITE) == 0)
        return KVS_OK;
    e = errno;
    if (e != EINVAL)
        return kvs_fail(err, e == ENOMEM || e == EFAULT ? KVS_E_NO_SPACE : KVS_E_SYS,
                        "host_register: %" PRIu64 " bytes: %s; %" PRIu64 " are available", bytes, strerror(e),
                        kvs_host_available());
    touch(&r);
    return KVS_OK;
}

uint64_t kvs_pages_map(void *p, uint64_t bytes)
{
    uint64_t at = 0;
    range r;

    if (!range_of(p, bytes, &r))
        return 0;
    while (at < r.bytes) {
        uint64_t n = window_at(&r, at), absent = 0;

        if (!count_absent(&r, at, n, &absent) || absent > 0 ||
            madvise(r.first + at, n * r.page, MADV_POPULATE_READ) != 0)
            break;
        at += n * r.page;
    }
    at -= at < (uint64_t)((uint8_t *)p - r.first) ? at : (uint64_t)((uint8_t *)p - r.first);
    return at < bytes ? at : bytes;
}
