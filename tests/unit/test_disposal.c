#include "daemon/disposal.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/thread.h"
#include "tests/support/lingering.h"

enum { MANY = 1000 };

static atomic_int slow_fd[MANY]; /* by number: its close waits for `go` */
static atomic_int n_closed, n_waiting;
static sem_t go;

/* In place of the library's. */
int close(int fd)
{
    if (fd >= 0 && fd < MANY && atomic_exchange(&slow_fd[fd], 0)) {
        atomic_fetch_add(&n_waiting, 1);
        (void)sem_wait(&go);
    }
    atomic_fetch_add(&n_closed, 1);
    return (int)syscall(SYS_close, fd);
}

static int some_fd(void)
{
    int fd = open("/dev/null", O_RDONLY | O_CLOEXEC);

    cr_assert(fd >= 0 && fd < MANY);
    return fd;
}

static bool is_open(int fd)
{
    return fcntl(fd, F_GETFD) >= 0;
}

/* A descriptor whose close returns when `go` is posted, given away; the number. */
static int dispose_slow(void)
{
    int fd = some_fd();

    atomic_store(&slow_fd[fd], 1);
    disposal_close(fd);
    return fd;
}

static void wait_for(const atomic_int *n, int least)
{
    for (int i = 0; i < 5000 && atomic_load(n) < least; i++)
        (void)usleep(1000);
    cr_assert_geq(atomic_load(n), least);
}

Test(disposal, closes_what_it_is_given)
{
    int fds[300];

    for (int i = 0; i < 300; i++)
        fds[i] = some_fd();
    for (int i = 0; i < 300; i++)
        disposal_close(fds[i]);
    cr_assert(disposal_wait(5000));
    for (int i = 0; i < 300; i++)
        cr_assert(!is_open(fds[i]));
    cr_assert_eq(atomic_load(&n_closed), 300);
}

Test(disposal, a_close_that_does_not_return_keeps_no_other_waiting)
{
    uint64_t began = thread_now_us();
    int fd;

    (void)sem_init(&go, 0, 0);
    for (int i = 1; i < DISPOSAL_THREADS; i++) {
        (void)dispose_slow();
        wait_for(&n_waiting, i);
        fd = some_fd();
        disposal_close(fd);
        wait_for(&n_closed, i);
        cr_assert(!is_open(fd));
    }
    cr_assert(!disposal_wait(0));
    cr_assert_lt(thread_now_us() - began, 20000000);
    for (int i = 0; i < DISPOSAL_THREADS; i++)
        (void)sem_post(&go);
    cr_assert(disposal_wait(5000));
}

Test(disposal, the_caller_waits_for_nothing_even_if_all_closes_hang)
{
    (void)sem_init(&go, 0, 0);
    for (int i = 0; i < DISPOSAL_THREADS + 300; i++)
        (void)dispose_slow();
    wait_for(&n_waiting, DISPOSAL_THREADS);
    cr_assert_eq(atomic_load(&n_closed), 0);
    for (int i = 0; i < DISPOSAL_THREADS + 300; i++)
        (void)sem_post(&go);
    cr_assert(disposal_wait(5000));
    cr_assert_eq(atomic_load(&n_closed), DISPOSAL_THREADS + 300);
}

Test(disposal, its_threads_end_and_come_again)
{
    for (int i = 0; i < 2; i++) {
        int fd = some_fd();

        disposal_close(fd);
        cr_assert(disposal_wait(5000));
        cr_assert(!is_open(fd));
        (void)usleep(800000); /* longer than a thread waits for more */
    }
}

/* One hostile client would otherwise keep all threads for hours. */
Test(disposal, a_socket_does_not_linger)
{
    lingering l;

    lingering_open(&l, 20);
    disposal_close(l.fd);
    cr_assert(disposal_wait(5000), "the close lingers");
    lingering_end(&l);
}
