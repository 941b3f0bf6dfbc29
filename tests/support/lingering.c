#include "tests/support/lingering.h"

#include <criterion/criterion.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

static int connected(int *ret_other)
{
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t len = sizeof a;
    int listening = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

    cr_assert(listening >= 0 && fd >= 0);
    cr_assert_eq(bind(listening, (const struct sockaddr *)&a, len), 0);
    cr_assert_eq(listen(listening, 1), 0);
    cr_assert_eq(getsockname(listening, (struct sockaddr *)&a, &len), 0);
    cr_assert_eq(connect(fd, (const struct sockaddr *)&a, len), 0);
    *ret_other = accept4(listening, NULL, NULL, SOCK_CLOEXEC);
    cr_assert(*ret_other >= 0);
    (void)close(listening);
    return fd;
}

void lingering_open(lingering *l, int seconds)
{
    static const char some[1 << 16];
    const struct linger on = {1, seconds};

    l->fd = connected(&l->other);
    while (send(l->fd, some, sizeof some, MSG_DONTWAIT | MSG_NOSIGNAL) > 0)
        ;
    cr_assert_eq(setsockopt(l->fd, SOL_SOCKET, SO_LINGER, &on, sizeof on), 0);
}

void lingering_end(lingering *l)
{
    (void)close(l->other);
}
