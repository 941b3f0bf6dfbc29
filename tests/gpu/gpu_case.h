#ifndef KVS_TESTS_GPU_GPU_CASE_H
#define KVS_TESTS_GPU_GPU_CASE_H

/* A decode problem of tests/support/mla_case.h on the GPU: its pool, tables and operands in device memory, its results
 * back in the case, where the case's own judges look at them.
 *
 * Knows mla_case.h and kernels_cuda.h.  Single thread; gpu_case borrows the mla_case. */

#include <stdbool.h>

#include "kernels/device.h"
#include "tests/support/mla_case.h"

typedef struct gpu_case {
    mla_case *host;
    kvs_mla_decode_args args; /* the case's, with device pointers */
    void *pool, *q_nope, *q_pe, *out, *lse, *lens, *table, *kv_scale, *workspace, *bad;
    uint64_t workspace_bytes;
    kvs_mla_decode_result result;
    void *stream;
} gpu_case;

/* Uploads everything.  false: a CUDA call failed. */
bool gpu_case_init(gpu_case *g, mla_case *c);
void gpu_case_fini(gpu_case *g);

/* Outputs and workspace get guards and NaNs, as in mla_case_run. */
bool gpu_case_prepare(gpu_case *g);
/* Through kernels_cuda.h, or through the device's queue (lengths and table are then the host's). */
kvs_status gpu_case_launch(gpu_case *g, kvs_err *err);
kvs_status gpu_case_run_on(gpu_case *g, device_queue *q, kvs_err *err);
/* As an extend with s_q queries for each sequence, through the device's queue. */
kvs_status gpu_case_extend_on(gpu_case *g, device_queue *q, kvs_err *err);
/* Wait, bring outputs into the case, look at the guards of the workspace.  Sets result.bad. */
bool gpu_case_collect(gpu_case *g);

/* All of the above; text says what is wrong. */
bool gpu_case_run(gpu_case *g, char *text, size_t cap);
/* Compare what was collected with the CUDA oracle. */
bool gpu_case_judge(gpu_case *g, char *text, size_t cap);

#endif
