#include "daemon/compute.h"

#include <inttypes.h>
#include <math.h>

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
        g->use[x->used[i]].writes -= x->is_write;
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
            untouched = untouched && atomic_load(&j->state) == JOB_DROPPED;
            continue;
        }
        if (decoder_drop(x->decoder, &x->jobs[i].job))
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

/* Of the first one that has any: the last one back may be one that never ran, behind the one that was stopped. */
static const kvs_err *first_error(const compute *x)
{
    uint32_t i = 0;

    while (i + 1 < x->n_jobs && x->jobs[i].job.job.status == KVS_OK)
        i++;
    return &x->jobs[i].job.job.err;
}

static void all_back(compute *x)
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
        request_answer(r, s, first_error(x));
    } else {
        r->outcome = worst;
    }
    request_end(r);
}

void compute_done(work *w)
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
        all_back(x);
    core_rest(c);
}

/* ---- the beginning ---- */

void compute_use_slot(compute *x, uint32_t slot)
{
    if (region_mark(x->seat->region, slot))
        x->used[x->n_used++] = slot;
}

kvs_status compute_make(request *r, region_seat *seat, bool is_write, uint32_t n_jobs, uint32_t n_calls,
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

kvs_status compute_submit(compute *x, kvs_err *err)
{
    kvs_status s = request_go(x->request, &compute_ops, err);

    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < x->n_used; i++) {
        x->seat->region->use[x->used[i]].computes++;
        x->seat->region->use[x->used[i]].writes += x->is_write;
    }
    x->seat->users++;
    for (uint32_t i = 0; i < x->n_calls; i++)
        (x->is_write ? x->scratches[i] : x->jobs[i].scratch)->users++;
    for (uint32_t i = 0; i < x->n_jobs; i++)
        decoder_submit(x->decoder, &x->jobs[i].job);
    return KVS_OK;
}

/* ---- checks ---- */

kvs_status compute_check_count(const core *c, const char *field, uint32_t n, kvs_err *err)
{
    if (n < 1 || n > core_max_keys(c))
        return kvs_fail(err, KVS_E_LIMIT, "%s: %u is outside 1..%u", field, n, core_max_keys(c));
    return KVS_OK;
}

/* 64-bit values from the wire, 128-bit arithmetic. */
kvs_status compute_check_extent(const region *scratch, const char *field, uint32_t call, uint64_t offset, uint64_t rows,
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

kvs_status compute_find_scratch(const compute *x, uint32_t id, uint32_t call, region_seat **ret, kvs_err *err)
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

kvs_status compute_check_plane(const region *g, uint32_t plane, uint64_t formats, uint32_t call, kvs_err *err)
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

kvs_status compute_check_scale(const region *g, uint32_t plane, float scale, uint32_t call, kvs_err *err)
{
    const bool has = g->map->planes[plane].format == KVS_FORMAT_mla_fp8;

    if (has && !(isfinite(scale) && scale > 0))
        return kvs_fail(err, KVS_E_INVALID, "call %u: kv_scale: %g is not finite and above 0", call, (double)scale);
    if (!has && scale != 0)
        return kvs_fail(err, KVS_E_INVALID, "call %u: kv_scale: %g, but plane %u has format %s and no scale", call,
                        (double)scale, plane, kvs_format_name(g->map->planes[plane].format));
    return KVS_OK;
}
