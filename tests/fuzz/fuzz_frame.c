#include "proto/frame.h"

#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The input is a list of pieces: [length & 127 | fds << 7] bytes... until it ends.  Whatever comes out must
 * lie inside the buffer, and every descriptor must have exactly one owner: a frame's are closed here, the
 * reader closes the rest. */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void take_all(frame_reader *r)
{
    frame f;

    while (frame_next(r, &f, NULL)) {
        uint8_t sum = 0;

        for (uint32_t i = 0; i < f.head.body_len; i++)
            sum = (uint8_t)(sum ^ f.body[i]);
        for (uint16_t i = 0; i < f.head.n_fds; i++)
            if (close(f.fds[i]) != 0)
                abort();
        (void)sum;
    }
}

static size_t highest_descriptor(void)
{
    int fd = dup(STDIN_FILENO);

    (void)close(fd);
    return (size_t)fd;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    size_t before = highest_descriptor();
    frame_reader r;

    frame_reader_init(&r, 4096);
    while (size > 1 && r.broken == KVS_OK) {
        size_t want = data[0] & 127, n_fds = data[0] >> 7;
        frame_span s = frame_want(&r);
        int fd = n_fds != 0 ? dup(STDIN_FILENO) : -1;

        data++;
        size--;
        if (want > size)
            want = size;
        if (want > s.len)
            want = s.len;
        if (s.base != NULL && want != 0)
            memcpy(s.base, data, want);
        (void)frame_got(&r, want, &fd, n_fds, NULL);
        data += want;
        size -= want;
        take_all(&r);
        (void)frame_is_partial(&r);
    }
    frame_reader_fini(&r);
    if (highest_descriptor() != before)
        abort();
    return 0;
}
