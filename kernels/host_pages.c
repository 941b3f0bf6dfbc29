#include "kernels/host_pages.h"

#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/host_memory.h"
#include "proto/cpus.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_READ  22
#define MADV_POPULATE_WRITE 23
#endif

enum {
    WINDOW = 4096,  /* pages looked at in one mincore call, and mapped in one step of kvs_pages_map */
    MAX_THREADS = 4 /* 8 are slower than 4, for new pages and for old ones: they wait for each other in the kernel */
};
#define SHARE_BYTES (UINT64_C(16) << 20) /* less is not worth a thread */

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

/* ---- shared by threads ---- */

typedef struct share {
    range r;
    void (*work)(struct share *s);
    uint64_t done; /* bytes of r, from its start */
    int error;
    bool started;
    pthread_t thread;
} share;

static void *share_main(void *arg)
{
    share *s = arg;

    s->work(s);
    return NULL;
}

/* In order, each of whole shares' sizes but the last.  Returns how many. */
static uint32_t share_out(const range *r, void (*work)(share *), share s[MAX_THREADS])
{
    uint64_t n = r->bytes / SHARE_BYTES, cpus = cpus_usable(), each, at = 0;
    uint32_t i = 0;

    n = n < cpus ? n : cpus;
    n = n < 1 ? 1 : n > MAX_THREADS ? MAX_THREADS : n;
    each = (r->bytes / r->page + n - 1) / n * r->page;
    for (; at < r->bytes; at += each, i++) {
        uint64_t left = r->bytes - at;

        s[i] = (share){.r = {r->first + at, left < each ? left : each, r->page}, .work = work};
    }
    return i;
}

/* The first one's is the caller's; so is one whose thread does not start. */
static void run_shares(share *s, uint32_t n)
{
    for (uint32_t i = 1; i < n; i++)
        s[i].started = pthread_create(&s[i].thread, NULL, share_main, &s[i]) == 0;
    for (uint32_t i = 0; i < n; i++)
        if (!s[i].started)
            s[i].work(&s[i]);
    for (uint32_t i = 1; i < n; i++)
        if (s[i].started)
            (void)pthread_join(s[i].thread, NULL);
}

/* ---- make ---- */

/* For kernels before 5.14.  Adding nothing, atomically, writes to a page without changing what others see in it. */
static void touch(const range *r)
{
    for (uint64_t at = 0; at < r->bytes; at += r->page)
        (void)__atomic_fetch_or(r->first + at, 0, __ATOMIC_RELAXED);
}

/* Pages that are there are mapped many at a time by reading, and one by one by writing. */
static void make_share(share *s)
{
    const range *r = &s->r;
    bool absent = kvs_pages_absent(r->first, r->bytes) > 0;

    (void)madvise(r->first, r->bytes, MADV_HUGEPAGE); /* where tmpfs may have them: far fewer pages to pin */
    if (madvise(r->first, r->bytes, absent ? MADV_POPULATE_WRITE : MADV_POPULATE_READ) == 0)
        return;
    if (errno == EINVAL)
        touch(r);
    else
        s->error = errno;
}

kvs_status kvs_pages_make(void *p, uint64_t bytes, kvs_err *err)
{
    share shares[MAX_THREADS];
    kvs_status s;
    uint32_t n;
    range r;

    if (!range_of(p, bytes, &r))
        return kvs_fail(err, KVS_E_INVALID, "host_register: %" PRIu64 " bytes at %p are no range", bytes, p);
    s = kvs_host_want("host_register", kvs_pages_absent(p, bytes), err);
    if (s != KVS_OK)
        return s;
    n = share_out(&r, make_share, shares);
    run_shares(shares, n);
    for (uint32_t i = 0; i < n; i++) {
        int e = shares[i].error;

        if (e != 0)
            return kvs_fail(err, e == ENOMEM || e == EFAULT ? KVS_E_NO_SPACE : KVS_E_SYS,
                            "host_register: %" PRIu64 " bytes: %s; %" PRIu64 " are available", bytes, strerror(e),
                            kvs_host_available());
    }
    return KVS_OK;
}

/* ---- map ---- */

static void map_share(share *s)
{
    const range *r = &s->r;

    while (s->done < r->bytes) {
        uint64_t n = window_at(r, s->done), absent = 0;

        if (!count_absent(r, s->done, n, &absent) || absent > 0 ||
            madvise(r->first + s->done, n * r->page, MADV_POPULATE_READ) != 0)
            return;
        s->done += n * r->page;
    }
}

uint64_t kvs_pages_map(void *p, uint64_t bytes)
{
    share shares[MAX_THREADS];
    uint64_t at = 0, skip;
    uint32_t n;
    range r;

    if (!range_of(p, bytes, &r))
        return 0;
    n = share_out(&r, map_share, shares);
    run_shares(shares, n);
    for (uint32_t i = 0; i < n; i++) {
        at += shares[i].done;
        if (shares[i].done < shares[i].r.bytes)
            break;
    }
    skip = (uint64_t)((uint8_t *)p - r.first);
    at -= at < skip ? at : skip;
    return at < bytes ? at : bytes;
}
