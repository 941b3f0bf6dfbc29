#ifndef KVS_PROTO_TEXT_H
#define KVS_PROTO_TEXT_H

/* Text that people read in lists and logs: tags of namespaces, names of clients.
 *
 * Knows UTF-8 and control characters.  Does not know which field it looks at.  Any thread; the text is the caller's and
 * need not end with a zero. */

#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

/* Well-formed UTF-8 (not overlong, no surrogate, at most U+10FFFF) without control characters (U+0000-001F, U+007F-009F),
 * else E_INVALID, which names `what` and the byte. */
kvs_status text_check(const char *what, const uint8_t *text, size_t len, kvs_err *err);

#endif
