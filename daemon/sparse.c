#include "daemon/sparse.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static uint64_t map_pages(const sparse *a)
{
    return a->bytes >> SPARSE_PAGE_SHIFT;
}

kvs_status sparse_init(sparse *a, int fd, uint64_t n, size_t item, kvs_err *err)
{
    return sparse_init_at(a, fd, 0, n, item, err);
}

kvs_status sparse_init_at(sparse *a, int fd, uint64_t at, uint64_t n, size_t item, kvs_err *err)
{
    const uint64_t page = UINT64_C(1) << SPARSE_PAGE_SHIFT;
    uint64_t bytes;
    void *base;

    memset(a, 0, sizeof *a);
    if (n == 0 || n > (UINT64_C(1) << 46) / item)
        return kvs_fail(err, KVS_E_LIMIT, "table: %llu items of %zu bytes are outside 1..2^46 bytes",
                        (unsigned long long)n, item);
    bytes = (n * item + page - 1) & ~(page - 1);
    base = mmap(NULL, bytes, PROT_READ | PROT_WRITE,
                (fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS : MAP_SHARED) | MAP_NORESERVE, fd, (off_t)at);
    if (base == MAP_FAILED)
        return kvs_fail(err, KVS_E_NO_MEMORY, "table: cannot map %llu bytes: %s", (unsigned long long)bytes,
                        strerror(errno));
    /* A huge page would make a handful of rows cost 2 MiB.  A kernel without huge pages refuses the advice:
     * the same. */
    (void)madvise(base, bytes, MADV_NOHUGEPAGE);
    /* A core file would be as long as all rows that there may ever be, and name every block. */
    (void)madvise(base, bytes, MADV_DONTDUMP);
    a->seen = calloc((bytes >> SPARSE_PAGE_SHIFT) / 8 + 1, 1);
    if (a->seen == NULL) {
        (void)munmap(base, bytes);
        return kvs_fail(err, KVS_E_NO_MEMORY, "table: no memory for %llu page marks",
                        (unsigned long long)(bytes >> SPARSE_PAGE_SHIFT));
    }
    a->base = base;
    a->bytes = bytes;
    a->item = item;
    return KVS_OK;
}

void sparse_fini(sparse *a)
{
    if (a->base != NULL)
        (void)munmap(a->base, a->bytes);
    free(a->seen);
    memset(a, 0, sizeof *a);
}

uint64_t sparse_resident(const sparse *a)
{
    return (a->n_pages << SPARSE_PAGE_SHIFT) + map_pages(a) / 8 + 1;
}
