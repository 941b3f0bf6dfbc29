#include "daemon/core.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "kernels/mla_check.h"

/* Kernels over views: WRITE, DECODE and EXTEND.
 *
 * Everything that a kernel will use as an index or an address is checked here, on the daemon's own copy,
 * before a job exists.  WRITE is one decoder job with many calls; each call of DECODE and EXTEND is a job of its
 * own, with its own counters. */

enum { ELEMENT = 2, LATENT_BYTES = KVS_MLA_LATENT * ELEMENT, ROPE_BYTES = KVS_MLA_ROPE * ELEMENT };

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

/* ---- the end ---- */

static uint32_t each_call(compute *x, wire_out *o)
{
    wire_call_rep rep = {.n_calls = x->n_calls};

    o->len = WIRE_call_rep_BYTES;
    for (uint32_t i = 0; i < x->n_calls; i++) {
        const decoder_call *c = x->is_write ? &x->write_calls[i] : &x->jobs[i].call;
        bool back = x->jobs[x->is_write ? 0 : i].back;
        const job *j = &x->jobs[x->is_write ? 0 : i].job.job;
        wire_call_result y = {.status = KVS_E_BUSY};

        if (atomic_load(&j->state) == JOB_DROPPED)
            y.status = x->request->cancelled ? KVS_E_CANCELLED : KVS_E_DEADLINE;
        else if (back)
            y = (wire_call_result){c->status, c->result.parts, c->result.kernel, c->result.bad};
        rep.n_ok += y.status == KVS_OK;
        wire_put_call_result(o, &y);
    }
    wire_put_call_rep(&(wire_out){o->base, 0, WIRE_call_rep_BYTES, false}, &rep);
    return rep.n_ok;
}

static void rest(compute *x)
{
    region *g = x->seat->region;

    for (uint32_t i = 0; i < x->n_used; i++) {
        g->use[x->used[i]].computes--;
        region_rest(g, x->used[i]);
    }
    x->seat->users--;
    for (uint32_t i = 0; i < x->n_calls; i++)
        (x->is_write ? x->scratches[i] : x->jobs[i].scratch)->users--;
}

static bool compute_stop(request *r, bool running)
{
    compute *x = r->ext;
    bool untouched = true;

    for (uint32_t i = 0; i < x->n_jobs; i++) {
        job *j = &x->jobs[i].job.job;

        if (x->jobs[i].back) {
            untouched = untouched && j->status == KVS_E_CANCELLED;
            continue;
        }
        if (job_drop(j))
            continue;
        if (running)
            atomic_store(&j->stop, true);
        untouched = false;
    }
    decoder_kick(x->decoder);
    return untouched;
}

/* Its rows are not there: a STORE that waits for it must find the slots marked. */
static void mark_bad(compute *x)
{
    for (uint32_t i = 0; i < x->n_used && x->is_write; i++)
        x->seat->region->use[x->used[i]].bad = true;
}

static void compute_overdue(request *r, bool untouched)
{
    compute *x = r->ext;
    region *g = x->seat->region;

    for (uint32_t i = 0; i < x->n_used && !untouched && x->is_write; i++)
        g->use[x->used[i]].suspect = true;
    (void)each_call(x, request_out(r));
    if (untouched)
        mark_bad(x);
    for (uint32_t i = 0; i < x->n_jobs; i++)
        if (atomic_load(&x->jobs[i].job.job.state) == JOB_DROPPED)
            job_signal(&x->jobs[i].job.job, KVS_E_DEADLINE);
}

static const request_ops compute_ops = {compute_stop, compute_overdue};

static void all_back(compute *x, const kvs_err *err)
{
    request *r = x->request;
    core *c = r->peer->core;
    kvs_status worst = KVS_OK, s;

    for (uint32_t i = 0; i < x->n_jobs; i++)
        if (x->jobs[i].job.job.status == KVS_E_CANCELLED)
            worst = KVS_E_CANCELLED;
    rest(x);
    if (!r->answered) {
        uint32_t n_ok = each_call(x, request_out(r));

        s = n_ok == x->n_calls ? KVS_OK : KVS_E_PARTIAL;
        if (worst == KVS_E_CANCELLED)
            s = worst;
        if (c->lost != KVS_OK)
            s = c->lost;
        r->outcome = s;
        request_answer(r, s, err);
    } else {
        r->outcome = worst;
    }
    request_end(r);
}

static void compute_done(work *w)
{
    compute_job *cj = (compute_job *)(void *)w;
    compute *x = cj->owner;
    core *c = x->request->peer->core;
    job *j = &cj->job.job;
    kvs_status s = j->status;

    cj->back = true;
    core_note_status(c, s);
    if (s != KVS_OK)
        mark_bad(x); /* before the counter says that it failed */
    job_signal(j, x->request->answered && s != KVS_OK ? KVS_E_DEADLINE : s);
    if (++x->n_back == x->n_jobs)
        all_back(x, &j->err);
    core_rest(c);
}

/* ---- scratch extents ---- */

/* [T][h][n] with byte strides: does the last byte lie inside?  64-bit values from the wire, 128-bit
 * arithmetic. */
