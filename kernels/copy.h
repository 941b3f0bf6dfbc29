#ifndef KVS_KERNELS_COPY_H
#define KVS_KERNELS_COPY_H

/* Copy: memcpy for blocks, which are larger than a cache and not read again soon.
 *
 * Knows bytes.  Does not know blocks or devices.  Any thread; the caller's memory, which must not overlap. */

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

/* dst[0..n) = src[0..n).  Large pieces go past the cache where the processor can: the lines of dst are not
 * read before they are written, so a third of the memory traffic is saved.  Ordered before a later release,
 * as memcpy is. */
void kvs_copy(void *dst, const void *src, size_t n);

#ifdef __cplusplus
}
#endif
#endif
