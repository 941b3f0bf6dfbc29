#ifndef KVS_DAEMON_COMPUTE_H
#define KVS_DAEMON_COMPUTE_H

/* Compute: a request that runs kernels over views, WRITE (op_write.c), DECODE and EXTEND (op_attend.c).
 *
 * Everything that a kernel will use as an index or an address is checked, on the daemon's own copy, before a job exists.
 * WRITE is one decoder job with many calls; each call of DECODE and EXTEND is a job of its own, with its own counters.
 *
 * Knows requests, regions and the decoder.  Knows no operands of an operation.  Loop thread only.  A compute and all of its
 * arrays belong to the request. */

#include "daemon/core.h"
#include "proto/layout.h"

/* What DECODE, EXTEND and WRITE have kernels for. */
#define COMPUTE_READS                                                                                                  \
    (KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16) | KVS_FORMAT_BIT(mla_fp8) | KVS_FORMAT_BIT(fp8_ds_mla))
#define COMPUTE_WRITES (COMPUTE_READS | KVS_FORMAT_BIT(mla_fp32))

typedef struct compute compute;

typedef struct compute_job {
    decoder_job job;   /* first */
    decoder_call call; /* DECODE, EXTEND: the only one */
    float kv_scale;    /* DECODE, EXTEND: its own */
    compute *owner;
    region_seat *scratch;
    bool back;
} compute_job;

struct compute {
    request *request;
    region_seat *seat;
    decoder *decoder; /* of the region's device */
    bool is_write;
    uint32_t n_jobs, n_back;
    compute_job *jobs;
    uint32_t n_calls;
    decoder_call *write_calls; /* WRITE: of jobs[0] */
    float *write_scales;       /* WRITE: [n_calls] */
    region_seat **scratches;   /* WRITE: [n_calls] */
    uint32_t *used, n_used;    /* slots, each once */
};

/* Room for it, and for its reply.  The slots of `seat` that the request names are marked from here on, at most `most_slots`. */
kvs_status compute_make(request *r, region_seat *seat, bool is_write, uint32_t n_jobs, uint32_t n_calls,
                        uint64_t most_slots, compute **ret, kvs_err *err);

/* A slot that a kernel will touch, once checked; any number of times. */
void compute_use_slot(compute *x, uint32_t slot);

/* on_done of its jobs. */
void compute_done(work *w);

/* The last step: everything is checked, every job is filled. */
kvs_status compute_submit(compute *x, kvs_err *err);

/* ---- checks, with the field and the call in the message ---- */

/* Of a list's length. */
kvs_status compute_check_count(const core *c, const char *field, uint32_t n, kvs_err *err);

/* [rows][heads][bytes] in scratch with byte strides, all of them multiples of `align`: does the last byte lie inside? */
kvs_status compute_check_extent(const region *scratch, const char *field, uint32_t call, uint64_t offset, uint64_t rows,
                                uint64_t row_stride, uint64_t heads, uint64_t head_stride, uint64_t bytes,
                                uint64_t align, kvs_err *err);

/* The caller's region `id`: scratch, on the device of the slots. */
kvs_status compute_find_scratch(const compute *x, uint32_t id, uint32_t call, region_seat **ret, kvs_err *err);

/* formats: a KVS_FORMAT_BIT each. */
kvs_status compute_check_plane(const region *g, uint32_t plane, uint64_t formats, uint32_t call, kvs_err *err);

/* mla_fp8 has a scale, the others have none. */
kvs_status compute_check_scale(const region *g, uint32_t plane, float scale, uint32_t call, kvs_err *err);

#endif
