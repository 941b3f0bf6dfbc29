#include "daemon/persist.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/magic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#define ULL(n) ((unsigned long long)(n))

/* ---- where they come from ---- */

static kvs_status make_memfd(const char *name, int *ret, kvs_err *err)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

    if (fd < 0)
        return kvs_fail(err, KVS_E_SYS, "%s: memfd_create: %s", name, strerror(errno));
    *ret = fd;
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_SEAL) != 0) /* it may still grow */
        return kvs_fail(err, KVS_E_SYS, "%s: cannot seal it: %s", name, strerror(errno));
    return KVS_OK;
}

static bool is_on_tmpfs(int fd)
{
    struct statfs fs;

    return fstatfs(fd, &fs) == 0 && (unsigned long)fs.f_type == TMPFS_MAGIC;
}

/* A descriptor from the service manager's store is what we put there, or something that we do not touch. */
static bool is_our_memfd(int fd)
{
    struct stat st;
    int seals = fcntl(fd, F_GET_SEALS), mode = fcntl(fd, F_GETFL);

    return fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && is_on_tmpfs(fd) && (mode & O_ACCMODE) == O_RDWR &&
           seals >= 0 && (seals & F_SEAL_SHRINK) != 0 &&
           (seals & (F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)) == 0;
}

static int take_passed(persist *m, const char *name, int fd)
{
    if (fd < 0)
        return -1;
    if (is_our_memfd(fd))
        return fd;
    (void)snprintf(m->note, sizeof m->note, "%s: the descriptor handed over is no memfd of ours", name);
    (void)close(fd);
    return -1;
}

static kvs_status open_passed(persist *m, int arena_fd, int table_fd, kvs_err *err)
{
    kvs_status s = KVS_OK;

    m->arena_fd = take_passed(m, PERSIST_ARENA, arena_fd);
    m->table_fd = take_passed(m, PERSIST_TABLE, table_fd);
    m->survived = m->arena_fd >= 0 && m->table_fd >= 0;
    m->made[0] = m->arena_fd < 0;
    m->made[1] = m->table_fd < 0;
    if (m->made[0])
        s = make_memfd(PERSIST_ARENA, &m->arena_fd, err);
    if (s == KVS_OK && m->made[1])
        s = make_memfd(PERSIST_TABLE, &m->table_fd, err);
    return s;
}

/* ---- a folder ---- */

static kvs_status check_dir(int fd, const char *dir, kvs_err *err)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return kvs_fail(err, KVS_E_SYS, "pool.path: %.150s: %s", dir, strerror(errno));
    if (!is_on_tmpfs(fd))
        return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.150s is not on a tmpfs; the pool must be memory", dir);
    if (st.st_uid != geteuid() && st.st_uid != 0)
        return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.150s belongs to user %lu, not to %lu or root", dir,
                        (unsigned long)st.st_uid, (unsigned long)geteuid());
    if ((st.st_mode & 022) != 0 && (st.st_mode & S_ISVTX) == 0)
        return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.150s has mode %04o: others may replace files in it", dir,
                        (unsigned)(st.st_mode & 07777));
    return KVS_OK;
}

static kvs_status open_file(int dir_fd, const char *dir, const char *name, int *ret, bool *ret_existed, kvs_err *err)
{
    const int flags = O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK;
    struct stat st;
    int fd = openat(dir_fd, name, flags);

    *ret_existed = fd >= 0;
    if (fd < 0 && errno == ENOENT)
        fd = openat(dir_fd, name, flags | O_CREAT | O_EXCL, 0600);
    if (fd < 0 && errno == EACCES)
        return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.150s/%s: %s; user %lu must own the folder, and what is in it",
                        dir, name, strerror(errno), (unsigned long)geteuid());
    if (fd < 0)
        return kvs_fail(err, errno == ELOOP ? KVS_E_CONFIG : KVS_E_SYS, "pool.path: %.150s/%s: %s", dir, name,
                        strerror(errno));
    *ret = fd;
    if (fstat(fd, &st) != 0)
        return kvs_fail(err, KVS_E_SYS, "pool.path: %.150s/%s: %s", dir, name, strerror(errno));
    if (!S_ISREG(st.st_mode) || st.st_uid != geteuid() || (st.st_mode & 07177) != 0 || st.st_nlink != 1)
        return kvs_fail(
            err, KVS_E_CONFIG,
            "pool.path: %.100s/%s: a file of user %lu, mode 0600, one link is wanted; it has user %lu, mode "
            "%04o, %lu links",
            dir, name, (unsigned long)geteuid(), (unsigned long)st.st_uid, (unsigned)(st.st_mode & 07777),
            (unsigned long)st.st_nlink);
    if (!is_on_tmpfs(fd))
        return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.150s/%s is not on a tmpfs", dir, name);
    return KVS_OK;
}

