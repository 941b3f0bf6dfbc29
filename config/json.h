#ifndef KVS_CONFIG_JSON_H
#define KVS_CONFIG_JSON_H

/* The one door to JSON: strict reading and bounded writing.  The only place that knows cJSON.
 *
 * Knows JSON text and its traps (doubles, key case, duplicates, depth, trailing bytes, escaped zero bytes).
 * Does not know configuration, status or files.  Any thread, one document at a time.  A json document owns
 * its nodes; json_node pointers are borrowed from it. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#include "proto/status.h"

typedef struct json json;           /* a parsed document */
typedef struct json_node json_node; /* a value in it */

typedef enum json_type { JSON_NULL, JSON_BOOL, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_type;

/* Strict: one value, at most 32 deep, no bytes behind it but white space, no duplicate keys of an object
 * (also under another case), no \u0000 in strings, valid UTF-8, no numbers that JSON does not allow or that
 * overflow a double.  A leading byte-order mark is skipped.  E_CONFIG with line and column; E_NO_MEMORY. *ret
 * only on KVS_OK. */
kvs_status json_parse(const char *text, size_t len, json **ret, kvs_err *err);
void json_destroy(json *j); /* NULL is fine */

const json_node *json_root(const json *j);
json_type json_type_of(const json_node *n);
const char *json_type_name(json_type t);                                /* "a number" */
const char *json_key(const json_node *n);                               /* of a member; NULL otherwise */
const json_node *json_member(const json_node *object, const char *key); /* exact case; NULL if absent */
const json_node *json_first(const json_node *container);                /* NULL if empty */
const json_node *json_next(const json_node *n);
size_t json_size(const json_node *container);
bool json_bool(const json_node *n);
const char *json_string(const json_node *n);
double json_number(const json_node *n);
/* A number whose digits say a whole value of at most 2^53 in magnitude ("1e3" does, 9007199254740993 and
 * 0.99999999999999999999 do not, whatever their doubles are): true and *ret. */
bool json_whole(const json_node *n, int64_t *ret);

/* ---- writing: a growing text; after a failed allocation everything is ignored and json_text gives NULL ----
 */
typedef struct json_writer json_writer;
json_writer *json_writer_create(void); /* NULL: out of memory; what follows takes it for a writer that has failed */
void json_writer_destroy(json_writer *w);
void json_begin_object(json_writer *w, const char *key); /* key: NULL at the root and inside arrays */
void json_begin_array(json_writer *w, const char *key);
void json_end(json_writer *w); /* of the innermost object or array */
void json_put_u64(json_writer *w, const char *key, uint64_t v);
void json_put_i64(json_writer *w, const char *key, int64_t v);
void json_put_double(json_writer *w, const char *key, double v); /* null if not finite */
void json_put_bool(json_writer *w, const char *key, bool v);
void json_put_null(json_writer *w, const char *key);
void json_put_string(json_writer *w, const char *key, const char *v); /* escaped; bad UTF-8 becomes U+FFFD */
void json_put_hex(json_writer *w, const char *key, const uint8_t *bytes, size_t n); /* lower-case hex */
/* Borrowed; one line, no newline at the end.  NULL also while a container is open. */
const char *json_text(const json_writer *w, size_t *ret_len);

/* Valid JSON text on indented lines for people, with a newline at the end. */
void json_pretty(const char *text, size_t len, FILE *to);

enum { JSON_QUOTED_BYTES = 128 };

/* Text for a message: one line of UTF-8 in quotes, control characters and quotes escaped, cut to fit. Returns
 * buf. */
const char *json_quote(char buf[JSON_QUOTED_BYTES], const char *text);

/* Bytes of the UTF-8 character at `p`; 0 if these `n` > 0 bytes begin with no valid one. */
size_t json_utf8_bytes(const unsigned char *p, size_t n);

#endif
