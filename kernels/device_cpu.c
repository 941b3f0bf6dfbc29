/* The cpu device: memory is memfds, a queue runs its work at once, a mark is a number.
 *
 * Callers may not build on the "at once": results are valid behind wait(), as on any device. */
#include "kernels/device.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <linux/magic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "kernels/copy.h"
#include "kernels/host_memory.h"
#include "kernels/host_pages.h"
#include "proto/wire.h"

enum {
    MAX_PIECES = 1024,
    MAX_WORKSPACE = 64 << 20, /* far above what any shape needs */
};

typedef struct cpu_device {
    device base;
    uint64_t page;
} cpu_device;

typedef struct cpu_piece {
    uint8_t *base;
    uint64_t bytes;
    int fd;
} cpu_piece;

typedef struct cpu_mem {
    device_mem base;
    uint32_t n_pieces;
    cpu_piece pieces[];
} cpu_mem;

typedef struct cpu_queue {
    device_queue base;
    uint64_t mark; /* the last one given out; all of them are reached */
    void *workspace;
    uint64_t workspace_bytes;
} cpu_queue;

static kvs_status sys_fail(kvs_err *err, const char *call, uint64_t bytes)
{
    int e = errno;
    kvs_status s = e == ENOSPC || e == ENOMEM || e == EFAULT ? KVS_E_NO_SPACE : KVS_E_SYS;

    return kvs_fail(err, s, "%s: %" PRIu64 " bytes: %s", call, bytes, strerror(e));
}

/* --- host memory ------------------------------------------------------------------------------------------ */

static kvs_status cpu_host_register(device *d, void *p, uint64_t bytes, kvs_err *err)
{
    (void)d;
    return kvs_pages_make(p, bytes, err);
}

static void cpu_host_unregister(device *d, void *p, uint64_t bytes)
{
    (void)d;
    (void)p;
    (void)bytes;
}

/* --- device memory
 * ---------------------------------------------------------------------------------------------- */

static cpu_mem *mem_alloc(device *d, uint32_t n_pieces)
{
    cpu_mem *m = malloc(sizeof *m + n_pieces * sizeof m->pieces[0]);

    if (m == NULL)
        return NULL;
    m->base.dev = d;
    m->n_pieces = n_pieces;
    for (uint32_t i = 0; i < n_pieces; i++)
        m->pieces[i] = (cpu_piece){.fd = -1};
    return m;
}

static void cpu_mem_close(device_mem *dm)
{
    cpu_mem *m = (cpu_mem *)dm;

    if (m == NULL)
        return;
    for (uint32_t i = 0; i < m->n_pieces; i++) {
        if (m->pieces[i].base != NULL)
            (void)munmap(m->pieces[i].base, m->pieces[i].bytes);
        if (m->pieces[i].fd >= 0)
            (void)close(m->pieces[i].fd);
    }
    free(m);
}

/* A core file would hold users' KV: the mapping stays out of it. */
static kvs_status piece_map(cpu_piece *p, kvs_err *err)
{
    void *at = mmap(NULL, p->bytes, PROT_READ | PROT_WRITE, MAP_SHARED, p->fd, 0);

    if (at == MAP_FAILED)
        return sys_fail(err, "mmap", p->bytes);
    p->base = at;
    if (madvise(at, p->bytes, MADV_DONTDUMP) != 0)
        return sys_fail(err, "madvise", p->bytes);
    return KVS_OK;
}

