#ifndef KVS_CONFIG_COPY_TABLE_H
#define KVS_CONFIG_COPY_TABLE_H

/* Copy table: how fast one card copies pieces of several sizes, by its copy engines and by a kernel, alone and beside a busy
 * process, as `kvstridectl calibrate` has measured it.
 *
 * Knows the JSON file.  Does not know how the figures are measured or what follows from them.
 * Any thread.  Plain values.  A table is a file of its own in a folder, named by the card's UUID: copies-<uuid>.json. */

#include <stdint.h>

#include "config/json.h"
#include "proto/status.h"

enum { COPY_TABLE_FORMAT = 1, COPY_TABLE_ROWS = 12, COPY_TABLE_PEERS = 16, COPY_TABLE_NAME_BYTES = 64 };

/* Rates are GB/s; 0 in a "beside" column: not measured. */
typedef struct copy_row {
    uint64_t piece_bytes;
    double engine, kernel;               /* alone */
    double beside_engine, beside_kernel; /* beside a busy process */
    /* What is left of that process's own speed meanwhile, 1 = all of it. */
    double left_by_engine, left_by_kernel;
    uint32_t kernel_blocks; /* thread blocks of the kernel: the fewest that come close to its best */
} copy_row;

/* Another card of the host, and how fast this one copies whole blocks from its memory. */
typedef struct copy_peer {
    uint8_t uuid[16];
    double gbs;
} copy_peer;

typedef struct copy_table {
    char card[COPY_TABLE_NAME_BYTES], date[COPY_TABLE_NAME_BYTES]; /* date: as YYYY-MM-DD */
    uint8_t uuid[16];
    uint32_t driver_version;
    uint32_t n[2]; /* rows to load and to store, the shortest pieces first */
    copy_row rows[2][COPY_TABLE_ROWS];
    uint32_t n_peers;
    copy_peer peers[COPY_TABLE_PEERS];
} copy_table;

/* GB/s of whole blocks from the host by the engines; 0: not measured. */
double copy_table_link(const copy_table *t);
/* GB/s from the card with that UUID; 0: not measured. */
double copy_table_peer(const copy_table *t, const uint8_t uuid[16]);

/* All members of the table, into the object that is open. */
void copy_table_put(const copy_table *t, json_writer *w);

/* E_CONFIG: no such table, with the member at fault. */
kvs_status copy_table_parse(const char *text, size_t len, copy_table *ret, kvs_err *err);

/* The table of the card.  E_NOT_FOUND: none was made.  E_CONFIG: no table, or that of another card. */
kvs_status copy_table_read(const char *folder, const uint8_t uuid[16], copy_table *ret, kvs_err *err);

/* Replace it, whole or not at all.  E_SYS names the file. */
kvs_status copy_table_write(const char *folder, const copy_table *t, kvs_err *err);

#endif