static kvs_status check_extent(const region *scratch, const char *field, uint32_t call, uint64_t offset, uint64_t rows,
                               uint64_t row_stride, uint64_t heads, uint64_t head_stride, uint64_t bytes,
                               uint64_t align, kvs_err *err)
{
    unsigned __int128 end = offset;

    if (offset % align != 0 || row_stride % align != 0 || head_stride % align != 0)
        return kvs_fail(err, KVS_E_INVALID, "call %u: %s: offset and strides must be multiples of %" PRIu64, call,
                        field, align);
    if (rows == 0 || heads == 0)
        return KVS_OK;
    end += (unsigned __int128)(rows - 1) * row_stride;
    end += (unsigned __int128)(heads - 1) * head_stride;
    end += bytes;
    if (end > scratch->bytes)
        return kvs_fail(err, KVS_E_RANGE,
                        "call %u: %s: offset %" PRIu64 ", strides %" PRIu64 " and %" PRIu64
                        " end behind the scratch of %" PRIu64 " bytes",
                        call, field, offset, row_stride, head_stride, scratch->bytes);
    return KVS_OK;
}

static kvs_status find_scratch(const compute *x, uint32_t id, uint32_t call, region_seat **ret, kvs_err *err)
{
    kvs_status s = peer_seat(x->request->peer, id, ret, err);
    uint32_t own = x->seat->region->device;

    if (s == KVS_OK && (*ret)->region->kind != WIRE_REGION_SCRATCH)
        return kvs_fail(err, KVS_E_INVALID, "call %u: scratch: region %u is not scratch", call, id);
    if (s == KVS_OK && (*ret)->region->device != own)
        return kvs_fail(err, KVS_E_INVALID, "call %u: scratch: region %u is on device %u, the slots are on %u", call,
                        id, (*ret)->region->device, own);
    return s;
}

/* What WRITE and DECODE have kernels for. */
#define READ_FORMATS                                                                                                   \
    (KVS_FORMAT_BIT(mla_bf16) | KVS_FORMAT_BIT(mla_fp16) | KVS_FORMAT_BIT(mla_fp8) | KVS_FORMAT_BIT(fp8_ds_mla))
#define WRITE_FORMATS (READ_FORMATS | KVS_FORMAT_BIT(mla_fp32))

static kvs_status check_plane(const region *g, uint32_t plane, uint64_t formats, uint32_t call, kvs_err *err)
{
    uint32_t format;

    if (plane >= g->map->n_planes)
        return kvs_fail(err, KVS_E_RANGE, "call %u: plane: %u is not below %u", call, plane, g->map->n_planes);
    format = g->map->planes[plane].format;
    if (format >= 64 || (formats >> format & 1) == 0)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "call %u: plane %u: format %s has no kernel here", call, plane,
                        kvs_format_name(format));
    return KVS_OK;
}

/* mla_fp8 has a scale, the others have none. */
static kvs_status check_scale(const region *g, uint32_t plane, float scale, uint32_t call, kvs_err *err)
{
    const bool has = g->map->planes[plane].format == KVS_FORMAT_mla_fp8;

    if (has && !(isfinite(scale) && scale > 0))
        return kvs_fail(err, KVS_E_INVALID, "call %u: kv_scale: %g is not finite and above 0", call, (double)scale);
    if (!has && scale != 0)
        return kvs_fail(err, KVS_E_INVALID, "call %u: kv_scale: %g, but plane %u has format %s and no scale", call,
                        (double)scale, plane, kvs_format_name(g->map->planes[plane].format));
    return KVS_OK;
}

/* ---- what both need ---- */

static kvs_status check_count(const core *c, const char *field, uint32_t n, kvs_err *err)
{
    if (n < 1 || n > core_max_keys(c))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %u is outside 1..%u", field, n, core_max_keys(c));
    return KVS_OK;
}

static void use_slot(compute *x, uint32_t slot)
{
    if (region_mark(x->seat->region, slot))
        x->used[x->n_used++] = slot;
}

static kvs_status make_compute(request *r, region_seat *seat, bool is_write, uint32_t n_jobs, uint32_t n_calls,
                               uint64_t most_slots, compute **ret, kvs_err *err)
{
    compute *x = request_alloc(r, 1, sizeof(*x));

    if (!x)
        return kvs_fail(err, KVS_E_NO_MEMORY, "compute: out of memory");
    if (most_slots > seat->region->n_slots)
        most_slots = seat->region->n_slots;
    x->request = r;
    x->seat = seat;
    x->decoder = core_device_of(r->peer->core, seat->region)->decoder;
    x->is_write = is_write;
    x->n_jobs = n_jobs;
    x->n_calls = n_calls;
    x->jobs = request_alloc(r, (uint64_t)n_jobs + 1, sizeof(x->jobs[0]));
    x->used = request_alloc(r, most_slots + 1, sizeof(x->used[0]));
    if (!x->jobs || !x->used)
        return kvs_fail(err, KVS_E_NO_MEMORY, "compute of %u calls: out of memory", n_calls);
    for (uint32_t i = 0; i < n_jobs; i++)
        x->jobs[i].owner = x;
    region_mark_begin(seat->region);
    r->ext = x;
    *ret = x;
    return request_room(r, WIRE_call_rep_BYTES + (uint64_t)n_calls * WIRE_call_result_BYTES, err);
}

