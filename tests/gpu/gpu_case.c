#ifdef KVS_CUDA
#include "tests/gpu/gpu_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cuda_runtime_api.h>

#include "kernels/kernels_cuda.h"
#include "tests/gpu/oracle_cuda.h"
#include "kernels/mla_oracle.h"
#include "tests/support/random.h"

static bool upload(void **ret, const void *from, uint64_t bytes)
{
    *ret = NULL;
    if (cudaMalloc(ret, bytes > 0 ? bytes : 16) != cudaSuccess)
        return false;
    return bytes == 0 || cudaMemcpy(*ret, from, bytes, cudaMemcpyHostToDevice) == cudaSuccess;
}

static uint64_t guarded(uint64_t bytes)
{
    return bytes + 2 * MLA_CASE_GUARD;
}

bool gpu_case_init(gpu_case *g, mla_case *c)
{
    const kvs_mla_decode_args *a = &c->args;
    uint64_t n = (uint64_t)a->n_seqs * a->s_q, table = (uint64_t)a->n_seqs * a->table_stride * sizeof *c->table;
    cudaStream_t stream = NULL;

    *g = (gpu_case){.host = c, .args = *a};
    if (!upload(&g->pool, c->pool, c->pool_bytes) || !upload(&g->q_nope, c->q_nope, a->q_nope.token_stride * n) ||
        !upload(&g->q_pe, c->q_pe, a->q_pe.token_stride * n) || !upload(&g->out, c->out, guarded(c->out_bytes)) ||
        !upload(&g->lse, c->lse, guarded(c->lse_bytes)) || !upload(&g->lens, c->lens, a->n_seqs * sizeof *c->lens) ||
        !upload(&g->table, c->table, table) || !upload(&g->kv_scale, a->kv_scale, sizeof *a->kv_scale) ||
        cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) != cudaSuccess)
        return false;
    g->stream = stream;
    g->args.view.base = (uint8_t *)g->pool + (a->view.base - c->pool);
    g->args.q_nope.base = g->q_nope;
    g->args.q_pe.base = g->q_pe;
    g->args.out.base = (uint8_t *)g->out + MLA_CASE_GUARD;
    g->args.lse.base = (uint8_t *)g->lse + MLA_CASE_GUARD;
    g->args.seq_len = g->lens;
    g->args.block_table = g->table;
    g->args.kv_scale = g->kv_scale;
    g->workspace_bytes = kvs_mla_decode_cuda_workspace(&g->args);
    return cudaMalloc(&g->workspace, guarded(g->workspace_bytes)) == cudaSuccess &&
           cudaMalloc(&g->bad, 4) == cudaSuccess;
}

void gpu_case_fini(gpu_case *g)
{
    void *all[] = {g->pool, g->q_nope, g->q_pe, g->out, g->lse, g->lens, g->table, g->kv_scale, g->workspace, g->bad};

    if (g->stream != NULL)
        (void)cudaStreamDestroy(g->stream);
    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        (void)cudaFree(all[i]);
    *g = (gpu_case){.host = NULL};
}

