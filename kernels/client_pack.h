#ifndef KVS_KERNELS_CLIENT_PACK_H
#define KVS_KERNELS_CLIENT_PACK_H

/* Packing on a GPU: gather pages of blocks from an engine's tensors into contiguous slots, or scatter them back, by a kernel
 * on a stream of its own in the engine's process.
 *
 * Knows planes, slots and the driver (client_driver.h); the kernel (client_pack.cu) is a part of this library and is loaded
 * at open.  Does not know keys, requests or daemons.
 * Threads: one at a time for one client_packer.
 * Ownership: the tensors and the slots are the caller's and must outlive the packer. */

#include "kernels/client_pack_params.h"
#include "kernels/client_stream.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct client_packer client_packer;

typedef struct client_pack_options {
    int ordinal;                     /* GPU of the slots, as this process counts them */
    uint32_t n_planes, n_blocks;     /* ids 0..n_blocks-1 */
    const client_pack_plane *planes; /* host [n_planes], copied */
    uint32_t ctas;                   /* thread blocks of a launch; 0: one a multiprocessor */
} client_pack_options;

/* Load the kernel, open a stream of the lowest priority, and check every plane against the memory that is really there.
 * E_UNSUPPORTED: no driver or a build without nvcc; E_RANGE: a plane runs over the end of its allocation, or is memory of
 * the host or of another GPU. */
kvs_status client_packer_open(client_packer **ret, const client_pack_options *o, kvs_err *err);
/* Where the slots are: staging is slot 0 (device), the others lie slot_stride bytes apart.  Before the first launch. */
void client_packer_slots(client_packer *p, void *staging, uint64_t slot_stride);
/* Waits until the stream is done.  NULL is fine. */
void client_packer_close(client_packer *p);

void *client_packer_stream(const client_packer *p);
/* What is launched from here on begins when the mark's stream has got there. */
kvs_status client_packer_after(client_packer *p, const client_mark *m, kvs_err *err);
/* Launch the copies of n pairs, 1..CLIENT_PACK_PAIRS; does not wait.
 *   gather:  slot[pair.slot] + planes[i].offset  <-  page i of pair.block        for each pair and each plane i
 *   scatter: page i of pair.block                <-  slot[pair.slot] + planes[i].offset
 * E_DEVICE: nothing was launched. */
kvs_status client_packer_launch(client_packer *p, bool gather, const client_pack_pair *pairs, uint32_t n, kvs_err *err);
/* Wait until all that was launched is done.  E_DEVICE: in part or not at all, and the context is lost. */
kvs_status client_packer_finish(client_packer *p, kvs_err *err);

#ifdef __cplusplus
}
#endif
#endif
