/* Copies by kernel through the cuda device's queues: bytes there and back, canaries around every piece, shapes that a
 * kernel cannot take, and marks that stand for all before them while launches are on their way. */
#include "tests/gpu/gpu.h"

#ifdef KVS_CUDA
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "tests/support/random.h"

enum { MAX_PIECES = 9000, GAP = 64, BATCHES = 24 };
#define ROOM (UINT64_C(192) << 20)

/* Host and device memory of one size, and copies between equal places of both. */
typedef struct field {
    device *d;
    device_queue *load, *store;
    device_mem *mem;
    uint8_t *host, *want, *dev;
    device_copy copies[MAX_PIECES];
    size_t n;
} field;

static bool field_open(field *f, device *d)
{
    kvs_err err = {.msg = ""};
    uint64_t bytes;
    void *p = mmap(NULL, ROOM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    f->d = d;
    f->n = 0;
    f->want = malloc(ROOM);
    if (p == MAP_FAILED || f->want == NULL)
        return GPU_FAIL("no memory for twice %" PRIu64 " bytes", ROOM);
    f->host = p;
    if (d->ops->host_register(d, f->host, ROOM, &err) != KVS_OK ||
        d->ops->mem_create(d, ROOM, &f->mem, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_LOAD, &f->load, &err) != KVS_OK ||
        d->ops->queue_open(d, DEVICE_STORE, &f->store, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    f->dev = d->ops->mem_base(f->mem, 0, &bytes);
    return true;
}

static void field_close(field *f)
{
    f->d->ops->queue_close(f->load);
    f->d->ops->queue_close(f->store);
    f->d->ops->mem_close(f->mem);
    f->d->ops->host_unregister(f->d, f->host, ROOM);
    (void)munmap(f->host, ROOM);
    free(f->want);
}

static bool run(device_queue *q, const device_copy *c, size_t n, device_how how)
{
    kvs_err err = {.msg = ""};
    uint64_t mark = 0;

    if (q->dev->ops->copy(q, c, n, how, &mark, &err) != KVS_OK || q->dev->ops->wait(q, mark, &err) != KVS_OK)
        return GPU_FAIL("%s", err.msg);
    return true;
}

static bool whole(device_queue *q, void *dst, const void *src)
{
    return run(q, &(device_copy){dst, src, ROOM}, 1, (device_how){DEVICE_BY_ENGINE, 0});
}

/* Pieces of the sizes in turn, each at a place of its own on both sides, in another order here and there. */
static void lay_out(field *f, const uint64_t *sizes, size_t n_sizes, size_t n, bool load)
{
    uint64_t longest = 0, pitch, places;

    for (size_t i = 0; i < n_sizes; i++)
        longest = sizes[i] > longest ? sizes[i] : longest;
    pitch = (longest + GAP + 15) / 16 * 16;
    places = ROOM / pitch;
    for (f->n = 0; f->n < n && f->n < places; f->n++) {
        uint64_t at = f->n * pitch, other = (places - 1 - f->n) * pitch, bytes = sizes[f->n % n_sizes];

        f->copies[f->n] = load ? (device_copy){f->dev + other, f->host + at, bytes}
                               : (device_copy){f->host + other, f->dev + at, bytes};
    }
}

/* What the destination must hold: the canary, and the pieces. */
static bool check(const field *f, const uint8_t *src, const uint8_t *base_dst, const uint8_t *base_src)
{
    memset(f->want, 0xA5, ROOM);
    for (size_t i = 0; i < f->n; i++)
        memcpy(f->want + ((uint8_t *)f->copies[i].dst - base_dst), src + ((const uint8_t *)f->copies[i].src - base_src),
               f->copies[i].bytes);
    for (uint64_t i = 0; i < ROOM; i++)
        if (f->want[i] != f->host[i])
            return GPU_FAIL("byte %" PRIu64 ": %02x, not %02x", i, f->host[i], f->want[i]);
    return true;
}

/* Random bytes in the source, canaries in the destination; copy; compare all of the destination. */
static bool there(field *f, device_how how, uint64_t seed)
{
    uint8_t *src = malloc(ROOM);
    rnd r = {seed};
    bool good = src != NULL;

    if (!good)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, src, ROOM);
    memset(f->host, 0xA5, ROOM);
    good = whole(f->load, f->dev, f->host);
    memcpy(f->host, src, ROOM);
    good = good && run(f->load, f->copies, f->n, how);
    memset(f->host, 0, ROOM);
    good = good && whole(f->store, f->host, f->dev) && check(f, src, f->dev, f->host);
    free(src);
    return good;
}

static bool back(field *f, device_how how, uint64_t seed)
{
    uint8_t *src = malloc(ROOM);
    rnd r = {seed};
    bool good = src != NULL;

    if (!good)
        return GPU_FAIL("no memory");
    rnd_bytes(&r, src, ROOM);
    memcpy(f->host, src, ROOM);
    good = whole(f->load, f->dev, f->host);
    memset(f->host, 0xA5, ROOM);
    good = good && run(f->store, f->copies, f->n, how) && check(f, src, f->host, f->dev);
    free(src);
    return good;
}

static bool both(device *d, const uint64_t *sizes, size_t n_sizes, size_t n, device_how how)
{
    static field f;
    bool good = field_open(&f, d);

    if (!good)
        return false;
    lay_out(&f, sizes, n_sizes, n, true);
    good = there(&f, how, 3);
    lay_out(&f, sizes, n_sizes, n, false);
    good = good && back(&f, how, 4);
    field_close(&f);
    return good;
}

static bool pages_by_kernel(device *d)
{
    static const uint64_t sizes[] = {73728, 18432, 4608, 294912};
    static const uint32_t blocks[] = {16, 32, 1, 8};

    for (size_t i = 0; i < (gpu_subset() ? 2 : 4); i++)
        if (!both(d, &sizes[i], 1, gpu_subset() ? 40 : 600, (device_how){DEVICE_BY_KERNEL, blocks[i]}))
            return GPU_FAIL("pieces of %" PRIu64 " bytes", sizes[i]);
    return true;
}

/* Around a lane's, a warp's and a piece's bounds, pieces without bytes among them, more pieces than one launch takes. */
static bool odd_pieces_by_kernel(device *d)
{
    static const uint64_t sizes[] = {16, 4096, 0, 4080, 4112, 32, 8192, 512, 0, 20480, 528};

    return both(d, sizes, sizeof sizes / sizeof sizes[0], gpu_subset() ? 300 : MAX_PIECES,
                (device_how){DEVICE_BY_KERNEL, 7});
}

static bool pieces_that_no_kernel_takes_go_by_engine(device *d)
{
    static const uint64_t sizes[] = {73728, 33, 4099};

    return both(d, sizes, 3, 60, (device_how){DEVICE_BY_KERNEL, 16});
}

static bool nothing_by_kernel(device *d)
{
    static const uint64_t none[] = {0};

    return both(d, none, 1, 5, (device_how){DEVICE_BY_KERNEL, 16}) &&
           both(d, none, 1, 0, (device_how){DEVICE_BY_KERNEL, 16});
}

/* Without a wait in between, by one means and the other. */
static bool many_batches_on_their_way(device *d)
{
    static const uint64_t size[] = {18432};
    static field f;
    uint8_t *src = malloc(ROOM);
    uint64_t mark = 0;
    kvs_err err = {.msg = ""};
    rnd r = {5};
    bool good = field_open(&f, d) && src != NULL;

    if (!good)
        return false;
    lay_out(&f, size, 1, MAX_PIECES, false);
    rnd_bytes(&r, src, ROOM);
    memcpy(f.host, src, ROOM);
    good = whole(f.load, f.dev, f.host);
    memset(f.host, 0xA5, ROOM);
    for (size_t i = 0; good && i < BATCHES; i++) {
        size_t from = f.n * i / BATCHES, to = f.n * (i + 1) / BATCHES;
        device_how how = {i % 5 == 4 ? DEVICE_BY_ENGINE : DEVICE_BY_KERNEL, 4};

        good = d->ops->copy(f.store, f.copies + from, to - from, how, &mark, &err) == KVS_OK || GPU_FAIL("%s", err.msg);
    }
    good = good && (d->ops->wait(f.store, mark, &err) == KVS_OK || GPU_FAIL("%s", err.msg));
    good = good && check(&f, src, f.host, f.dev);
    field_close(&f);
    free(src);
    return good;
}

/* A long batch, and a single piece right behind it: its mark is reached when both are there, whatever they went by. */
static bool a_mark_stands_for_all_before_it(device *d)
{
    static const uint64_t size[] = {18432};
    static const device_how ways[] = {{DEVICE_BY_KERNEL, 2}, {DEVICE_BY_KERNEL, 1}, {DEVICE_BY_ENGINE, 0}};
    static field f;
    uint8_t *src = malloc(ROOM);
    uint64_t mark = 0;
    kvs_err err = {.msg = ""};
    rnd r = {6};
    bool good = field_open(&f, d) && src != NULL;

    if (!good)
        return false;
    lay_out(&f, size, 1, gpu_subset() ? 300 : MAX_PIECES, false);
    rnd_bytes(&r, src, ROOM);
    memcpy(f.host, src, ROOM);
    good = whole(f.load, f.dev, f.host);
    for (int i = 0; i < 9 && good; i++) {
        memset(f.host, 0xA5, ROOM);
        good = d->ops->copy(f.store, f.copies, f.n - 1, ways[i / 3], &mark, &err) == KVS_OK &&
               d->ops->copy(f.store, f.copies + f.n - 1, 1, ways[i % 3], &mark, &err) == KVS_OK &&
               d->ops->wait(f.store, mark, &err) == KVS_OK;
        good = good ? check(&f, src, f.host, f.dev) || GPU_FAIL("way %d behind way %d", i % 3, i / 3)
                    : GPU_FAIL("%s", err.msg);
    }
    field_close(&f);
    free(src);
    return good;
}

static bool a_bad_number_of_blocks_is_refused(device *d)
{
    static field f;
    static const uint64_t size[] = {4096};
    uint64_t mark = 0;
    kvs_err err = {.msg = ""};
    bool good = field_open(&f, d);

    if (!good)
        return false;
    lay_out(&f, size, 1, 4, true);
    for (uint32_t n = 0; good && n <= 4096; n += 4096)
        good = d->ops->copy(f.load, f.copies, f.n, (device_how){DEVICE_BY_KERNEL, n}, &mark, &err) == KVS_E_INVALID ||
               GPU_FAIL("%" PRIu32 " thread blocks were taken", n);
    good = good && run(f.load, f.copies, f.n, (device_how){DEVICE_BY_KERNEL, 1});
    field_close(&f);
    return good;
}

static const gpu_test tests[] = {
    {"pages_by_kernel", pages_by_kernel},
    {"odd_pieces_by_kernel", odd_pieces_by_kernel},
    {"pieces_that_no_kernel_takes_go_by_engine", pieces_that_no_kernel_takes_go_by_engine},
    {"nothing_by_kernel", nothing_by_kernel},
    {"many_batches_on_their_way", many_batches_on_their_way},
    {"a_mark_stands_for_all_before_it", a_mark_stands_for_all_before_it},
    {"a_bad_number_of_blocks_is_refused", a_bad_number_of_blocks_is_refused},
};

int main(int argc, char **argv)
{
    return gpu_run(tests, sizeof tests / sizeof tests[0], argc, argv);
}
#else
static bool needs_cuda(device *d)
{
    (void)d;
    return false;
}

int main(int argc, char **argv)
{
    const gpu_test tests[] = {{"needs_cuda", needs_cuda}};

    return gpu_run(tests, 1, argc, argv);
}
#endif