/* The folder cannot be opened: why, and what helps. */
static kvs_status fail_dir(kvs_err *err, const char *dir)
{
    const unsigned long user = geteuid();
    int e = errno;

    if (e == ENOENT)
        return kvs_fail(err, KVS_E_CONFIG,
                        "pool.path: %.110s: %s; make it, on a tmpfs, with mode 0700, for user %lu to own", dir,
                        strerror(e), user);
    if (e == EACCES)
        return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.110s: %s; user %lu must own it, and may enter all above it",
                        dir, strerror(e), user);
    return kvs_fail(err, KVS_E_CONFIG, "pool.path: %.150s: %s", dir, strerror(e));
}

static kvs_status open_dir(persist *m, const char *dir, kvs_err *err)
{
    bool had_arena = false, had_table = false;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    kvs_status s;

    if (fd < 0)
        return fail_dir(err, dir);
    s = check_dir(fd, dir, err);
    if (s == KVS_OK)
        s = open_file(fd, dir, PERSIST_TABLE, &m->table_fd, &had_table, err);
    if (s == KVS_OK)
        s = open_file(fd, dir, PERSIST_ARENA, &m->arena_fd, &had_arena, err);
    (void)close(fd);
    m->survived = had_arena && had_table;
    m->bounded = true;
    return s;
}

/* ---- open and close ---- */

/* dir: "" for none. */
static kvs_status lock_table(const persist *m, const char *dir, kvs_err *err)
{
    struct flock l = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};

    if (fcntl(m->table_fd, F_SETLK, &l) == 0)
        return KVS_OK;
    if (errno != EACCES && errno != EAGAIN)
        return kvs_fail(err, KVS_E_SYS, PERSIST_TABLE ": cannot lock it: %s", strerror(errno));
    l.l_type = F_WRLCK;
    if (fcntl(m->table_fd, F_GETLK, &l) != 0 || l.l_type == F_UNLCK)
        l.l_pid = 0;
    if (dir[0] != '\0')
        return kvs_fail(err, KVS_E_BUSY,
                        "pool.path: %.110s/" PERSIST_TABLE
                        ": process %ld writes it; each daemon needs a folder of its own",
                        dir, (long)l.l_pid);
    return kvs_fail(err, KVS_E_BUSY, PERSIST_TABLE " (handed over): process %ld writes it", (long)l.l_pid);
}

kvs_status persist_open(persist *ret, const char *dir, int arena_fd, int table_fd, kvs_err *err)
{
    persist m = {.arena_fd = -1, .table_fd = -1};
    kvs_status s;

    if (dir[0] != '\0') {
        if (arena_fd >= 0 || table_fd >= 0)
            (void)snprintf(m.note, sizeof m.note, "memory handed over is given back: pool.path is set");
        if (arena_fd >= 0)
            (void)close(arena_fd);
        if (table_fd >= 0)
            (void)close(table_fd);
        s = open_dir(&m, dir, err);
    } else {
        s = open_passed(&m, arena_fd, table_fd, err);
    }
    if (s == KVS_OK)
        s = lock_table(&m, dir, err);
    if (s == KVS_OK)
        *ret = m;
    else
        persist_close(&m);
    return s;
}