static kvs_status piece_create(cpu_piece *p, uint64_t bytes, kvs_err *err)
{
    kvs_status s = kvs_host_want("mem_create", bytes, err);

    if (s != KVS_OK)
        return s;
    p->fd = memfd_create("kvstride-region", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (p->fd < 0)
        return sys_fail(err, "memfd_create", bytes);
    p->bytes = bytes;
    while (fallocate(p->fd, 0, 0, (off_t)bytes) != 0)
        if (errno != EINTR)
            return sys_fail(err, "fallocate", bytes);
    if (fcntl(p->fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
        return sys_fail(err, "F_ADD_SEALS", bytes);
    return piece_map(p, err);
}

static kvs_status cpu_mem_create(device *d, uint64_t bytes, device_mem **ret, kvs_err *err)
{
    const uint64_t page = ((cpu_device *)d)->page;
    cpu_mem *m;
    kvs_status s;

    if (bytes == 0 || bytes > (uint64_t)INT64_MAX - page)
        return kvs_fail(err, KVS_E_INVALID, "mem_create: %" PRIu64 " bytes is outside 1..%" PRIu64, bytes,
                        (uint64_t)INT64_MAX - page);
    m = mem_alloc(d, 1);
    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "mem_create: no memory for a piece");
    s = piece_create(&m->pieces[0], (bytes + page - 1) / page * page, err);
    if (s != KVS_OK) {
        cpu_mem_close(&m->base);
        return s;
    }
    *ret = &m->base;
    return KVS_OK;
}

/* What a client's descriptor must be, so that no access to the mapping can ever raise SIGBUS: a tmpfs file
 * that cannot shrink, with all its pages allocated.  `i` is its place in the request. */
static kvs_status import_check_seals(int seals, int mode, uint32_t i, kvs_err *err)
{
    if ((mode & O_ACCMODE) != O_RDWR || (mode & O_PATH) != 0)
        return kvs_fail(err, KVS_E_INVALID, "descriptor %" PRIu32 ": open mode %#x is not read-write", i,
                        (unsigned)mode);
    if ((seals & F_SEAL_SHRINK) == 0)
        return kvs_fail(err, KVS_E_INVALID, "descriptor %" PRIu32 ": seals %#x lack F_SEAL_SHRINK (%#x)", i,
                        (unsigned)seals, (unsigned)F_SEAL_SHRINK);
    if ((seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) != 0)
        return kvs_fail(err, KVS_E_INVALID, "descriptor %" PRIu32 ": seals %#x forbid writing", i, (unsigned)seals);
    return KVS_OK;
}

/* Only the kernel's own memory files have seals.  Nothing else is asked for more: a file of a FUSE folder answers fstat, and
 * even close, when its server likes. */
static kvs_status import_look(int fd, uint32_t i, struct stat *ret, kvs_err *err)
{
    int mode = fcntl(fd, F_GETFL), seals = fcntl(fd, F_GET_SEALS);
    struct statfs fs;

    if (mode < 0)
        return kvs_fail(err, KVS_E_SYS, "descriptor %" PRIu32 ": F_GETFL: %s", i, strerror(errno));
    if (seals < 0 && (mode & O_PATH) == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED,
                        "descriptor %" PRIu32 ": is not a memfd of normal pages: it has no seals", i);
    if (seals < 0)
        return import_check_seals(0, mode, i, err);
    /* After the seal was seen: from here on the size can only grow. */
    if (fstat(fd, ret) != 0 || fstatfs(fd, &fs) != 0)
        return kvs_fail(err, KVS_E_SYS, "descriptor %" PRIu32 ": fstat: %s", i, strerror(errno));
    if (!S_ISREG(ret->st_mode) || fs.f_type != TMPFS_MAGIC)
        return kvs_fail(err, KVS_E_UNSUPPORTED,
                        "descriptor %" PRIu32 ": mode %#o on file system %#lx is not a memfd of normal pages "
                        "(regular file, %#lx)",
                        i, (unsigned)ret->st_mode, (unsigned long)fs.f_type, (unsigned long)TMPFS_MAGIC);
    return import_check_seals(seals, mode, i, err);
}

/* Any size will do; a page's rest reads as zero. */
static kvs_status import_check(int fd, uint32_t i, uint64_t *ret_bytes, kvs_err *err)
{
    struct stat st;
    kvs_status s = import_look(fd, i, &st, err);

    if (s != KVS_OK)
        return s;
    if (st.st_size <= 0)
        return kvs_fail(err, KVS_E_INVALID, "descriptor %" PRIu32 ": size %" PRId64 " is not above 0", i,
                        (int64_t)st.st_size);
    if ((uint64_t)st.st_blocks * 512 < (uint64_t)st.st_size)
        return kvs_fail(err, KVS_E_INVALID,
                        "descriptor %" PRIu32 ": %" PRIu64 " of %" PRIu64 " bytes are allocated; fallocate it whole", i,
                        (uint64_t)st.st_blocks * 512, (uint64_t)st.st_size);
    *ret_bytes = (uint64_t)st.st_size;
    return KVS_OK;
}

static kvs_status piece_import(cpu_piece *p, int fd, uint32_t i, uint64_t room, kvs_err *err)
{
    uint64_t bytes = 0;
    kvs_status s = import_check(fd, i, &bytes, err);

    if (s != KVS_OK)
        return s;
    if (bytes > room)
        return kvs_fail(err, KVS_E_LIMIT, "descriptor %" PRIu32 ": %" PRIu64 " bytes, %" PRIu64 " are left", i, bytes,
                        room);
    p->bytes = bytes;
    p->fd = fcntl(fd, F_DUPFD_CLOEXEC, 3);
    if (p->fd < 0)
        return kvs_fail(err, KVS_E_SYS, "descriptor %" PRIu32 ": F_DUPFD_CLOEXEC: %s", i, strerror(errno));
    return piece_map(p, err);
}

static kvs_status cpu_mem_import(device *d, const device_import *in, device_mem **ret, kvs_err *err)
{
    uint64_t room = in->max_bytes;
    kvs_status s = KVS_OK;
    cpu_mem *m;

    if (in->memory != WIRE_MEMORY_MEMFD)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "memory: kind %" PRIu32 ", the cpu device takes %d (memfd)", in->memory,
                        (int)WIRE_MEMORY_MEMFD);
    if (in->n_fds < 1 || in->n_fds > MAX_PIECES)
        return kvs_fail(err, KVS_E_INVALID, "n_fds: %" PRIu32 " is outside 1..%d", in->n_fds, (int)MAX_PIECES);
    m = mem_alloc(d, in->n_fds);
    if (m == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "mem_import: no memory for %" PRIu32 " pieces", in->n_fds);
    for (uint32_t i = 0; i < in->n_fds && s == KVS_OK; i++) {
        s = piece_import(&m->pieces[i], in->fds[i], i, room, err);
        room -= s == KVS_OK ? m->pieces[i].bytes : 0;
    }
    if (s != KVS_OK) {
        cpu_mem_close(&m->base);
        return s;
    }
    *ret = &m->base;
    return KVS_OK;
}

static uint32_t cpu_mem_pieces(const device_mem *m)
{
    return ((const cpu_mem *)m)->n_pieces;
}

static uint8_t *cpu_mem_base(const device_mem *dm, uint32_t piece, uint64_t *ret_bytes)
{
    const cpu_mem *m = (const cpu_mem *)dm;

    if (piece >= m->n_pieces)
        return NULL;
    *ret_bytes = m->pieces[piece].bytes;
    return m->pieces[piece].base;
}

static int cpu_mem_fd(const device_mem *dm, uint32_t piece)
{
    const cpu_mem *m = (const cpu_mem *)dm;

    return piece < m->n_pieces ? m->pieces[piece].fd : -1;
}

/* One memory for all. */
static bool cpu_reaches(device *d, device *other)
{
    return other->ops == d->ops;
}

static bool cpu_mem_reached(const device_mem *m, const device_mem *to)
{
    return to->dev->ops == m->dev->ops;
}

/* --- queues
 * ----------------------------------------------------------------------------------------------------- */

static kvs_status cpu_queue_open(device *d, device_dir dir, device_queue **ret, kvs_err *err)
{
    cpu_queue *q = calloc(1, sizeof *q);

    (void)dir; /* one memory: both directions are the same copy */
    if (q == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "queue_open: no memory for %zu bytes", sizeof *q);
    q->base.dev = d;
    *ret = &q->base;
    return KVS_OK;
}

static void cpu_queue_close(device_queue *dq)
{
    cpu_queue *q = (cpu_queue *)dq;

    if (q == NULL)
        return;
    free(q->workspace);
    free(q);
}

static kvs_status cpu_copy(device_queue *dq, const device_copy *c, size_t n, device_how how, uint64_t *ret_mark,
                           kvs_err *err)
{
    cpu_queue *q = (cpu_queue *)dq;

    (void)how;
    (void)err;
    for (size_t i = 0; i < n; i++)
        if (c[i].bytes > 0)
            kvs_copy(c[i].dst, c[i].src, c[i].bytes);
    *ret_mark = ++q->mark;
    return KVS_OK;
}

static kvs_status cpu_mla_write(device_queue *dq, const kvs_mla_write_args *a, uint32_t *ret_bad, uint64_t *ret_mark,
                                kvs_err *err)
{
    kvs_status s = kvs_mla_write(a, ret_bad, err);

    if (s == KVS_OK)
        *ret_mark = ++((cpu_queue *)dq)->mark;
    return s;
}

static kvs_status workspace_take(cpu_queue *q, uint64_t bytes, kvs_err *err)
{
    void *p;

    if (bytes <= q->workspace_bytes)
        return KVS_OK;
    if (bytes > MAX_WORKSPACE)
        return kvs_fail(err, KVS_E_LIMIT, "workspace: %" PRIu64 " bytes are more than %d", bytes, (int)MAX_WORKSPACE);
    p = malloc(bytes);
    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "workspace: no memory for %" PRIu64 " bytes", bytes);
    free(q->workspace);
    q->workspace = p;
    q->workspace_bytes = bytes;
    return KVS_OK;
}

