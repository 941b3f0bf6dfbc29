#ifndef KVS_CTL_RENDER_H
#define KVS_CTL_RENDER_H

/* Render: the daemon's JSON answers as text for people.
 *
 *   scalar members   ->  "name  value", aligned; sizes (names that end in _bytes) also in MiB or GiB
 *   object members   ->  a heading and the same, indented
 *   array of objects ->  a table, a column for each key of the first object; objects in it as "key=value" where they are
 *                        short, else each of them a table of its own below
 *
 * Knows JSON through config/json.h.  Does not know what an answer means: a new number shows up by itself. One
 * thread. */

#include <stdio.h>

#include "proto/status.h"

/* E_CONFIG if `text` is no JSON. */
kvs_status render_json(FILE *to, const char *text, size_t len, kvs_err *err);

/* "4497408" -> "4.29 MiB" in buf; returns buf. */
const char *render_bytes(char *buf, size_t cap, double bytes);

#endif
