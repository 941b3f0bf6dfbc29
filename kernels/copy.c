#include "kernels/copy.h"

#include <stdint.h>
#include <string.h>

/* Smaller pieces are left to memcpy: they fit a cache, and the reader may follow at once. */
enum { STREAM_FROM = 32 << 10, LINE = 64 };

#if defined(__SSE2__)
#include <emmintrin.h>

/* Whole lines to a line-aligned place.  Returns the bytes done. */
static size_t stream_lines(uint8_t *dst, const uint8_t *src, size_t n)
{
    size_t at;

    for (at = 0; at + LINE <= n; at += LINE) {
        const __m128i *s = (const __m128i *)(const void *)(src + at);
        __m128i *d = (__m128i *)(void *)(dst + at);
        __m128i a = _mm_loadu_si128(s), b = _mm_loadu_si128(s + 1);
        __m128i c = _mm_loadu_si128(s + 2), e = _mm_loadu_si128(s + 3);

        _mm_stream_si128(d, a);
        _mm_stream_si128(d + 1, b);
        _mm_stream_si128(d + 2, c);
        _mm_stream_si128(d + 3, e);
    }
    /* Such stores are not ordered by a release: without this a reader could see the counter before the bytes.
     */
    _mm_sfence();
    return at;
}
#else
static size_t stream_lines(uint8_t *dst, const uint8_t *src, size_t n)
{
    memcpy(dst, src, n);
    return n;
}
#endif

void kvs_copy(void *dst, const void *src, size_t n)
{
    uint8_t *d = dst;
    const uint8_t *s = src;
    size_t head, done;

    if (n < STREAM_FROM) {
        memcpy(d, s, n);
        return;
    }
    head = (LINE - (uintptr_t)d % LINE) % LINE;
    memcpy(d, s, head);
    done = head + stream_lines(d + head, s + head, n - head);
    memcpy(d + done, s + done, n - done);
}