static kvs_status submit(compute *x, kvs_err *err)
{
    kvs_status s = request_go(x->request, &compute_ops, err);

    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < x->n_used; i++)
        x->seat->region->use[x->used[i]].computes++;
    x->seat->users++;
    for (uint32_t i = 0; i < x->n_calls; i++)
        (x->is_write ? x->scratches[i] : x->jobs[i].scratch)->users++;
    for (uint32_t i = 0; i < x->n_jobs; i++)
        decoder_submit(x->decoder, &x->jobs[i].job);
    return KVS_OK;
}

/* ---- WRITE ---- */

static kvs_status check_write(peer *p, const wire_write_req *q, const directory_ns **ns, region_seat **seat,
                              kvs_err *err)
{
    kvs_status s = counter_check_after(q->after_counter, q->after_value, err);

    if (s == KVS_OK)
        s = counter_check_signal(q->signal_counter, q->signal_value, err);
    if (s == KVS_OK)
        s = check_count(p->core, "n_tokens", q->n_tokens, err);
    if (s == KVS_OK)
        s = check_count(p->core, "n_calls", q->n_calls, err);
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
        use_slot(x, (uint32_t)((uint64_t)mapping[i] / tokens));
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
    s = check_extent(scratch, "kv_c", i, w->kv_c_offset, n_tokens, w->kv_c_stride, 1, 0, latent, value, err);
    if (s == KVS_OK)
        s = check_extent(scratch, "k_pe", i, w->k_pe_offset, n_tokens, w->k_pe_stride, 1, 0, rope, value, err);
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
    kvs_status s = check_plane(x->seat->region, w->plane, WRITE_FORMATS, i, err);

    if (s == KVS_OK)
        s = check_scale(x->seat->region, w->plane, w->kv_scale, i, err);
    if (s == KVS_OK)
        s = find_scratch(x, w->scratch, i, &scratch, err);
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
    wire_in in = {calls, 0, (size_t)q->n_calls * WIRE_write_call_BYTES, false};

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
        s = make_compute(r, seat, true, 1, q.n_calls, q.n_tokens, &x, err);
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
    return submit(x, err);
}

void refused_write(peer *p, wire_in *in, kvs_status s)
{
    wire_write_req q;

    wire_get_write_req(in, &q);
    counter_signal(p, q.signal_counter, q.signal_value, s);
}

/* ---- DECODE and EXTEND ---- */

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
    s = check_count(p->core, "n_seqs", b->n_seqs, err);
    if (s == KVS_OK && b->kind == DECODER_EXTEND)
        s = check_count(p->core, "n_tokens", (uint32_t)b->n_rows, err);
    if (s == KVS_OK)
        s = check_count(p->core, "n_calls", b->n_calls, err);
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
        use_slot(x, (uint32_t)b->block_table[at + k]);
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
    kvs_status s = check_extent(sc, "q_nope", i, d->q_nope_offset, b->n_rows, d->q_nope_token, b->h_q, d->q_nope_head,
                                LATENT_BYTES, ELEMENT, err);

    if (s == KVS_OK)
        s = check_extent(sc, "q_pe", i, d->q_pe_offset, b->n_rows, d->q_pe_token, b->h_q, d->q_pe_head, ROPE_BYTES,
                         ELEMENT, err);
    if (s == KVS_OK)
        s = check_extent(sc, "out", i, d->out_offset, b->n_rows, d->out_token, b->h_q, d->out_head, LATENT_BYTES,
                         ELEMENT, err);
    if (s == KVS_OK)
        s = check_extent(sc, "lse", i, d->lse_offset, b->n_rows, d->lse_token, b->h_q, d->lse_head, sizeof(float),
                         sizeof(float), err);
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
        s = check_plane(x->seat->region, d->plane, READ_FORMATS, i, err);
    if (s == KVS_OK)
        s = check_scale(x->seat->region, d->plane, d->kv_scale, i, err);
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
        s = find_scratch(x, d->scratch, i, &cj->scratch, err);
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
        s = make_compute(r, seat, false, b->n_calls, b->n_calls, (uint64_t)b->n_seqs * b->table_width, &x, err);
    if (s == KVS_OK && b->kind == DECODER_EXTEND)
        s = read_starts(x, b, a.starts, err);
    if (s == KVS_OK)
        s = read_tables(x, b, a.lens, a.table, err);
    calls = (wire_in){a.calls, 0, (size_t)b->n_calls * WIRE_decode_call_BYTES, false};
    for (uint32_t i = 0; i < b->n_calls && s == KVS_OK; i++) {
        wire_decode_call d;

        wire_get_decode_call(&calls, &d);
        s = add_attend(x, i, &d, b, err);
    }
    return s == KVS_OK ? submit(x, err) : s;
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
