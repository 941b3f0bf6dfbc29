/* DECODE and EXTEND: attention over slots that the client may read. */
#include <inttypes.h>
#include <math.h>

#include "daemon/compute.h"
#include "kernels/mla_check.h"

enum { ELEMENT = 2, LATENT_BYTES = KVS_MLA_LATENT * ELEMENT, ROPE_BYTES = KVS_MLA_ROPE * ELEMENT };

/* What the calls of a request share: its sequences, and how many query rows (T) an operand has. */
typedef struct batch {
    decoder_kind kind;
    uint32_t ns, region, n_seqs, table_width, h_q, n_calls, flags;
    uint32_t s_q; /* DECODE: T is n_seqs * s_q.  EXTEND: 0 */
    uint64_t n_rows;
    int32_t *q_start, *seq_len, *block_table; /* q_start: EXTEND */
} batch;

static kvs_status check_batch(peer *p, const batch *b, const directory_ns **ns, region_seat **seat, kvs_err *err)
{
    kvs_status s;

    if (b->kind == DECODER_DECODE && (b->s_q < 1 || b->s_q > KVS_MLA_MAX_SQ))
        return kvs_fail(err, KVS_E_LIMIT, "s_q: %u is outside 1..%d", b->s_q, KVS_MLA_MAX_SQ);
    if (b->h_q < 1 || b->h_q > KVS_MLA_MAX_HEADS)
        return kvs_fail(err, KVS_E_LIMIT, "h_q: %u is outside 1..%d", b->h_q, KVS_MLA_MAX_HEADS);
    s = compute_check_count(p->core, "n_seqs", b->n_seqs, err);
    if (s == KVS_OK && b->kind == DECODER_EXTEND)
        s = compute_check_count(p->core, "n_tokens", (uint32_t)b->n_rows, err);
    if (s == KVS_OK)
        s = compute_check_count(p->core, "n_calls", b->n_calls, err);
    if (s != KVS_OK)
        return s;
    if (b->table_width < 1)
        return kvs_fail(err, KVS_E_LIMIT, "table_width: 0 is below 1");
    if ((b->flags & ~(uint32_t)WIRE_DECODE_FIXED_SPLIT) != 0)
        return kvs_fail(err, KVS_E_INVALID, "flags: 0x%x has unknown bits, known are 0x%x", b->flags,
                        WIRE_DECODE_FIXED_SPLIT);
    s = peer_ns(p, b->ns, ns, err);
    if (s == KVS_OK)
        s = peer_slots(p, b->region, b->ns, seat, err);
    return s;
}

static kvs_status read_starts(compute *x, batch *b, const uint8_t *array, kvs_err *err)
{
    b->q_start = request_alloc(x->request, (uint64_t)b->n_seqs + 1, sizeof(int32_t));
    if (!b->q_start)
        return kvs_fail(err, KVS_E_NO_MEMORY, "q_start of %u sequences: out of memory", b->n_seqs);
    for (uint32_t i = 0; i <= b->n_seqs; i++) {
        b->q_start[i] = (int32_t)wire_at_u32(array, i);
        if (b->q_start[i] < 0 || (uint64_t)b->q_start[i] > b->n_rows || (i > 0 && b->q_start[i] < b->q_start[i - 1]))
            return kvs_fail(err, KVS_E_RANGE, "q_start[%u]: %d is outside %d..%" PRIu64, i, b->q_start[i],
                            i > 0 ? b->q_start[i - 1] : 0, b->n_rows);
    }
    return KVS_OK;
}