bool gpu_case_prepare(gpu_case *g)
{
    mla_case *c = g->host;
    rnd r = {c->shape.seed ^ 0x51ED};

    rnd_bytes(&r, c->untouched_out, guarded(c->out_bytes));
    rnd_bytes(&r, c->untouched_lse, guarded(c->lse_bytes));
    memset(c->workspace, 0xFF, guarded(c->workspace_bytes)); /* the C kernel's: not used, and looked at */
    return cudaMemcpy(g->out, c->untouched_out, guarded(c->out_bytes), cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaMemcpy(g->lse, c->untouched_lse, guarded(c->lse_bytes), cudaMemcpyHostToDevice) == cudaSuccess &&
           cudaMemset(g->workspace, 0xFF, guarded(g->workspace_bytes)) == cudaSuccess &&
           cudaMemset(g->bad, 0xFF, 4) == cudaSuccess && cudaDeviceSynchronize() == cudaSuccess;
}

kvs_status gpu_case_launch(gpu_case *g, kvs_err *err)
{
    return kvs_mla_decode_cuda(&g->args, (uint8_t *)g->workspace + MLA_CASE_GUARD, g->workspace_bytes, g->bad,
                               &g->result, g->stream, err);
}

kvs_status gpu_case_run_on(gpu_case *g, device_queue *q, kvs_err *err)
{
    kvs_mla_decode_args a = g->args;
    uint64_t mark = 0;
    kvs_status s;

    a.seq_len = g->host->lens;
    a.block_table = g->host->table;
    a.kv_scale = g->host->args.kv_scale;
    s = q->dev->ops->mla_decode(q, &a, &g->result, &mark, err);
    return s == KVS_OK ? q->dev->ops->wait(q, mark, err) : s;
}

kvs_status gpu_case_extend_on(gpu_case *g, device_queue *q, kvs_err *err)
{
    const kvs_mla_decode_args *a = &g->args;
    int32_t starts[MLA_CASE_MAX_SEQS + 1];
    kvs_mla_extend_args e = {.view = a->view,
                             .q_nope = a->q_nope,
                             .q_pe = a->q_pe,
                             .out = a->out,
                             .lse = a->lse,
                             .q_start = starts,
                             .seq_len = g->host->lens,
                             .block_table = g->host->table,
                             .table_stride = a->table_stride,
                             .n_seqs = a->n_seqs,
                             .n_tokens = a->n_seqs * a->s_q,
                             .table_width = a->table_width,
                             .h_q = a->h_q,
                             .parts = a->parts,
                             .fixed_split = a->fixed_split,
                             .sm_scale = a->sm_scale,
                             .kv_scale = g->host->args.kv_scale};
    uint64_t mark = 0;
    kvs_status s;

    for (uint32_t i = 0; i <= a->n_seqs; i++)
        starts[i] = (int32_t)(i * a->s_q);
    s = q->dev->ops->mla_extend(q, &e, &g->result, &mark, err);
    return s == KVS_OK ? q->dev->ops->wait(q, mark, err) : s;
}

static bool workspace_guards_hold(const gpu_case *g)
{
    uint8_t guard[2][MLA_CASE_GUARD];

    if (cudaMemcpy(guard[0], g->workspace, MLA_CASE_GUARD, cudaMemcpyDeviceToHost) != cudaSuccess ||
        cudaMemcpy(guard[1], (uint8_t *)g->workspace + MLA_CASE_GUARD + g->workspace_bytes, MLA_CASE_GUARD,
                   cudaMemcpyDeviceToHost) != cudaSuccess)
        return false;
    for (size_t i = 0; i < MLA_CASE_GUARD; i++)
        if (guard[0][i] != 0xFF || guard[1][i] != 0xFF)
            return false;
    return true;
}

bool gpu_case_collect(gpu_case *g)
{
    mla_case *c = g->host;

    return cudaDeviceSynchronize() == cudaSuccess &&
           cudaMemcpy(c->out, g->out, guarded(c->out_bytes), cudaMemcpyDeviceToHost) == cudaSuccess &&
           cudaMemcpy(c->lse, g->lse, guarded(c->lse_bytes), cudaMemcpyDeviceToHost) == cudaSuccess &&
           cudaMemcpy(&g->result.bad, g->bad, 4, cudaMemcpyDeviceToHost) == cudaSuccess && workspace_guards_hold(g);
}

bool gpu_case_run(gpu_case *g, char *text, size_t cap)
{
    kvs_err err = {.msg = "setting up"};
    bool good = gpu_case_prepare(g) && gpu_case_launch(g, &err) == KVS_OK;

    if (!good) {
        (void)snprintf(text, cap, "%s", err.msg);
        return false;
    }
    if (!gpu_case_collect(g)) {
        (void)snprintf(text, cap, "collecting: %s", cudaGetErrorString(cudaGetLastError()));
        return false;
    }
    good = mla_case_guards_hold(g->host);
    (void)snprintf(text, cap, "%s", good ? "" : "something beside the results was written");
    return good;
}

bool gpu_case_judge(gpu_case *g, char *text, size_t cap)
{
    const mla_case *c = g->host;
    size_t rows = (size_t)c->args.n_seqs * c->args.s_q * c->args.h_q;
    double *out = malloc((rows + 1) * KVS_MLA_LATENT * sizeof *out), *lse = malloc((rows + 1) * sizeof *lse);
    char verdict[ORACLE_TEXT_BYTES] = "no memory";
    uint32_t longest = 1;
    bool good = out != NULL && lse != NULL;

    for (uint32_t i = 0; i < c->args.n_seqs; i++)
        longest = c->lens[i] > (int32_t)longest ? (uint32_t)c->lens[i] : longest;
    if (good && oracle_cuda_decode(&g->args, longest, out, lse)) {
        oracle_verdict v = oracle_compare(&c->args, out, lse);

        good = oracle_accepts(&v, verdict);
    } else
        good = false;
    (void)snprintf(text, cap, "%s", verdict);
    free(out);
    free(lse);
    return good;
}
#else
typedef int kvs_no_gpu_case; /* a translation unit holds a declaration */
#endif
