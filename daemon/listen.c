#include "daemon/listen.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

enum { BACKLOG = 512, LOCK_TRIES = 16 };

static kvs_status fail_sys(kvs_err *err, const char *what, const char *path)
{
    int e = errno;

    return kvs_fail(err, KVS_E_SYS, "%s %s: %s", what, path, strerror(e));
}

/* The folder that the service's tmpfiles.d makes, and no other. */
static bool is_in_service_folder(const char *path)
{
    static const char FOLDER[] = "/run/kvstrided/";

    return strncmp(path, FOLDER, sizeof FOLDER - 1) == 0 && strchr(path + sizeof FOLDER - 1, '/') == NULL;
}

/* What is wrong with the folder of `path`, by errno, and what helps.  Short: with the key of a tenant in front, and the
 * longest path, it still fits a message. */
static kvs_status fail_folder(kvs_err *err, const char *path)
{
    int e = errno;

    if (e == ENOENT && is_in_service_folder(path))
        return kvs_fail(err, KVS_E_SYS, "folder of socket %s: %s; systemd-tmpfiles --create makes it", path,
                        strerror(e));
    if (e == ENOENT)
        return kvs_fail(err, KVS_E_SYS, "folder of socket %s: %s; make it, and let user %u make files in it", path,
                        strerror(e), (unsigned)geteuid());
    if (e == EACCES || e == EPERM || e == EROFS)
        return kvs_fail(err, KVS_E_SYS, "folder of socket %s: %s; user %u must be able to make files in it", path,
                        strerror(e), (unsigned)geteuid());
    errno = e;
    return fail_sys(err, "folder of socket", path);
}

/* May we make files where `path` is?  False: errno says why. */
static bool folder_is_open(const char *path)
{
    const char *slash = strrchr(path, '/');
    char folder[LISTEN_PATH_MAX + 3];

    (void)snprintf(folder, sizeof folder, "%.*s.", slash != NULL ? (int)(slash + 1 - path) : 0, path);
    return faccessat(AT_FDCWD, folder, W_OK | X_OK, AT_EACCESS) == 0;
}

static kvs_status check_path(const char *path, kvs_err *err)
{
    size_t len = strlen(path);

    if (len == 0 || path[0] == '@')
        return kvs_fail(err, KVS_E_INVALID, "socket path \"%s\": %s", path,
                        len == 0 ? "is empty" : "abstract names are not supported: no file mode protects them");
    if (len > LISTEN_PATH_MAX)
        return kvs_fail(err, KVS_E_LIMIT, "socket path of %zu bytes: at most %d (%.80s...)", len, LISTEN_PATH_MAX,
                        path);
    return KVS_OK;
}

static void lock_path(const listen_socket *l, char *buf, size_t cap)
{
    (void)snprintf(buf, cap, "%s.lock", l->path);
}

/* The file may have been removed by its last owner between open and lock: then ours guards nothing. */
static bool is_named(int fd, const char *path)
{
    struct stat by_fd, by_name;

    return fstat(fd, &by_fd) == 0 && lstat(path, &by_name) == 0 && by_fd.st_dev == by_name.st_dev &&
           by_fd.st_ino == by_name.st_ino;
}

static kvs_status take_lock(listen_socket *l, kvs_err *err)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};
    char path[LISTEN_PATH_MAX + 8];

    lock_path(l, path, sizeof path);
    for (int i = 0; i < LOCK_TRIES; i++) {
        int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);

        if (fd < 0) {
            int e = errno;

            if (!folder_is_open(l->path))
                return fail_folder(err, l->path);
            errno = e;
            return fail_sys(err, "lock file", path);
        }
        if (fcntl(fd, F_OFD_SETLK, &whole) != 0) {
            int e = errno;

            (void)close(fd);
            if (e == EAGAIN || e == EACCES)
                return kvs_fail(err, KVS_E_BUSY, "socket %s: another daemon is running there", l->path);
            errno = e;
            return fail_sys(err, "lock", path);
        }
        if (is_named(fd, path)) {
            l->lock_fd = fd;
            return KVS_OK;
        }
        (void)close(fd);
    }
    return kvs_fail(err, KVS_E_BUSY, "lock file %s: other daemons keep coming and going", path);
}

/* 0: nobody listens there.  EAGAIN: somebody does, with a full backlog. */
static int probe(const struct sockaddr_un *a)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    int e = 0;

    if (fd < 0)
        return errno;
    if (connect(fd, (const struct sockaddr *)a, sizeof *a) == 0)
        e = EISCONN;
    else if (errno != ECONNREFUSED && errno != ENOENT)
        e = errno;
    (void)close(fd);
    return e;
}

/* Nothing, or a socket file that a killed daemon left: *ret_stale. */
static kvs_status look_there(const struct sockaddr_un *a, bool *ret_stale, kvs_err *err)
{
    const char *path = a->sun_path;
    struct stat st;
    int e;

    *ret_stale = false;
    if (lstat(path, &st) != 0)
        return errno == ENOENT ? KVS_OK : fail_sys(err, "socket", path);
    if (!S_ISSOCK(st.st_mode))
        return kvs_fail(err, KVS_E_EXISTS, "socket %s: the path exists and is no socket; it was left alone", path);
    e = probe(a);
    if (e == EISCONN || e == EAGAIN || e == EPROTOTYPE)
        return kvs_fail(err, KVS_E_BUSY, "socket %s: another program is listening there%s", path,
                        e == EAGAIN ? ", backlog full" : "");
    if (e != 0)
        return kvs_fail(err, KVS_E_SYS, "socket %s: cannot tell whether a daemon is there: %s", path, strerror(e));
    *ret_stale = true;
    return KVS_OK;
}