static kvs_status read_row(compute *x, const batch *b, const uint8_t *table, uint32_t i, kvs_err *err)
{
    const region *g = x->seat->region;
    uint64_t tokens = g->map->tokens_per_block, most = b->table_width * tokens;
    uint64_t at = (uint64_t)i * b->table_width;
    uint32_t n;

    if (b->seq_len[i] < 0 || (uint64_t)b->seq_len[i] > most)
        return kvs_fail(err, KVS_E_RANGE, "seq_len[%u]: %d is outside 0..%" PRIu64, i, b->seq_len[i], most);
    n = (uint32_t)(((uint64_t)b->seq_len[i] + tokens - 1) / tokens);
    for (uint32_t k = 0; k < b->table_width; k++) {
        kvs_status s;

        b->block_table[at + k] = (int32_t)wire_at_u32(table, at + k);
        if (k >= n)
            continue; /* never read */
        if (b->block_table[at + k] < 0 || (uint32_t)b->block_table[at + k] >= g->n_slots)
            return kvs_fail(err, KVS_E_RANGE, "block_table[%u][%u]: %d is outside 0..%u", i, k, b->block_table[at + k],
                            g->n_slots - 1);
        s = region_may_read(x->seat, (uint32_t)b->block_table[at + k]);
        if (s != KVS_OK)
            return kvs_fail(err, s, "block_table[%u][%u]: slot %d is not held by this client: %s", i, k,
                            b->block_table[at + k], kvs_status_text(s));
        compute_use_slot(x, (uint32_t)b->block_table[at + k]);
    }
    return KVS_OK;
}

static kvs_status read_tables(compute *x, batch *b, const uint8_t *lens, const uint8_t *table, kvs_err *err)
{
    b->seq_len = request_alloc(x->request, (uint64_t)b->n_seqs + 1, sizeof(int32_t));
    b->block_table = request_alloc(x->request, (uint64_t)b->n_seqs * b->table_width + 1, sizeof(int32_t));
    if (!b->seq_len || !b->block_table)
        return kvs_fail(err, KVS_E_NO_MEMORY, "tables of %u sequences: out of memory", b->n_seqs);
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        kvs_status s;

        b->seq_len[i] = (int32_t)wire_at_u32(lens, i);
        s = read_row(x, b, table, i, err);
        if (s != KVS_OK)
            return s;
    }
    return KVS_OK;
}

static kvs_status check_operands(const region *sc, uint32_t i, const wire_decode_call *d, const batch *b, kvs_err *err)
{
    kvs_status s = compute_check_extent(sc, "q_nope", i, d->q_nope_offset, b->n_rows, d->q_nope_token, b->h_q,
                                        d->q_nope_head, LATENT_BYTES, ELEMENT, err);

    if (s == KVS_OK)
        s = compute_check_extent(sc, "q_pe", i, d->q_pe_offset, b->n_rows, d->q_pe_token, b->h_q, d->q_pe_head,
                                 ROPE_BYTES, ELEMENT, err);
    if (s == KVS_OK)
        s = compute_check_extent(sc, "out", i, d->out_offset, b->n_rows, d->out_token, b->h_q, d->out_head,
                                 LATENT_BYTES, ELEMENT, err);
    if (s == KVS_OK)
        s = compute_check_extent(sc, "lse", i, d->lse_offset, b->n_rows, d->lse_token, b->h_q, d->lse_head,
                                 sizeof(float), sizeof(float), err);
    return s;
}

static kvs_status check_call(const compute *x, uint32_t i, const wire_decode_call *d, kvs_err *err)
{
    kvs_status s = counter_check_after(d->after_counter, d->after_value, err);

    if (s == KVS_OK)
        s = counter_check_signal(d->signal_counter, d->signal_value, err);
    if (s == KVS_OK && d->parts > KVS_MLA_MAX_PARTS)
        s = kvs_fail(err, KVS_E_LIMIT, "call %u: parts: %u is outside 0..%d", i, d->parts, KVS_MLA_MAX_PARTS);
    if (s == KVS_OK && !isfinite(d->sm_scale))
        s = kvs_fail(err, KVS_E_INVALID, "call %u: sm_scale: %g is not finite", i, (double)d->sm_scale);
    if (s == KVS_OK && d->reserved != 0)
        s = kvs_fail(err, KVS_E_INVALID, "call %u: reserved: %u is not 0", i, d->reserved);
    if (s == KVS_OK)
        s = compute_check_plane(x->seat->region, d->plane, COMPUTE_READS, i, err);
    if (s == KVS_OK)
        s = compute_check_scale(x->seat->region, d->plane, d->kv_scale, i, err);
    return s;
}

