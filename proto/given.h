#ifndef KVS_PROTO_GIVEN_H
#define KVS_PROTO_GIVEN_H

/* Arguments that must not be NULL: an engine's mistake is answered, it does not end the engine's process.
 *
 * Knows pointers and their names.  Does not know the calls.  Any thread; owns nothing. */

#include <stddef.h>
#include <stdint.h>

#include "proto/status.h"

typedef struct given {
    const char *name; /* as the header of the call has it; NULL ends a list */
    const void *p;
} given;

/* KVS_OK, or E_INVALID that names the first of them that is NULL: "store: keys is NULL". */
static inline kvs_status given_check(kvs_err *err, const char *call, const given *list)
{
    for (; list->name != NULL; list++)
        if (list->p == NULL)
            return kvs_fail(err, KVS_E_INVALID, "%s: %s is NULL", call, list->name);
    return KVS_OK;
}

/* GIVEN(err, "store", {"keys", a->keys}, {"slots", a->slots}) */
#define GIVEN(err, call, ...) given_check((err), (call), (const given[]){__VA_ARGS__, {NULL, NULL}})

/* What stands for an array of n elements in such a list: of none it may be NULL. */
static inline const void *given_some(uint64_t n, const void *p)
{
    return n > 0 ? p : "";
}

#endif
