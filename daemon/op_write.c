/* WRITE: rows of new tokens into private slots. */
#include <inttypes.h>

#include "daemon/compute.h"
#include "kernels/mla_check.h"

static kvs_status check_write(peer *p, const wire_write_req *q, const directory_ns **ns, region_seat **seat,
                              kvs_err *err)
{
    kvs_status s = counter_check_after(q->after_counter, q->after_value, err);

    if (s == KVS_OK)
        s = counter_check_signal(q->signal_counter, q->signal_value, err);
    if (s == KVS_OK)
        s = compute_check_count(p->core, "n_tokens", q->n_tokens, err);
    if (s == KVS_OK)
        s = compute_check_count(p->core, "n_calls", q->n_calls, err);
    if (s == KVS_OK)
        s = peer_ns(p, q->ns, ns, err);
    if (s == KVS_OK)
        s = peer_slots(p, q->region, q->ns, seat, err);
    return s;
}

static kvs_status read_mapping(compute *x, const uint8_t *array, uint32_t n, const int64_t **ret, kvs_err *err)
{
    const region *g = x->seat->region;
    uint64_t tokens = g->map->tokens_per_block, end = g->n_slots * tokens;
    int64_t *mapping = request_alloc(x->request, (uint64_t)n + 1, sizeof(*mapping));

    if (!mapping)
        return kvs_fail(err, KVS_E_NO_MEMORY, "slot_mapping of %u tokens: out of memory", n);
    for (uint32_t i = 0; i < n; i++) {
        kvs_status s;

        mapping[i] = (int64_t)wire_at_u64(array, i);
        if (mapping[i] < 0)
            continue;
        if ((uint64_t)mapping[i] >= end)
            return kvs_fail(err, KVS_E_RANGE, "slot_mapping[%u]: %" PRId64 " is not below %" PRIu64, i, mapping[i],
                            end);
        s = region_may_write(x->seat, (uint32_t)((uint64_t)mapping[i] / tokens));
        if (s != KVS_OK)
            return kvs_fail(err, s, "slot_mapping[%u]: %" PRId64 ": slot %" PRIu64 " is not private to this client: %s",
                            i, mapping[i], (uint64_t)mapping[i] / tokens, kvs_status_text(s));
        compute_use_slot(x, (uint32_t)((uint64_t)mapping[i] / tokens));
    }
    *ret = mapping;
    return KVS_OK;
}

/* Where the client does not say what the rows are: the plane's own type, bf16 for fp8. */
static uint32_t source_type(const region *g, const wire_write_call *w)
{
    const uint32_t format = g->map->planes[w->plane].format;

    if (w->src_type != 0)
        return w->src_type;
    return format == KVS_FORMAT_mla_fp16   ? KVS_VALUE_FP16
           : format == KVS_FORMAT_mla_fp32 ? KVS_VALUE_FP32
                                           : KVS_VALUE_BF16;
}

/* Where the rows lie in scratch. */
static kvs_status check_rows(const region *scratch, uint32_t i, wire_write_call *w, uint32_t n_tokens, uint64_t value,
                             kvs_err *err)
{
    const uint64_t latent = KVS_MLA_LATENT * value, rope = KVS_MLA_ROPE * value;
    kvs_status s;

    if (value == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "call %u: src_type: %u is no type of values", i, w->src_type);
    if (n_tokens == 1) { /* one row has no stride */
        w->kv_c_stride = latent;
        w->k_pe_stride = rope;
    }
    if (w->kv_c_stride < latent || w->k_pe_stride < rope)
        return kvs_fail(err, KVS_E_INVALID,
                        "call %u: strides: %" PRIu64 " and %" PRIu64 " are below rows of %" PRIu64 " and %" PRIu64, i,
                        w->kv_c_stride, w->k_pe_stride, latent, rope);
    s = compute_check_extent(scratch, "kv_c", i, w->kv_c_offset, n_tokens, w->kv_c_stride, 1, 0, latent, value, err);
    if (s == KVS_OK)
        s = compute_check_extent(scratch, "k_pe", i, w->k_pe_offset, n_tokens, w->k_pe_stride, 1, 0, rope, value, err);
    return s;
}

