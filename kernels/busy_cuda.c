#include "kernels/busy_cuda.h"

#ifndef KVS_CUDA

kvs_status busy_cuda_run(uint32_t ordinal, const busy_cuda_shape *shape, bool (*on_call)(void *ud), void *ud,
                         kvs_err *err)
{
    (void)ordinal;
    (void)shape;
    (void)on_call;
    (void)ud;
    return kvs_fail(err, KVS_E_UNSUPPORTED, "GPU: this build has no CUDA (nvcc was not there when it was made)");
}

#else

#include <stdlib.h>

#include <cuda_runtime_api.h>

#include "kernels/cuda_error.h"
#include "kernels/kernels_cuda.h"
#include "proto/layout.h"

enum { TOKENS = 64, ROW = (KVS_MLA_LATENT + KVS_MLA_ROPE) * 2, PAGE = TOKENS * ROW, QUEUED = 2 };

typedef struct loop {
    cudaStream_t stream;
    cudaEvent_t events[QUEUED];
    uint8_t *memory; /* all operands side by side, zeros */
    uint8_t *workspace;
    uint64_t workspace_bytes;
    kvs_mla_decode_args args;
} loop;

static uint64_t take(uint64_t *at, uint64_t bytes)
{
    uint64_t was = *at;

    *at += (bytes + 255) / 256 * 256;
    return was;
}

static kvs_status failed(kvs_err *err, const char *call, cudaError_t e)
{
    return e == cudaSuccess ? KVS_OK : kvs_cuda_fail(err, call, (int)e);
}

/* Each sequence has blocks from all over the cache. */
static kvs_status upload(const loop *l, const busy_cuda_shape *x, uint64_t lens, uint64_t table, kvs_err *err)
{
    uint32_t entries = x->n_seqs * x->blocks_a_seq;
    int32_t *host = malloc((entries + x->n_seqs) * sizeof *host);
    cudaError_t e;

    if (host == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "no memory for %u table entries", (unsigned)entries);
    for (uint32_t i = 0; i < entries; i++)
        host[i] = (int32_t)((uint64_t)i * 7919 % x->blocks);
    for (uint32_t i = 0; i < x->n_seqs; i++)
        host[entries + i] = (int32_t)(x->blocks_a_seq * TOKENS);
    e = cudaMemcpy(l->memory + table, host, entries * sizeof *host, cudaMemcpyHostToDevice);
    if (e == cudaSuccess)
        e = cudaMemcpy(l->memory + lens, host + entries, x->n_seqs * sizeof *host, cudaMemcpyHostToDevice);
    free(host);
    return failed(err, "cudaMemcpy", e);
}

static kvs_status prepare(loop *l, const busy_cuda_shape *x, kvs_err *err)
{
    uint64_t rows = (uint64_t)x->n_seqs * x->heads, bytes = 0, at[7];
    const uint64_t sizes[7] = {(uint64_t)x->blocks * PAGE,
                               rows * KVS_MLA_LATENT * 2,
                               rows * KVS_MLA_ROPE * 2,
                               rows * KVS_MLA_LATENT * 2,
                               rows * 4,
                               x->n_seqs * UINT64_C(4),
                               (uint64_t)x->n_seqs * x->blocks_a_seq * 4};
    cudaError_t e;
    kvs_status s;

    for (int i = 0; i < 7; i++)
        at[i] = take(&bytes, sizes[i]);
    e = cudaMalloc((void **)&l->memory, bytes);
    if (e == cudaSuccess)
        e = cudaMemset(l->memory, 0, bytes);
    s = failed(err, "cudaMalloc", e);
    if (s == KVS_OK)
        s = upload(l, x, at[5], at[6], err);
    if (s != KVS_OK)
        return s;
    l->args = (kvs_mla_decode_args){
        .view = {l->memory + at[0], PAGE, PAGE, x->blocks, TOKENS, ROW, KVS_FORMAT_mla_bf16},
        .q_nope = {l->memory + at[1], (uint64_t)x->heads * KVS_MLA_LATENT * 2, KVS_MLA_LATENT * 2},
        .q_pe = {l->memory + at[2], (uint64_t)x->heads * KVS_MLA_ROPE * 2, KVS_MLA_ROPE * 2},
        .out = {l->memory + at[3], (uint64_t)x->heads * KVS_MLA_LATENT * 2, KVS_MLA_LATENT * 2},
        .lse = {l->memory + at[4], (uint64_t)x->heads * 4, 4},
        .seq_len = (const int32_t *)(const void *)(l->memory + at[5]),
        .block_table = (const int32_t *)(const void *)(l->memory + at[6]),
        .table_stride = x->blocks_a_seq,
        .n_seqs = x->n_seqs,
        .table_width = x->blocks_a_seq,
        .s_q = 1,
        .h_q = x->heads,
        .sm_scale = 0.04F,
    };
    l->workspace_bytes = kvs_mla_decode_cuda_workspace(&l->args);
    e = cudaMalloc((void **)&l->workspace, l->workspace_bytes + 16);
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking);
    for (int i = 0; i < QUEUED && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(&l->events[i], cudaEventDisableTiming);
    return failed(err, "busy process", e);
}

/* Call i; it waits for the one that had its event before. */
static kvs_status call(loop *l, uint64_t i, kvs_err *err)
{
    cudaEvent_t event = l->events[i % QUEUED];
    kvs_mla_decode_result r;
    cudaError_t e = i < QUEUED ? cudaSuccess : cudaEventSynchronize(event);
    kvs_status s = failed(err, "cudaEventSynchronize", e);

    if (s == KVS_OK)
        s = kvs_mla_decode_cuda(&l->args, l->workspace, l->workspace_bytes, NULL, &r, l->stream, err);
    return s == KVS_OK ? failed(err, "cudaEventRecord", cudaEventRecord(event, l->stream)) : s;
}

static void release(loop *l)
{
    if (l->stream != NULL) {
        (void)cudaStreamSynchronize(l->stream);
        (void)cudaStreamDestroy(l->stream);
    }
    for (int i = 0; i < QUEUED; i++)
        if (l->events[i] != NULL)
            (void)cudaEventDestroy(l->events[i]);
    (void)cudaFree(l->workspace);
    (void)cudaFree(l->memory);
    (void)cudaGetLastError();
}

kvs_status busy_cuda_run(uint32_t ordinal, const busy_cuda_shape *shape, bool (*on_call)(void *ud), void *ud,
                         kvs_err *err)
{
    loop l = {0};
    kvs_status s = failed(err, "cudaSetDevice", cudaSetDevice((int)ordinal));

    if (s == KVS_OK)
        s = kvs_kernels_init(err);
    if (s == KVS_OK)
        s = prepare(&l, shape, err);
    for (uint64_t i = 0; s == KVS_OK; i++) {
        s = call(&l, i, err);
        if (s == KVS_OK && i >= QUEUED && !on_call(ud))
            break;
    }
    release(&l);
    return s;
}

#endif
