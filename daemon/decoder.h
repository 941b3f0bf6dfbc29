#ifndef KVS_DAEMON_DECODER_H
#define KVS_DAEMON_DECODER_H

/* Decoder: one thread a device that runs cache-write and attention kernels.
 *
 * Knows kernel arguments and the device table.  Does not know keys, regions' owners, sockets.
 * Threads and ownership as in mover.h; all argument memory is borrowed from submit to on_done.
 *
 * A call that fails does not keep later ones from running, except that a lost device fails all that follow
 * without another device call.  job.stop is looked at before each call, and by the cpu device within it. */

#include "daemon/job.h"
#include "kernels/device.h"

typedef struct decoder decoder;

typedef enum decoder_kind { DECODER_WRITE, DECODER_DECODE, DECODER_EXTEND } decoder_kind;

typedef struct decoder_call {
    decoder_kind kind;
    union {
        kvs_mla_write_args write;
        kvs_mla_decode_args decode;
        kvs_mla_extend_args extend;
    } args;
    kvs_status status; /* out; E_RANGE: it ran and result.bad entries were skipped.  First failure's text: job.err */
    kvs_mla_decode_result result; /* out; write: only `bad` */
} decoder_call;

typedef struct decoder_job {
    job job;
    decoder_call *calls; /* run in order */
    uint32_t n_calls;
} decoder_job;

typedef struct decoder_stats {
    uint64_t jobs, calls, busy_us, failed, queued;
    uint64_t oldest_us; /* how long the job that runs now has been running; 0: none runs */
} decoder_stats;

kvs_status decoder_create(decoder **ret, device *dev, work_sink sink, kvs_err *err);
void decoder_submit(decoder *d, decoder_job *j);
void decoder_share(decoder *d, uint32_t tenant, uint32_t share); /* as worker_share */
bool decoder_drop(decoder *d, decoder_job *j);                   /* as worker_drop */
void decoder_kick(decoder *d);                                   /* after job.stop */
void decoder_destroy(decoder *d);
void decoder_get_stats(const decoder *d, decoder_stats *ret);

#endif