static kvs_strided operand(const region *sc, uint64_t offset, uint64_t token, uint64_t head)
{
    return (kvs_strided){sc->base + offset, token, head};
}

static kvs_mla_decode_args decode_args(const compute *x, const compute_job *cj, const wire_decode_call *d,
                                       const batch *b)
{
    const region *sc = cj->scratch->region;

    return (kvs_mla_decode_args){.view = region_map_view(x->seat->region->map, d->plane),
                                 .q_nope = operand(sc, d->q_nope_offset, d->q_nope_token, d->q_nope_head),
                                 .q_pe = operand(sc, d->q_pe_offset, d->q_pe_token, d->q_pe_head),
                                 .out = operand(sc, d->out_offset, d->out_token, d->out_head),
                                 .lse = operand(sc, d->lse_offset, d->lse_token, d->lse_head),
                                 .seq_len = b->seq_len,
                                 .block_table = b->block_table,
                                 .table_stride = b->table_width,
                                 .n_seqs = b->n_seqs,
                                 .table_width = b->table_width,
                                 .s_q = b->s_q,
                                 .h_q = b->h_q,
                                 .parts = d->parts,
                                 .fixed_split = (b->flags & WIRE_DECODE_FIXED_SPLIT) != 0,
                                 .sm_scale = d->sm_scale,
                                 .kv_scale = &cj->kv_scale};
}

static kvs_mla_extend_args extend_args(const compute *x, const compute_job *cj, const wire_decode_call *d,
                                       const batch *b)
{
    const region *sc = cj->scratch->region;

    return (kvs_mla_extend_args){.view = region_map_view(x->seat->region->map, d->plane),
                                 .q_nope = operand(sc, d->q_nope_offset, d->q_nope_token, d->q_nope_head),
                                 .q_pe = operand(sc, d->q_pe_offset, d->q_pe_token, d->q_pe_head),
                                 .out = operand(sc, d->out_offset, d->out_token, d->out_head),
                                 .lse = operand(sc, d->lse_offset, d->lse_token, d->lse_head),
                                 .q_start = b->q_start,
                                 .seq_len = b->seq_len,
                                 .block_table = b->block_table,
                                 .table_stride = b->table_width,
                                 .n_seqs = b->n_seqs,
                                 .n_tokens = (uint32_t)b->n_rows,
                                 .table_width = b->table_width,
                                 .h_q = b->h_q,
                                 .parts = d->parts,
                                 .fixed_split = (b->flags & WIRE_DECODE_FIXED_SPLIT) != 0,
                                 .sm_scale = d->sm_scale,
                                 .kv_scale = &cj->kv_scale};
}

/* What the kernel will refuse is refused here: then nothing has begun, and every call is signalled. */
static kvs_status check_args(uint32_t i, const decoder_call *c, kvs_err *err)
{
    kvs_err why = {0};
    kvs_status s = c->kind == DECODER_EXTEND ? kvs_mla_extend_check(&c->args.extend, &why)
                                             : kvs_mla_decode_check(&c->args.decode, &why);

    return s == KVS_OK ? KVS_OK : kvs_fail(err, s, "call %u: %s", i, why.msg);
}

static kvs_status add_attend(compute *x, uint32_t i, const wire_decode_call *d, const batch *b, kvs_err *err)
{
    compute_job *cj = &x->jobs[i];
    kvs_status s = check_call(x, i, d, err);

    if (s == KVS_OK)
        s = compute_find_scratch(x, d->scratch, i, &cj->scratch, err);
    if (s == KVS_OK)
        s = check_operands(cj->scratch->region, i, d, b, err);
    if (s != KVS_OK)
        return s;
    cj->kv_scale = d->kv_scale;
    cj->call.kind = b->kind;
    if (b->kind == DECODER_EXTEND)
        cj->call.args.extend = extend_args(x, cj, d, b);
    else
        cj->call.args.decode = decode_args(x, cj, d, b);
    s = check_args(i, &cj->call, err);
    if (s != KVS_OK)
        return s;
    cj->job.calls = &cj->call;
    cj->job.n_calls = 1;
    job_init(&cj->job.job, compute_done);
    job_fill(&cj->job.job, x->request->peer, d->after_counter, d->after_value, d->signal_counter, d->signal_value);
    cj->job.job.signal_by_worker = true;
    return KVS_OK;
}