static kvs_status cpu_mla_decode(device_queue *dq, const kvs_mla_decode_args *a, kvs_mla_decode_result *ret,
                                 uint64_t *ret_mark, kvs_err *err)
{
    cpu_queue *q = (cpu_queue *)dq;
    kvs_status s = workspace_take(q, kvs_mla_decode_workspace(a), err);

    if (s == KVS_OK)
        s = kvs_mla_decode(a, q->workspace, q->workspace_bytes, ret, err);
    if (s == KVS_OK)
        *ret_mark = ++q->mark;
    return s;
}

static kvs_status cpu_mla_extend(device_queue *dq, const kvs_mla_extend_args *a, kvs_mla_decode_result *ret,
                                 uint64_t *ret_mark, kvs_err *err)
{
    cpu_queue *q = (cpu_queue *)dq;
    kvs_status s = workspace_take(q, kvs_mla_extend_workspace(a), err);

    if (s == KVS_OK)
        s = kvs_mla_extend(a, q->workspace, q->workspace_bytes, ret, err);
    if (s == KVS_OK)
        *ret_mark = ++q->mark;
    return s;
}

static kvs_status cpu_wait(device_queue *dq, uint64_t mark, kvs_err *err)
{
    const cpu_queue *q = (const cpu_queue *)dq;

    if (mark > q->mark)
        return kvs_fail(err, KVS_E_INVALID, "mark: %" PRIu64 " was not given out, the last was %" PRIu64, mark,
                        q->mark);
    return KVS_OK;
}

