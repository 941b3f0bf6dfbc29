#ifndef KVS_CLIENT_PACK_IMPL_H
#define KVS_CLIENT_PACK_IMPL_H

/* What pack.c (arguments, jobs, requests) and pack_lane.c (the pipeline of one direction) share.
 *
 * Threads: callers make jobs and put them on a lane's list; the lane's thread does the rest.  A lane's mu guards its list;
 * the client's mu guards a job's `request` and `results`.  A lane's mu is never held when the client's is taken. */

#include <pthread.h>
#include <stdatomic.h>

#include "kernels/client_pack.h"
#include "proto/client/internal.h"
#include "proto/client/kvstride_pack.h"

enum { PACK_FLIGHT = 8 /* chunks under way in a lane */ };

typedef struct pack_job {
    struct pack_job *next;
    kvs_request *request; /* NULL: its caller has ended it */
    kvs_status *results;  /* the caller's [n], while request is there */
    uint32_t n, first_depth;
    uint8_t parent[WIRE_KEY_BYTES];
    uint8_t *keys;      /* [n][32] */
    uint32_t *blocks;   /* [n] */
    kvs_status *status; /* [n] */
    client_mark *after; /* where the caller's stream was; NULL: nothing to wait for */
    int64_t deadline;
    kvs_mark join; /* the entry that the caller's stream waits for */
    uint64_t join_generation;
    bool joins;
    atomic_bool cancelled;
    /* the lane's */
    uint32_t issued, ended; /* blocks */
    bool marked;            /* the lane's stream waits for `after` */
    kvs_status failed;      /* no more chunks are issued */
    kvs_err err;
} pack_job;

typedef struct pack_chunk {
    pack_job *job;
    uint32_t at, n; /* blocks of the job */
    kvs_request *request;
    kvs_mark after;
    kvs_store_args store;
    kvs_load_args load;
    kvs_slot slots[CLIENT_PACK_PAIRS];
    kvs_status stored[CLIENT_PACK_PAIRS];
    kvs_load_result loaded[CLIENT_PACK_PAIRS];
} pack_chunk;

typedef struct pack_lane {
    kvs_pack *pack;
    bool load, has_thread;
    pthread_t thread;
    pthread_mutex_t mu;
    pthread_cond_t wake;
    pack_job *head, **tail;
    atomic_bool closing;
    /* the thread's, after open */
    kvs_region *region;
    _Atomic uint64_t generation; /* in which the slots were taken; others may read it */
    uint8_t *base;
    uint64_t slot_stride;
    client_packer *packer; /* NULL: the slots are host memory */
    int ordinal;           /* the packer's GPU, as this process counts them */
    kvs_stream *stream;    /* of the packer, for its signals */
    kvs_mark scattered;    /* load: reached when the slots that came back last are free */
    bool has_scattered;
    kvs_slot *slots; /* [n_staging] */
    client_pack_pair pairs[CLIENT_PACK_PAIRS];
    pack_chunk flight[PACK_FLIGHT]; /* the oldest at `first` */
    uint32_t first, n_flying;
    uint32_t place, used; /* next staging slot; those in use, behind each other, round the end too */
    uint32_t in_a_row;    /* chunks since nothing was under way */
} pack_lane;

struct kvs_pack {
    kvs_client *c;
    kvs_pack *next;
    kvs_ns *ns;
    uint32_t device, n_planes, n_blocks, first_counter, chunk, n_staging, ctas;
    uint8_t uuid[16]; /* of that device: another life of the daemon may count them otherwise.  Zeros: it has none */
    client_pack_plane *planes; /* [n_planes] */
    pack_lane lanes[2];        /* store, load */
};

/* Staging slots, kernel, thread.  A lane that failed to open can be closed. */
kvs_status lane_open(pack_lane *l, kvs_pack *p, bool load, uint32_t timeout_ms, kvs_err *err);
void lane_submit(pack_lane *l, pack_job *j); /* the lane's from here on */
bool lane_is_current(const pack_lane *l);    /* its slots are of this life of the connection */
void lane_close(pack_lane *l);

/* The job has ended: its caller is told, and it is freed.  Lane's thread. */
void pack_job_end(kvs_pack *p, pack_job *j, kvs_status s);

#endif