void persist_close(persist *m)
{
    if (m->arena_fd >= 0)
        (void)close(m->arena_fd);
    if (m->table_fd >= 0)
        (void)close(m->table_fd);
    m->arena_fd = m->table_fd = -1;
}

/* ---- sizes ---- */

static uint64_t size_of(int fd)
{
    struct stat st;

    return fstat(fd, &st) == 0 && st.st_size > 0 ? (uint64_t)st.st_size : 0;
}

uint64_t persist_arena_bytes(const persist *m)
{
    return size_of(m->arena_fd);
}

uint64_t persist_table_bytes(const persist *m)
{
    return size_of(m->table_fd);
}

/* Give back all from `from` on; the size stays (a sealed memfd keeps it). */
static kvs_status drop_from(const char *name, int fd, uint64_t from, kvs_err *err)
{
    uint64_t size = size_of(fd);

    if (size <= from ||
        fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)from, (off_t)(size - from)) == 0)
        return KVS_OK;
    return kvs_fail(err, KVS_E_SYS, "%s: cannot give back %llu bytes: %s", name, ULL(size - from), strerror(errno));
}

static kvs_status grow_to(const char *name, int fd, uint64_t bytes, kvs_err *err)
{
    struct rlimit lim;

    if (size_of(fd) >= bytes || ftruncate(fd, (off_t)bytes) == 0)
        return KVS_OK;
    if (errno == EFBIG && getrlimit(RLIMIT_FSIZE, &lim) == 0 && lim.rlim_cur < bytes)
        return kvs_fail(
            err, KVS_E_SYS,
            "%s: cannot size it to %llu bytes: RLIMIT_FSIZE allows files of %llu; LimitFSIZE=infinity in the "
            "unit, or ulimit -f unlimited",
            name, ULL(bytes), ULL(lim.rlim_cur));
    return kvs_fail(err, KVS_E_SYS, "%s: cannot size it to %llu bytes: %s", name, ULL(bytes), strerror(errno));
}

kvs_status persist_fit(persist *m, uint64_t arena_bytes, uint64_t table_bytes, bool keep, kvs_err *err)
{
    kvs_status s = KVS_OK;

    if (!keep)
        s = drop_from(PERSIST_TABLE, m->table_fd, 0, err);
    if (s == KVS_OK)
        s = drop_from(PERSIST_ARENA, m->arena_fd, arena_bytes, err);
    if (s == KVS_OK)
        s = grow_to(PERSIST_ARENA, m->arena_fd, arena_bytes, err);
    if (s == KVS_OK)
        s = grow_to(PERSIST_TABLE, m->table_fd, table_bytes, err);
    return s;
}

kvs_status persist_reserve(const persist *m, uint64_t offset, uint64_t bytes, kvs_err *err)
{
    if (!m->bounded || fallocate(m->table_fd, 0, (off_t)offset, (off_t)bytes) == 0)
        return KVS_OK;
    return kvs_fail(err, errno == ENOSPC ? KVS_E_NO_SPACE : KVS_E_SYS, PERSIST_TABLE ": %llu more bytes: %s",
                    ULL(bytes), strerror(errno));
}

kvs_status persist_room(const persist *m, uint64_t bytes, kvs_err *err)
{
    struct statfs fs;
    uint64_t left;

    if (m == NULL || !m->bounded || fstatfs(m->arena_fd, &fs) != 0 || fs.f_blocks == 0) /* no blocks: no limit */
        return KVS_OK;
    left = (uint64_t)fs.f_bavail * (uint64_t)fs.f_bsize;
    if (left >= bytes)
        return KVS_OK;
    return kvs_fail(err, KVS_E_NO_SPACE,
                    "pool.path: %llu bytes do not fit its tmpfs of %llu, of which %llu are left; mount it with a size "
                    "above pool.max_bytes",
                    ULL(bytes), ULL((uint64_t)fs.f_blocks * (uint64_t)fs.f_bsize), ULL(left));
}
