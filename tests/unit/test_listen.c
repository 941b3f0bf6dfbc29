#include "daemon/listen.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static char dir[64], path[80];

static void make_dir(void)
{
    (void)snprintf(dir, sizeof dir, "/tmp/kvs-listen-XXXXXX");
    cr_assert_not_null(mkdtemp(dir));
    (void)snprintf(path, sizeof path, "%s/s.sock", dir);
}

/* Also proves that nothing is left in it. */
static void remove_dir(void)
{
    cr_assert_eq(rmdir(dir), 0, "files are left in %s", dir);
}

TestSuite(listen, .init = make_dir, .fini = remove_dir);

static bool exists(const char *suffix)
{
    char name[sizeof path + 8];
    struct stat st;

    (void)snprintf(name, sizeof name, "%s%s", path, suffix);
    return lstat(name, &st) == 0;
}

static int bound_socket(int backlog)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    cr_assert_eq(bind(fd, (const struct sockaddr *)&a, sizeof a), 0);
    if (backlog >= 0)
        cr_assert_eq(listen(fd, backlog), 0);
    return fd;
}

static int try_connect(void)
{
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

    (void)snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    if (connect(fd, (const struct sockaddr *)&a, sizeof a) == 0)
        return fd;
    (void)close(fd);
    return -1;
}

Test(listen, makes_the_socket_with_exactly_its_mode_whatever_the_umask)
{
    static const mode_t MODES[] = {0600, 0660, 0666};
    struct stat st;

    for (size_t i = 0; i < 2 * sizeof MODES / sizeof MODES[0]; i++) {
        mode_t mask = i % 2 == 0 ? 0 : 0177;
        listen_socket l;

        (void)umask(mask);
        cr_assert_eq(listen_open(&l, path, MODES[i / 2], NULL), KVS_OK);
        cr_assert_eq(lstat(path, &st), 0);
        cr_assert_eq(st.st_mode & 07777, MODES[i / 2]);
        cr_assert_eq(umask(mask), mask, "it is every thread's");
        listen_close(&l);
    }
}

Test(listen, says_beforehand_whether_it_would_work_and_changes_nothing)
{
    kvs_err err = {0};
    listen_socket l;
    int fd;

    cr_assert_eq(listen_check(path, &err), KVS_OK, "%s", err.msg);
    cr_assert(!exists("") && !exists(".lock"));
    cr_assert_eq(listen_open(&l, path, 0600, NULL), KVS_OK);
    cr_assert_eq(listen_check(path, &err), KVS_E_BUSY);
    (void)close(l.fd); /* as a kill would leave it */
    l.fd = -1;
    cr_assert_eq(listen_check(path, &err), KVS_OK);
    cr_assert(exists(""), "a stale one stays until the real start");
    cr_assert_eq(unlink(path), 0);
    listen_close(&l);
    fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    (void)close(fd);
    cr_assert_eq(listen_check(path, &err), KVS_E_EXISTS);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(listen_check("/nonexistent-folder/x.sock", &err), KVS_E_SYS);
    cr_assert_not_null(strstr(err.msg, "folder of socket /nonexistent-folder/x.sock: No such file"), "%s", err.msg);
    cr_assert_eq(listen_check("@kvstride", &err), KVS_E_INVALID);
}

Test(listen, says_what_is_wrong_with_the_folder_and_who_must_be_let_in)
{
    kvs_err err = {0};
    listen_socket l;
    char inside[128];
    int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);

    (void)close(fd);
    (void)snprintf(inside, sizeof inside, "%s/x.sock", path);
    cr_assert_eq(listen_open(&l, inside, 0600, &err), KVS_E_SYS);
    cr_assert_not_null(strstr(err.msg, "x.sock: Not a directory"), "%s", err.msg);
    cr_assert_eq(strncmp(err.msg, "folder of socket ", 17), 0, "%s", err.msg);
    cr_assert_eq(unlink(path), 0);
    cr_assert_eq(listen_open(&l, "/nonexistent-folder/x.sock", 0600, &err), KVS_E_SYS);
    (void)snprintf(inside, sizeof inside,
                   "x.sock: No such file or directory; make it, and let user %u make files in it", (unsigned)geteuid());
    cr_assert_not_null(strstr(err.msg, inside), "%s", err.msg);
    cr_assert_null(strstr(err.msg, "tmpfiles"), "it does not make this one");
    cr_assert_eq(chmod(dir, 0500), 0);
    if (getuid() == 0)
        cr_assert_eq(seteuid(65534), 0);
    cr_assert_eq(listen_open(&l, path, 0600, &err), KVS_E_SYS);
    (void)snprintf(inside, sizeof inside, "Permission denied; user %u must be able", (unsigned)geteuid());
    if (getuid() == 0)
        cr_assert_eq(seteuid(0), 0);
    cr_assert_not_null(strstr(err.msg, inside), "%s", err.msg);
}

