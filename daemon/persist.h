#ifndef KVS_DAEMON_PERSIST_H
#define KVS_DAEMON_PERSIST_H

/* Persist: the two memories of the pool, arena and slot table, which may outlive the process.
 *
 * Knows memfds, files on a tmpfs, locks and sizes.  Does not know what is in them (daemon/table.h) or who hands
 * descriptors over.  Main or loop thread only, but for persist_room: any.
 * Owns both descriptors from persist_open to persist_close; whoever maps them unmaps first.
 *
 *   they come from   a folder on a tmpfs (pool.path): files kvs-arena and kvs-table, mode 0600, ours
 *                    descriptors that an earlier life left with the service manager
 *                    nowhere: new memfds
 *
 * Whoever has them open holds a record lock on the table: it goes with the process even where copies of the
 * descriptor live on, and it goes when the process closes any descriptor of the same file: there must be only
 * one. */

#include <stdbool.h>
#include <stdint.h>

#include "proto/status.h"

#define PERSIST_ARENA "kvs-arena" /* file, and descriptor in the service manager's store */
#define PERSIST_TABLE "kvs-table"

typedef struct persist {
    int arena_fd, table_fd;
    bool survived;                /* both were there before: there may be blocks in them */
    bool bounded;                 /* files on a tmpfs that can run full: pages are asked for before they are written */
    bool made[2];                 /* arena, table: a memfd made here, which nobody else knows yet */
    char note[KVS_ERR_MSG_BYTES]; /* "" or why a descriptor that was handed over is not used */
} persist;

/* dir: "" for none.  arena_fd, table_fd: handed over, or -1; taken, also on failure; with `dir` they are closed.  E_BUSY:
 * another process writes the table.  E_CONFIG: folder or file is not as it must be.  E_SYS. */
kvs_status persist_open(persist *ret, const char *dir, int arena_fd, int table_fd, kvs_err *err);
void persist_close(persist *m); /* zeros but for fds of -1 are fine */

uint64_t persist_arena_bytes(const persist *m); /* sizes now; 0 if unknown */
uint64_t persist_table_bytes(const persist *m);

/* Make both at least this large.  keep: what is in them stays.  Else the table becomes zeros, and what the arena has
 * beyond `arena_bytes` is given back before anything else is asked for; the rest of it is used again. */
kvs_status persist_fit(persist *m, uint64_t arena_bytes, uint64_t table_bytes, bool keep, kvs_err *err);
/* The table's pages of this range will not fail to be there.  E_NO_SPACE. */
kvs_status persist_reserve(const persist *m, uint64_t offset, uint64_t bytes, kvs_err *err);
/* E_NO_SPACE, with numbers: they lie on a tmpfs that has less than `bytes` left.  m may be NULL. */
kvs_status persist_room(const persist *m, uint64_t bytes, kvs_err *err);

#endif