/* --- the device
 * ------------------------------------------------------------------------------------------------- */

static void cpu_close(device *d)
{
    free(d);
}

static const device_ops cpu_ops = {
    .name = "cpu",
    .close = cpu_close,
    .host_register = cpu_host_register,
    .host_unregister = cpu_host_unregister,
    .mem_create = cpu_mem_create,
    .mem_import = cpu_mem_import,
    .mem_close = cpu_mem_close,
    .mem_pieces = cpu_mem_pieces,
    .mem_base = cpu_mem_base,
    .mem_fd = cpu_mem_fd,
    .reaches = cpu_reaches,
    .mem_reached = cpu_mem_reached,
    .queue_open = cpu_queue_open,
    .queue_close = cpu_queue_close,
    .copy = cpu_copy,
    .mla_write = cpu_mla_write,
    .mla_decode = cpu_mla_decode,
    .mla_extend = cpu_mla_extend,
    .wait = cpu_wait,
};

kvs_status device_cpu_open(device **ret, kvs_err *err)
{
    cpu_device *d = malloc(sizeof *d);

    if (d == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "cpu device: no memory for %zu bytes", sizeof *d);
    d->base.ops = &cpu_ops;
    d->page = (uint64_t)sysconf(_SC_PAGESIZE);
    *ret = &d->base;
    return KVS_OK;
}
