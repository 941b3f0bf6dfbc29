/* What pinning host memory costs: new memory, and memory of an earlier life that is mapped again, as at a warm restart. */
#include <errno.h>
#include <math.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/device_cuda.h"
#include "proto/ctl/bench_side.h"
#include "proto/ctl/clock.h"

enum { PIECES = 4, MAX_ROUNDS = 3 };
#define PIECE_BYTES (UINT64_C(1) << 30)
#define ALL_BYTES   (PIECES * PIECE_BYTES)

/* ms a GiB for each piece of a fresh mapping. */
static kvs_status pin(device *d, int fd, double *ret_ms, kvs_err *err)
{
    uint8_t *p = mmap(NULL, ALL_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    uint64_t n = 0;
    kvs_status s = KVS_OK;

    if (p == MAP_FAILED)
        return kvs_fail(err, KVS_E_SYS, "mmap: %s", strerror(errno));
    for (; n < PIECES && s == KVS_OK; n += s == KVS_OK) {
        uint64_t at = clock_ns();

        s = d->ops->host_register(d, p + n * PIECE_BYTES, PIECE_BYTES, err);
        ret_ms[n] = (double)(clock_ns() - at) / 1e6;
    }
    for (uint64_t i = 0; i < n; i++)
        d->ops->host_unregister(d, p + i * PIECE_BYTES, PIECE_BYTES);
    (void)munmap(p, ALL_BYTES);
    return s;
}

static kvs_status pin_round(device *d, double *cold, double *warm, kvs_err *err)
{
    int fd = memfd_create("kvstridectl-bench", MFD_CLOEXEC);
    kvs_status s = KVS_OK;

    if (fd < 0 || ftruncate(fd, ALL_BYTES) != 0)
        s = kvs_fail(err, KVS_E_SYS, "memfd: %s", strerror(errno));
    if (s == KVS_OK)
        s = pin(d, fd, cold, err);
    if (s == KVS_OK)
        s = pin(d, fd, warm, err);
    if (fd >= 0)
        (void)close(fd);
    return s;
}

static void add(bench_list *l, const char *what, double target, double *ms, size_t n)
{
    bench_figure *f = bench_add(l, "ms a GiB", false, target, "GPU: pinning, %s", what);

    bench_judge(f, ms, n);
    f->value = f->judged;
    f->judged_is = "the value";
}

kvs_status bench_pinning(bench_list *l, bool quick, kvs_err *err)
{
    double cold[MAX_ROUNDS * PIECES], warm[MAX_ROUNDS * PIECES];
    const int rounds = quick ? 1 : MAX_ROUNDS;
    device *d = NULL;
    kvs_status s = device_cuda_open(&d, 0, err);

    for (int r = 0; r < rounds && s == KVS_OK; r++)
        s = pin_round(d, cold + r * PIECES, warm + r * PIECES, err);
    if (s == KVS_OK) {
        add(l, "new memory", NAN, cold, (size_t)rounds * PIECES);
        add(l, "memory of an earlier life", 60, warm, (size_t)rounds * PIECES);
    }
    if (d != NULL)
        d->ops->close(d);
    return s;
}
