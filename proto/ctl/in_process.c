#include "proto/ctl/in_process.h"

#include <stdlib.h>

#include "kernels/device.h"
#include "kernels/device_cuda.h"

struct in_process {
    device *dev;
    device_queue *queue;
};

/* The GPU is found by its UUID: the daemon may count them differently. */
static kvs_status open_device(kvs_client *c, kvs_region *region, device **ret, kvs_err *err)
{
    kvs_region_info info;
    kvs_server server;
    uint32_t ordinal = 0;
    kvs_status s;

    kvs_region_get(region, &info);
    kvs_server_get(c, &server);
    if (info.memory == KVS_MEMORY_MEMFD)
        return device_cpu_open(ret, err);
    if (info.memory != KVS_MEMORY_CUDA_VMM || info.device >= server.n_devices)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "region: memory of kind %u on device %u of %u", info.memory,
                        info.device, server.n_devices);
    s = device_cuda_find(server.device_uuid[info.device], &ordinal, err);
    return s == KVS_OK ? device_cuda_open(ret, ordinal, err) : s;
}

kvs_status in_process_open(in_process **ret, kvs_client *c, kvs_region *region, kvs_err *err)
{
    in_process *p = calloc(1, sizeof *p);
    kvs_status s;

    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "in-process: no memory for %zu bytes", sizeof *p);
    s = open_device(c, region, &p->dev, err);
    if (s == KVS_OK)
        s = p->dev->ops->queue_open(p->dev, DEVICE_COMPUTE, &p->queue, err);
    if (s != KVS_OK) {
        in_process_close(p);
        return s;
    }
    *ret = p;
    return KVS_OK;
}

void in_process_close(in_process *p)
{
    if (p == NULL)
        return;
    if (p->queue != NULL)
        p->dev->ops->queue_close(p->queue);
    if (p->dev != NULL)
        p->dev->ops->close(p->dev);
    free(p);
}

/* One plane of every slot. */
static kvs_status view_of(const kvs_namespace *desc, kvs_region *region, uint32_t plane, kvs_view *ret, kvs_err *err)
{
    kvs_region_info info;
    void *at = NULL;
    uint64_t bytes = 0;
    kvs_status s;

    if (plane >= desc->n_planes)
        return kvs_fail(err, KVS_E_INVALID, "plane: %u is outside 0..%u", plane, desc->n_planes - 1);
    if ((s = kvs_region_map(region, &at, &bytes, err)) != KVS_OK)
        return s;
    kvs_region_get(region, &info);
    *ret = (kvs_view){.base = (uint8_t *)at + kvs_namespace_plane_offset(desc, plane),
                      .block_stride = info.slot_stride,
                      .page_bytes = desc->planes[plane].page_bytes,
                      .n_blocks = info.n_slots,
                      .tokens_per_block = desc->tokens_per_block,
                      .row_bytes = desc->planes[plane].row_bytes,
                      .format = desc->planes[plane].format};
    return KVS_OK;
}

static kvs_strided operand(void *scratch, kvs_operand o)
{
    return (kvs_strided){(uint8_t *)scratch + o.offset, o.token, o.head};
}

static kvs_status decode_one(in_process *p, const kvs_namespace *desc, const kvs_decode_args *a,
                             const kvs_decode_call *call, kvs_mla_decode_result *ret, kvs_err *err)
{
    kvs_mla_decode_args k = {.seq_len = a->seq_len,
                             .block_table = a->block_table,
                             .table_stride = a->table_width,
                             .n_seqs = a->n_seqs,
                             .table_width = a->table_width,
                             .s_q = a->s_q,
                             .h_q = a->h_q,
                             .parts = call->parts,
                             .fixed_split = (a->flags & KVS_DECODE_FIXED_SPLIT) != 0,
                             .sm_scale = call->sm_scale,
                             .kv_scale = &call->kv_scale};
    void *scratch = NULL;
    uint64_t bytes = 0, mark = 0;
    kvs_status s = view_of(desc, a->region, call->plane, &k.view, err);

    if (s == KVS_OK)
        s = kvs_region_map(call->scratch, &scratch, &bytes, err);
    if (s != KVS_OK)
        return s;
    k.q_nope = operand(scratch, call->q_nope);
    k.q_pe = operand(scratch, call->q_pe);
    k.out = operand(scratch, call->out);
    k.lse = operand(scratch, call->lse);
    s = p->dev->ops->mla_decode(p->queue, &k, ret, &mark, err);
    return s == KVS_OK ? p->dev->ops->wait(p->queue, mark, err) : s;
}

kvs_status in_process_decode(in_process *p, const kvs_namespace *desc, const kvs_decode_args *a, kvs_err *err)
{
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < a->n_calls && s == KVS_OK; i++) {
        kvs_mla_decode_result r = {0};

        s = decode_one(p, desc, a, &a->calls[i], &r, err);
        a->results[i] = (kvs_call_result){s, r.parts, r.kernel, r.bad};
    }
    return s;
}