/* We hold the lock: no daemon of our kind is starting meanwhile. */
static kvs_status clear_stale(const struct sockaddr_un *a, kvs_err *err)
{
    bool stale;
    kvs_status s = look_there(a, &stale, err);

    if (s == KVS_OK && stale && unlink(a->sun_path) != 0 && errno != ENOENT)
        return fail_sys(err, "stale socket", a->sun_path);
    return s;
}

/* The file that we bound: whose it is, and the mode that was asked for.  By a descriptor, for the name may be another's by
 * now.  It is only ever widened, to `mode`: nobody can have come in by a wider one. */
static kvs_status set_mode(listen_socket *l, mode_t mode, kvs_err *err)
{
    char name[sizeof "/proc/self/fd/" + 10];
    int fd = open(l->path, O_PATH | O_NOFOLLOW | O_CLOEXEC);
    struct stat st;
    kvs_status s = KVS_OK;

    if (fd < 0 || fstat(fd, &st) != 0) {
        s = fail_sys(err, "socket", l->path);
    } else {
        l->dev = st.st_dev;
        l->ino = st.st_ino;
        (void)snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
        if ((st.st_mode & 0777 & ~mode) != 0)
            s = kvs_fail(err, KVS_E_SYS, "socket %s: created with mode %04o, wider than %04o", l->path,
                         (unsigned)(st.st_mode & 0777), (unsigned)mode);
        else if ((st.st_mode & 0777) != mode && chmod(name, mode) != 0)
            s = fail_sys(err, "mode of socket", l->path);
    }
    if (fd >= 0)
        (void)close(fd);
    return s;
}

/* The socket's own mode is that of its file, less the umask.  The umask itself is left alone: it is every thread's. */
static kvs_status bind_with_mode(listen_socket *l, const struct sockaddr_un *a, mode_t mode, kvs_err *err)
{
    if (fchmod(l->fd, mode) != 0)
        return fail_sys(err, "mode of socket", l->path);
    if (bind(l->fd, (const struct sockaddr *)a, sizeof *a) != 0)
        return errno == EADDRINUSE ? kvs_fail(err, KVS_E_BUSY, "socket %s: address in use", l->path)
                                   : fail_sys(err, "bind socket", l->path);
    return set_mode(l, mode, err);
}

static kvs_status fill_address(const char *path, struct sockaddr_un *ret, kvs_err *err)
{
    kvs_status s = check_path(path, err);

    *ret = (struct sockaddr_un){.sun_family = AF_UNIX};
    if (s == KVS_OK)
        memcpy(ret->sun_path, path, strlen(path) + 1);
    return s;
}

kvs_status listen_check(const char *path, kvs_err *err)
{
    struct sockaddr_un a;
    bool stale;
    kvs_status s = fill_address(path, &a, err);

    if (s != KVS_OK)
        return s;
    if (!folder_is_open(path))
        return fail_folder(err, path);
    return look_there(&a, &stale, err);
}

kvs_status listen_open(listen_socket *ret, const char *path, mode_t mode, kvs_err *err)
{
    listen_socket l = {.fd = -1, .lock_fd = -1};
    struct sockaddr_un a;
    kvs_status s = fill_address(path, &a, err);

    if (s != KVS_OK)
        return s;
    (void)snprintf(l.path, sizeof l.path, "%s", path);
    s = take_lock(&l, err);
    if (s != KVS_OK)
        return s;
    s = clear_stale(&a, err);
    if (s != KVS_OK)
        goto fail;
    l.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (l.fd < 0) {
        s = fail_sys(err, "socket", l.path);
        goto fail;
    }
    s = bind_with_mode(&l, &a, mode, err);
    if (s != KVS_OK)
        goto fail;
    if (listen(l.fd, BACKLOG) != 0) {
        s = fail_sys(err, "listen on", l.path);
        goto fail;
    }
    *ret = l;
    return KVS_OK;
fail:
    listen_close(&l);
    return s;
}

void listen_inherit(listen_socket *ret, int fd)
{
    int flags = fcntl(fd, F_GETFL);

    *ret = (listen_socket){.fd = fd, .lock_fd = -1, .inherited = true};
    if (flags >= 0)
        (void)fcntl(fd, F_SETFL, flags | O_NONBLOCK);
}

void listen_stop(listen_socket *l)
{
    struct stat st;

    if (l->fd < 0)
        return;
    /* The file goes before the socket: the other order leaves a moment in which it looks stale. */
    if (!l->inherited && l->ino != 0 && lstat(l->path, &st) == 0 && st.st_dev == l->dev && st.st_ino == l->ino)
        (void)unlink(l->path);
    (void)close(l->fd);
    l->fd = -1;
}

void listen_close(listen_socket *l)
{
    char path[LISTEN_PATH_MAX + 8];

    listen_stop(l);
    if (l->lock_fd < 0)
        return;
    lock_path(l, path, sizeof path);
    if (is_named(l->lock_fd, path))
        (void)unlink(path); /* while it is locked: see is_named above */
    (void)close(l->lock_fd);
    l->lock_fd = -1;
}
