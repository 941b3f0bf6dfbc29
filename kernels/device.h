#ifndef KVS_KERNELS_DEVICE_H
#define KVS_KERNELS_DEVICE_H

/* A device is a table of functions: the cpu (device_cpu.c), CUDA (device_cuda.h), and a fault-injecting wrapper in
 * tests/ that delays, fails or swallows the n-th call.
 *
 * Knows memory, copies and kernels.  Knows no keys, sockets or threads of its own.
 * Threads: open/close, mem_* and host_* may block and are called by the pinner thread (or main before the loop runs);
 * a queue belongs to one thread.  The loop thread calls none of this.
 * Ownership: a device_mem keeps its mapping and its descriptors until mem_close; a queue until queue_close. */

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/mla.h"
#include "kernels/mla_extend.h"
#include "kernels/part_sum.h"
#include "proto/status.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct device device;
typedef struct device_mem device_mem;
typedef struct device_queue device_queue;

/* One contiguous run; host side and device side are told apart by the queue's direction.  dst and src do not overlap. */
typedef struct device_copy {
    void *dst;
    const void *src;
    uint64_t bytes;
} device_copy;

/* By which means a queue makes copies: the copy engines, which are fast with long pieces and cost kernels little, or a kernel
 * of at most n_blocks thread blocks, which is fast with short pieces and takes processors from others.  A device with one
 * means only (copies_by_kernel is false) ignores it, and pieces that no kernel can copy (addresses or lengths that are no
 * multiples of 16) go by the engines anyway.  DEVICE_FROM_PEER: all sources are memory of another device (see reaches), in a
 * DEVICE_LOAD queue; by engines, and beside the queue's other copies where they have other ways to go. */
typedef enum device_means { DEVICE_BY_ENGINE, DEVICE_BY_KERNEL, DEVICE_FROM_PEER } device_means;
typedef struct device_how {
    device_means means;
    uint32_t n_blocks; /* for DEVICE_BY_KERNEL; at least 1 */
} device_how;

/* Checksums of whole blocks in device memory: XXH3-64 of each part of part_bytes (the last one of a block may be shorter), which
 * fit a kernel (kvs_part_sum_fits). */
enum { DEVICE_SUM_BLOCKS = KVS_PART_SUM_BLOCKS, DEVICE_SUM_PARTS = 4096 }; /* of a call, at most */
typedef struct device_sums {
    const void *const *blocks; /* [n] device memory, multiples of 16 */
    uint32_t n;
    uint64_t bytes, part_bytes;
    uint64_t *parts; /* out: [n][parts of a block] */
} device_sums;

/* For the queue's own use (a stream, say). */
typedef enum device_dir { DEVICE_LOAD, DEVICE_STORE, DEVICE_COMPUTE } device_dir;

/* Memory that a client hands in.  memory: enum wire_memory.  The descriptors stay the caller's (they are dup'ed).
 * A piece is a descriptor (memfd, VMM handle) or an IPC handle, which stands for a whole allocation from its base on. */
typedef struct device_import {
    uint32_t memory;
    const int *fds;
    uint32_t n_fds;
    uint64_t max_bytes;       /* E_LIMIT above, in all */
    const uint8_t (*ipc)[64]; /* CUDA IPC only: instead of fds */
    uint32_t n_ipc;
    const uint8_t *uuid; /* [16] of the device that the client means; NULL: not said, not checked */
} device_import;

/* For people and for STATUS; taken when the device was opened, so that nothing is asked of a driver later. */
typedef struct device_about {
    char name[64]; /* of the card */
    uint8_t uuid[16];
    uint64_t total_bytes;
    uint64_t idle_bytes; /* of its memory, taken by opening it: context, kernels.  0: not known */
    int32_t numa_node;   /* of the host memory next to it; -1: not known */
    uint32_t driver_version;
} device_about;

