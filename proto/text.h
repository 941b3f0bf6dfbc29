#ifndef KVS_PROTO_TEXT_H
#define KVS_PROTO_TEXT_H

/* Text that people read in lists and logs: tags of namespaces, names of clients, and what else is shown to them.
 *
 * Knows UTF-8 and control characters.  Does not know which field it looks at.  Any thread; the text is the caller's. */

#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

/* `len` bytes are well-formed UTF-8 (not overlong, no surrogate, at most U+10FFFF) without control characters (U+0000-001F, U+007F-009F),
 * else E_INVALID, which names `what` and the byte. */
kvs_status text_check(const char *what, const uint8_t *text, size_t len, kvs_err *err);

/* In place, for a terminal or a log: whatever is not such text (a control character, a byte that is no UTF-8) becomes '?', and
 * half a character at the end, which snprintf has cut, goes. */
void text_tame(char *text);

#endif