Test(listen, names_what_makes_the_folder_of_the_service_and_of_no_other)
{
    kvs_err err = {0};

    cr_assert_eq(listen_check("/run/kvstrided/no-folder/x.sock", &err), KVS_E_SYS);
    cr_assert_null(strstr(err.msg, "tmpfiles"), "%s", err.msg);
    cr_assert_eq(listen_check("/run/kvstrided-no-folder/x.sock", &err), KVS_E_SYS);
    cr_assert_null(strstr(err.msg, "tmpfiles"), "%s", err.msg);
    if (access("/run/kvstrided", F_OK) == 0)
        cr_skip_test("the service is installed here");
    cr_assert_eq(listen_check("/run/kvstrided/x.sock", &err), KVS_E_SYS);
    cr_assert_str_eq(err.msg, "folder of socket /run/kvstrided/x.sock: No such file or directory; "
                              "systemd-tmpfiles --create makes it");
}

Test(listen, removes_socket_and_lock_when_it_closes_and_only_once)
{
    listen_socket l;

    cr_assert_eq(listen_open(&l, path, 0600, NULL), KVS_OK);
    cr_assert(exists("") && exists(".lock"));
    listen_stop(&l);
    cr_assert(!exists("") && exists(".lock"));
    listen_close(&l);
    listen_close(&l);
    cr_assert(!exists("") && !exists(".lock"));
}

Test(listen, accepts_a_path_of_107_bytes_and_refuses_one_of_108)
{
    char name[4097];
    listen_socket l;
    kvs_err err;

    memset(name, 'x', sizeof name);
    memcpy(name, path, strlen(dir) + 1);
    for (size_t len = 108; len < sizeof name; len = len == 108 ? 1000 : len == 1000 ? 4096 : sizeof name) {
        name[len] = '\0';
        cr_assert_eq(listen_open(&l, name, 0600, &err), KVS_E_LIMIT);
        cr_assert_not_null(strstr(err.msg, "107"), "%s", err.msg);
        name[len] = 'x';
    }
    name[107] = '\0';
    cr_assert_eq(listen_open(&l, name, 0600, &err), KVS_OK);
    cr_assert_eq(access(name, F_OK), 0);
    listen_close(&l);
}

Test(listen, refuses_empty_and_abstract_names)
{
    listen_socket l;

    cr_assert_eq(listen_open(&l, "", 0600, NULL), KVS_E_INVALID);
    cr_assert_eq(listen_open(&l, "@kvstride", 0600, NULL), KVS_E_INVALID);
}

Test(listen, says_which_folder_is_missing)
{
    listen_socket l;
    kvs_err err;

    cr_assert_eq(listen_open(&l, "/nonexistent-folder/x.sock", 0600, &err), KVS_E_SYS);
    cr_assert_not_null(strstr(err.msg, "folder of socket /nonexistent-folder/x.sock: No such file"), "%s", err.msg);
}

Test(listen, takes_over_a_stale_socket)
{
    listen_socket l;
    int fd;

    (void)close(bound_socket(1));
    cr_assert(exists(""));
    cr_assert_eq(listen_open(&l, path, 0600, NULL), KVS_OK);
    fd = try_connect();
    cr_assert_geq(fd, 0);
    (void)close(fd);
    listen_close(&l);
}

Test(listen, refuses_the_socket_of_a_live_daemon)
{
    listen_socket first, second;
    int fd;

    cr_assert_eq(listen_open(&first, path, 0600, NULL), KVS_OK);
    cr_assert_eq(listen_open(&second, path, 0600, NULL), KVS_E_BUSY);
    fd = try_connect();
    cr_assert_geq(fd, 0, "the first one still listens");
    (void)close(fd);
    listen_close(&first);
    cr_assert_eq(listen_open(&second, path, 0600, NULL), KVS_OK);
    listen_close(&second);
}

Test(listen, refuses_a_strangers_socket_also_with_a_full_backlog)
{
    int listening = bound_socket(0), queued[8], n = 0;
    listen_socket l;

    cr_assert_eq(listen_open(&l, path, 0600, NULL), KVS_E_BUSY);
    while (n < 8 && (queued[n] = try_connect()) >= 0)
        n++;
    cr_assert_lt(n, 8, "the backlog is full");
    cr_assert_eq(listen_open(&l, path, 0600, NULL), KVS_E_BUSY);
    cr_assert(exists("") && !exists(".lock"));
    while (n > 0)
        (void)close(queued[--n]);
    (void)close(listening);
    (void)unlink(path);
}

Test(listen, never_removes_what_is_no_socket)
{
    listen_socket l;
    kvs_err err;
    int fd = open(path, O_CREAT | O_WRONLY | O_CLOEXEC, 0600);

    cr_assert_geq(fd, 0);
    cr_assert_eq(listen_open(&l, path, 0600, &err), KVS_E_EXISTS, "%s", err.msg);
    cr_assert(exists("") && !exists(".lock"));
    (void)close(fd);
    (void)unlink(path);
    cr_assert_eq(symlink("elsewhere", path), 0);
    cr_assert_eq(listen_open(&l, path, 0600, &err), KVS_E_EXISTS, "%s", err.msg);
    cr_assert(exists(""));
    (void)unlink(path);
}

Test(listen, leaves_a_file_that_has_taken_the_place_of_its_own)
{
    listen_socket l;
    int fd;

    cr_assert_eq(listen_open(&l, path, 0600, NULL), KVS_OK);
    (void)unlink(path);
    fd = bound_socket(1);
    listen_close(&l);
    cr_assert(exists(""));
    (void)close(fd);
    (void)unlink(path);
}