typedef struct device_ops {
    const char *name; /* "cpu" */
    uint32_t memory;  /* enum wire_memory: what the descriptors of its own memory are */
    uint32_t depth;   /* batches of copies that are worth keeping queued at once; 0 is 1 */
    bool copies_by_kernel;
    void (*about)(const device *d, device_about *ret); /* any thread; NULL: nothing to tell */
    void (*close)(device *d);

    /* Make host memory fit for fast copies (pinning); the cpu device only allocates the pages.  Blocks. */
    kvs_status (*host_register)(device *d, void *p, uint64_t bytes, kvs_err *err);
    void (*host_unregister)(device *d, void *p, uint64_t bytes);

    /* Daemon memory, zero-filled, exportable, really allocated: E_NO_SPACE when the machine has none left. */
    kvs_status (*mem_create)(device *d, uint64_t bytes, device_mem **ret, kvs_err *err);
    /* A client's memory.  Every descriptor is checked: kind, seals (shrink), allocation, size.  The refusal says which
     * and why.  Also takes back daemon memory that a client kept over a restart. */
    kvs_status (*mem_import)(device *d, const device_import *in, device_mem **ret, kvs_err *err);
    void (*mem_close)(device_mem *m); /* unmaps; blocks; nothing may be using it any more */
    uint32_t (*mem_pieces)(const device_mem *m);
    /* Device address.  Pieces of daemon memory and of one VMM import follow one another: a range may cross them. */
    uint8_t *(*mem_base)(const device_mem *m, uint32_t piece, uint64_t *ret_bytes);
    int (*mem_fd)(const device_mem *m, uint32_t piece); /* borrowed; -1: not by descriptor */
    /* From now on queues of `d` may copy from memory of `other` that is made or imported after this, as far as mem_reached says;
     * false: they cannot, ever.  Blocks; before there is any memory.  NULL: no device reaches another one. */
    bool (*reaches)(device *d, device *other);
    /* Does a queue of `to`'s device copy from `m` to `to` at full speed?  Any thread; NULL with reaches. */
    bool (*mem_reached)(const device_mem *m, const device_mem *to);

    kvs_status (*queue_open)(device *d, device_dir dir, device_queue **ret, kvs_err *err);
    void (*queue_close)(device_queue *q);
    /* Queue n copies and return a mark behind them; n == 0 is a mark alone.  The array may be reused on return.
     * E_DEVICE: nothing was queued.  E_DEVICE_LOST: part of it may be running; the process must end. */
    kvs_status (*copy)(device_queue *q, const device_copy *c, size_t n, device_how how, uint64_t *ret_mark,
                       kvs_err *err);
    /* Blocks until the sums are there, which takes a fifth of a copy's time while nothing else runs on the GPU; beside the
     * queue's copies, of a DEVICE_STORE queue.  NULL: processors are as fast.  E_DEVICE: there are none, and nothing reads the
     * blocks any more; E_DEVICE_LOST as for wait. */
    kvs_status (*sum)(device_queue *q, const device_sums *s, kvs_err *err);
    /* views, kv_c, k_pe, q_*, out, lse: device addresses; slot_mapping, q_start, seq_len, block_table, scale, kv_scale: host
     * memory, read before the call returns.  As kvs_mla_write, kvs_mla_decode and kvs_mla_extend, duplicates of a slot
     * included. */
    kvs_status (*mla_write)(device_queue *q, const kvs_mla_write_args *a, uint32_t *ret_bad, uint64_t *ret_mark,
                            kvs_err *err);
    kvs_status (*mla_decode)(device_queue *q, const kvs_mla_decode_args *a, kvs_mla_decode_result *ret,
                             uint64_t *ret_mark, kvs_err *err);
    kvs_status (*mla_extend)(device_queue *q, const kvs_mla_extend_args *a, kvs_mla_decode_result *ret,
                             uint64_t *ret_mark, kvs_err *err);
    /* Block until the mark is reached; what was returned through ret_* above is valid only then.  E_DEVICE: the work
     * has failed and is over, its memory may be used for something else at once.  If that is not certain it is
     * E_DEVICE_LOST: the process must end, and the memory is never used again. */
    kvs_status (*wait)(device_queue *q, uint64_t mark, kvs_err *err);
} device_ops;

/* Every implementation's struct starts with this. */
struct device {
    const device_ops *ops;
};
struct device_mem {
    device *dev;
};
struct device_queue {
    device *dev;
};

kvs_status device_cpu_open(device **ret, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
