#ifndef KVS_CONFIG_OPTION_H
#define KVS_CONFIG_OPTION_H

/* Option table: the rows of CONFIG_OPTIONS, and of CONFIG_TENANT_OPTIONS, as data, for the parser and for everything
 * that is printed.
 *
 * Knows types, ranges and where a value lies in a config or (TENANT_OPTIONS) a config_tenant: its `base`.  Does not know JSON text or files.  Any thread: the
 * table is constant.  Internal to config/, but for what messages elsewhere say with it: sizes, and what was meant. */

#include "config/config.h"

typedef enum option_kind {
    OPTION_SIZE,
    OPTION_INT,
    OPTION_BOOL,
    OPTION_PATH,
    OPTION_WORD,
    OPTION_MODE,
    OPTION_NAME,
    OPTION_UIDS,
    OPTION_FLAGS,
} option_kind;

enum {
    OPTION_PATH_MAX = 107,  /* sun_path without its final zero */
    OPTION_TEXT_BYTES = 768 /* the longest list of users */
};

typedef struct option {
    const char *key; /* "pool.max_bytes": always section, dot, name */
    option_kind kind;
    size_t offset, bytes;  /* of the field in its base */
    int64_t def, min, max; /* size, int, bool, mode, flags */
    const char *def_text;  /* path, word, name */
    const char *unit;      /* "" = none */
    const char *choices;   /* word, flags: "a|b|c" */
    bool reloadable;
    const char *help;
} option;

extern const option OPTIONS[];
extern const size_t N_OPTIONS;
extern const option TENANT_OPTIONS[];
extern const size_t N_TENANT_OPTIONS;

int64_t option_number(const void *base, const option *o);          /* size, int, bool, mode, flags */
const char *option_string(const void *base, const option *o);      /* path, word, name */
const config_uids *option_uids(const void *base, const option *o); /* uids */
void option_set_number(void *base, const option *o, int64_t v);
void option_set_string(void *base, const option *o, const char *v);
void option_set_default(void *base, const option *o);
bool option_equal(const void *a, const void *b, const option *o);
void option_copy(void *to, const void *from, const option *o);

const char *option_name(const option *o);     /* "max_bytes" */
size_t option_section_bytes(const option *o); /* length of "pool" */
bool option_same_section(const option *a, const option *b);
/* The value as people write it: 64GiB, 256, true, 0660, cuda, /run/x, [1000,1001].  In `buf` or in the base. */
const char *option_format(char buf[OPTION_TEXT_BYTES], const void *base, const option *o);
/* Bytes with the largest unit that divides them: "64GiB", "4097". */
void option_format_size(char buf[OPTION_TEXT_BYTES], int64_t bytes);
/* The same in a sentence: "64GiB", "4097 bytes".  Returns buf. */
const char *option_say_size(char buf[OPTION_TEXT_BYTES], int64_t bytes);

/* How far `word` is from being `name`: edits (insert, delete, replace; case is free), 1 for its beginning ("quota" of
 * "quota_bytes"), large for words too long to be keys.  Up to OPTION_MEANT it was probably meant. */
enum { OPTION_MEANT = 2 };
size_t option_distance(const char *word, const char *name);
/* The n-th of "a|b|c" and its length; NULL behind the last. */
const char *option_choice(const option *o, size_t n, size_t *ret_len);

#endif
