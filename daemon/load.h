#ifndef KVS_DAEMON_LOAD_H
#define KVS_DAEMON_LOAD_H

/* The inside of LOAD, shared by op_load.c and load_twin.c; nobody else includes it.
 *
 * Knows a request's items and its job.  Loop thread only.
 * Ownership: a load is memory of its request.
 *
 *   submitted --job back--> finished              with a twin that still reads from its slots: back, held --free--> finished */

#include "daemon/core.h"

typedef struct load load;

typedef struct load_item {
    kvs_status status;
    uint32_t slot, gen, flags;
    bool any;       /* the client named no slot */
    bool chosen;    /* the daemon took the slot: it becomes shared */
    bool found;     /* on the device already, and held since admission */
    bool copies;    /* part of the job */
    pool_slot host; /* held, if has_host */
    bool has_host;
} load_item;

struct load {
    mover_job job; /* first */
    request *request;
    region_seat *seat; /* until it is settled: then it may be closed while the job is on its way back */
    mover *mover;      /* of the region's device */
    uint32_t ns, n;
    bool by_lease;
    uint8_t *keys; /* [n][32], own copy */
    load_item *items;
    kvs_status *held; /* [n], while it is admitted: of the holds, and their slots */
    pool_slot *host;
    uint32_t *of; /* [job.n_items] */
    bool settled, suspect;
    uint32_t device; /* the region's */
    /* Its twin, if job.twin is not NULL: load_twin.c. */
    uint64_t blocks;        /* a sum over which ones are copied, in order */
    load *next, **link;     /* of the list that it is in: lone or held; link is NULL if it is in none */
    load *other;            /* the LOAD of the other side; NULL: there is none, or it has been answered */
    uint64_t held_until_us; /* 0: not known yet */
    bool back;              /* its job is */
    bool is_closed;         /* its gate */
};

/* The job is back and nobody uses what it used: settle, signal, answer, end.  The load is gone. */
void load_finish(load *l);

/* ---- load_twin.c ---- */
/* Large enough, onto a device that exchanges: its items are looked up before its job begins. */
bool load_twin_is_likely(const load *l);
/* Before its job is submitted: a twin, or a place on the list of those that one may come for. */
void load_twin_find(load *l);
/* The job is back: finish it, now or when its twin reads nothing more from its slots; and a twin that waited for that. */
void load_twin_back(load *l);
/* The request was stopped; dropped: its job will never run.  Nobody is let in to its slots any more. */
void load_twin_stop(load *l, bool dropped);

#endif