/* The arrays behind the message's head, in its order. */
typedef struct batch_arrays {
    const uint8_t *calls, *starts, *lens, *table;
} batch_arrays;

static kvs_status attend(request *r, wire_in *in, batch *b, kvs_err *err)
{
    const directory_ns *ns = NULL;
    region_seat *seat = NULL;
    batch_arrays a = {0};
    compute *x = NULL;
    wire_in calls;
    kvs_status s;

    a.calls = wire_get_array(in, b->n_calls, WIRE_decode_call_BYTES);
    if (b->kind == DECODER_EXTEND)
        a.starts = wire_get_array(in, (uint64_t)b->n_seqs + 1, 4);
    a.lens = wire_get_array(in, b->n_seqs, 4);
    a.table = wire_get_array(in, (uint64_t)b->n_seqs * b->table_width, 4);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_batch(r->peer, b, &ns, &seat, err);
    if (s == KVS_OK)
        s = compute_make(r, seat, false, b->n_calls, b->n_calls, (uint64_t)b->n_seqs * b->table_width, &x, err);
    if (s == KVS_OK && b->kind == DECODER_EXTEND)
        s = read_starts(x, b, a.starts, err);
    if (s == KVS_OK)
        s = read_tables(x, b, a.lens, a.table, err);
    calls = (wire_in){.base = a.calls, .len = (size_t)b->n_calls * WIRE_decode_call_BYTES};
    for (uint32_t i = 0; i < b->n_calls && s == KVS_OK; i++) {
        wire_decode_call d;

        wire_get_decode_call(&calls, &d);
        s = add_attend(x, i, &d, b, err);
    }
    return s == KVS_OK ? compute_submit(x, err) : s;
}

kvs_status op_decode(request *r, wire_in *in, kvs_err *err)
{
    wire_decode_req q;
    batch b;

    wire_get_decode_req(in, &q);
    b = (batch){.kind = DECODER_DECODE,
                .ns = q.ns,
                .region = q.region,
                .n_seqs = q.n_seqs,
                .table_width = q.table_width,
                .h_q = q.h_q,
                .n_calls = q.n_calls,
                .flags = q.flags,
                .s_q = q.s_q,
                .n_rows = (uint64_t)q.n_seqs * q.s_q};
    return attend(r, in, &b, err);
}

kvs_status op_extend(request *r, wire_in *in, kvs_err *err)
{
    wire_extend_req q;
    batch b;

    wire_get_extend_req(in, &q);
    b = (batch){.kind = DECODER_EXTEND,
                .ns = q.ns,
                .region = q.region,
                .n_seqs = q.n_seqs,
                .table_width = q.table_width,
                .h_q = q.h_q,
                .n_calls = q.n_calls,
                .flags = q.flags,
                .n_rows = q.n_tokens};
    return attend(r, in, &b, err);
}

static void refused_calls(peer *p, wire_in *in, uint32_t n_calls, kvs_status s)
{
    for (uint32_t i = 0; i < n_calls && in->len - in->pos >= WIRE_decode_call_BYTES; i++) {
        wire_decode_call d;

        wire_get_decode_call(in, &d);
        counter_signal(p, d.signal_counter, d.signal_value, s);
    }
}

void refused_decode(peer *p, wire_in *in, kvs_status s)
{
    wire_decode_req q;

    wire_get_decode_req(in, &q);
    refused_calls(p, in, q.n_calls, s);
}

void refused_extend(peer *p, wire_in *in, kvs_status s)
{
    wire_extend_req q;

    wire_get_extend_req(in, &q);
    refused_calls(p, in, q.n_calls, s);
}
