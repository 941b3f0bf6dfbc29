#include "tests/support/loop_fixture.h"

#include <dirent.h>
#include <stdio.h>

static void on_time(uv_timer_t *t)
{
    (void)t; /* only wakes the loop, so that the condition is looked at again */
}

bool loop_until(uv_loop_t *loop, bool (*done)(void *ud), void *ud, unsigned timeout_ms)
{
    uint64_t end = uv_hrtime() + (uint64_t)timeout_ms * 1000000;
    uv_timer_t t;
    bool ok;

    (void)uv_timer_init(loop, &t);
    (void)uv_timer_start(&t, on_time, 5, 5);
    while (!(ok = done(ud)) && uv_hrtime() < end)
        (void)uv_run(loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&t, NULL);
    (void)uv_run(loop, UV_RUN_NOWAIT); /* t lives on this stack */
    return ok;
}

bool loop_end(uv_loop_t *loop)
{
    (void)uv_run(loop, UV_RUN_DEFAULT);
    return uv_loop_close(loop) == 0;
}

unsigned count_fds(int pid)
{
    char path[64];
    unsigned n = 0;
    DIR *d;

    if (pid == 0)
        (void)snprintf(path, sizeof path, "/proc/self/fd");
    else
        (void)snprintf(path, sizeof path, "/proc/%d/fd", pid);
    d = opendir(path);
    if (d == NULL)
        return 0;
    for (const struct dirent *e; (e = readdir(d)) != NULL;)
        n += e->d_name[0] != '.';
    (void)closedir(d);
    return pid == 0 ? n - 1 : n; /* without the folder's own */
}