/* What the kernel will refuse is refused here: then nothing has begun. */
static kvs_status check_write_args(uint32_t i, const kvs_mla_write_args *a, kvs_err *err)
{
    kvs_err why = {0};
    uint32_t type;
    kvs_status s = kvs_mla_write_check(a, &type, &why);

    return s == KVS_OK ? KVS_OK : kvs_fail(err, s, "call %u: %s", i, why.msg);
}

static kvs_status add_write(compute *x, uint32_t i, wire_write_call *w, uint32_t n_tokens, const int64_t *mapping,
                            kvs_err *err)
{
    region_seat *scratch = NULL;
    kvs_mla_write_args *a = &x->write_calls[i].args.write;
    kvs_status s = compute_check_plane(x->seat->region, w->plane, COMPUTE_WRITES, i, err);

    if (s == KVS_OK)
        s = compute_check_scale(x->seat->region, w->plane, w->kv_scale, i, err);
    if (s == KVS_OK)
        s = compute_find_scratch(x, w->scratch, i, &scratch, err);
    if (s == KVS_OK)
        s = check_rows(scratch->region, i, w, n_tokens, kvs_value_bytes(source_type(x->seat->region, w)), err);
    if (s != KVS_OK)
        return s;
    x->scratches[i] = scratch;
    x->write_scales[i] = w->kv_scale;
    x->write_calls[i].kind = DECODER_WRITE;
    *a = (kvs_mla_write_args){.view = region_map_view(x->seat->region->map, w->plane),
                              .kv_c = scratch->region->base + w->kv_c_offset,
                              .k_pe = scratch->region->base + w->k_pe_offset,
                              .kv_c_stride = w->kv_c_stride,
                              .k_pe_stride = w->k_pe_stride,
                              .slot_mapping = mapping,
                              .n_tokens = n_tokens,
                              .src_type = source_type(x->seat->region, w),
                              .scale = &x->write_scales[i]};
    return check_write_args(i, a, err);
}

static kvs_status add_writes(compute *x, const wire_write_req *q, const uint8_t *calls, const int64_t *mapping,
                             kvs_err *err)
{
    wire_in in = {.base = calls, .len = (size_t)q->n_calls * WIRE_write_call_BYTES};

    x->write_calls = request_alloc(x->request, q->n_calls, sizeof(x->write_calls[0]));
    x->scratches = request_alloc(x->request, q->n_calls, sizeof(region_seat *));
    x->write_scales = request_alloc(x->request, q->n_calls, sizeof(x->write_scales[0]));
    if (!x->write_calls || !x->scratches || !x->write_scales)
        return kvs_fail(err, KVS_E_NO_MEMORY, "write of %u calls: out of memory", q->n_calls);
    for (uint32_t i = 0; i < q->n_calls; i++) {
        wire_write_call w;
        kvs_status s;

        wire_get_write_call(&in, &w);
        s = add_write(x, i, &w, q->n_tokens, mapping, err);
        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

kvs_status op_write(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns = NULL;
    region_seat *seat = NULL;
    const uint8_t *calls, *array;
    const int64_t *mapping = NULL;
    wire_write_req q;
    compute *x = NULL;
    kvs_status s;

    wire_get_write_req(in, &q);
    calls = wire_get_array(in, q.n_calls, WIRE_write_call_BYTES);
    array = wire_get_array(in, q.n_tokens, 8);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_write(r->peer, &q, &ns, &seat, err);
    if (s == KVS_OK)
        s = compute_make(r, seat, true, 1, q.n_calls, q.n_tokens, &x, err);
    if (s == KVS_OK)
        s = read_mapping(x, array, q.n_tokens, &mapping, err);
    if (s == KVS_OK)
        s = add_writes(x, &q, calls, mapping, err);
    if (s != KVS_OK)
        return s;
    job_init(&x->jobs[0].job.job, compute_done);
    job_fill(&x->jobs[0].job.job, r->peer, q.after_counter, q.after_value, q.signal_counter, q.signal_value);
    x->jobs[0].job.job.signal_by_worker = true;
    x->jobs[0].job.calls = x->write_calls;
    x->jobs[0].job.n_calls = q.n_calls;
    return compute_submit(x, err);
}

void refused_write(peer *p, wire_in *in, kvs_status s)
{
    wire_write_req q;

    wire_get_write_req(in, &q);
    counter_signal(p, q.signal_counter, q.signal_value, s);
}
