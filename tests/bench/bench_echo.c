/* Round trips of the yardstick: what a plain epoll echo server takes for frames of the sizes that matter
 * here. */

#include <stdio.h>
#include <unistd.h>

#include "proto/wire.h"
#include "tests/support/echo_server.h"

enum { WARM_UP = 2000, SAMPLES = 20000 };

static int measure(const char *path, size_t frame_bytes)
{
    static uint64_t samples[SAMPLES];
    pid_t pid = echo_start(path, frame_bytes);
    int fd = pid > 0 ? echo_connect(path) : -1;
    _Bool ok =
        fd >= 0 && echo_measure(fd, frame_bytes, samples, WARM_UP) && echo_measure(fd, frame_bytes, samples, SAMPLES);

    if (ok)
        (void)printf("echo round trip, %zu-byte frames: p50 %.2f us, p99 %.2f us\n", frame_bytes,
                     (double)echo_quantile(samples, SAMPLES, 500) / 1000,
                     (double)echo_quantile(samples, SAMPLES, 990) / 1000);
    else
        (void)fprintf(stderr, "echo server at %s: failed\n", path);
    if (fd >= 0)
        (void)close(fd);
    if (pid > 0)
        echo_stop(pid, path);
    return ok ? 0 : 1;
}

int main(void)
{
    char path[64];

    (void)snprintf(path, sizeof path, "/tmp/kvs-echo-%d.sock", (int)getpid());
    return measure(path, WIRE_HEADER_BYTES) | measure(path, 2 * WIRE_HEADER_BYTES);
}
