/* Client pack, the callers' side: arguments, jobs, and the requests that stand for them. */
#include "proto/client/pack_impl.h"

#include <stdlib.h>
#include <string.h>

enum { CHUNK_BYTES = 64 << 20, CHUNKS = 4, MAX_CTAS = 1024, MAX_STAGING = 1 << 20 };

/* ---- arguments of open ---- */

static kvs_status number_check(const char *what, uint64_t value, uint64_t low, uint64_t high, kvs_err *err)
{
    return value < low || value > high
               ? kvs_fail(err, KVS_E_RANGE, "%s: %llu is outside %llu..%llu", what, (unsigned long long)value,
                          (unsigned long long)low, (unsigned long long)high)
               : KVS_OK;
}

/* Numbers that the caller left to us. */
static kvs_status sizes_set(kvs_pack *p, const kvs_pack_args *a, kvs_err *err)
{
    uint64_t one = p->ns->info.slot_bytes, fit = CHUNK_BYTES / one;
    kvs_server v;
    kvs_status s;

    p->device = a->device;
    kvs_server_get(p->c, &v);
    if (p->device < v.n_devices)
        memcpy(p->uuid, v.device_uuid[p->device], sizeof p->uuid);
    p->first_counter = a->first_counter;
    p->n_blocks = a->n_blocks;
    p->ctas = a->ctas;
    p->chunk = a->chunk != 0 ? a->chunk : fit < 1 ? 1 : fit > CLIENT_PACK_PAIRS ? CLIENT_PACK_PAIRS : (uint32_t)fit;
    p->n_staging = a->n_staging != 0 ? a->n_staging : CHUNKS * p->chunk;
    s = number_check("n_blocks", p->n_blocks, 1, UINT32_MAX, err);
    if (s == KVS_OK)
        s = number_check("chunk", p->chunk, 1, CLIENT_PACK_PAIRS, err);
    if (s == KVS_OK)
        s = number_check("n_staging", p->n_staging, p->chunk, MAX_STAGING, err);
    if (s == KVS_OK)
        s = number_check("ctas", p->ctas, 0, MAX_CTAS, err);
    if (s == KVS_OK)
        s = number_check("first_counter", p->first_counter, 0, WIRE_COUNTERS - 2, err);
    return s == KVS_OK && a->reserved != 0 ? kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", a->reserved) : s;
}

static kvs_status plane_set(kvs_pack *p, uint32_t i, const kvs_pack_plane *from, client_pack_plane *to, kvs_err *err)
{
    uint64_t base = (uint64_t)(uintptr_t)from->base, most = (UINT64_C(1) << 47) - to->bytes;

    if (base == 0 || base % 16 != 0)
        return kvs_fail(err, KVS_E_INVALID, "planes[%u].base: 0x%llx is no multiple of 16", i,
                        (unsigned long long)base);
    if (from->stride % 16 != 0 || from->stride < to->bytes || from->stride >= KVS_MAX_OFFSET)
        return kvs_fail(err, KVS_E_INVALID, "planes[%u].stride: %llu is outside %llu..2^40, or no multiple of 16", i,
                        (unsigned long long)from->stride, (unsigned long long)to->bytes);
    if ((p->n_blocks - 1) > (most - (base < most ? base : most)) / from->stride)
        return kvs_fail(err, KVS_E_RANGE, "planes[%u]: %u blocks of stride %llu from 0x%llx end behind 2^47", i,
                        p->n_blocks, (unsigned long long)from->stride, (unsigned long long)base);
    to->base = base;
    to->stride = from->stride;
    return KVS_OK;
}

static kvs_status planes_set(kvs_pack *p, const kvs_pack_args *a, kvs_err *err)
{
    kvs_plane *planes = calloc(KVS_MAX_PLANES, sizeof *planes);
    kvs_namespace desc;
    kvs_status s = KVS_OK;

    p->n_planes = a->n_planes;
    p->planes = calloc(a->n_planes, sizeof *p->planes);
    if (planes == NULL || p->planes == NULL)
        s = kvs_fail(err, KVS_E_NO_MEMORY, "pack: no memory for %u planes", a->n_planes);
    if (s == KVS_OK)
        s = kvs_namespace_decode(p->ns->canon, p->ns->desc_len, planes, KVS_MAX_PLANES, &desc, err);
    for (uint32_t i = 0; i < a->n_planes && s == KVS_OK; i++) {
        p->planes[i].bytes = planes[i].page_bytes;
        p->planes[i].offset = kvs_namespace_plane_offset(&desc, i);
        s = plane_set(p, i, &a->planes[i], &p->planes[i], err);
    }
    free(planes);
    return s;
}

static kvs_status open_check(const kvs_client *c, const kvs_pack_args *a, kvs_err *err)
{
    kvs_status s = GIVEN(err, "pack_open", {"ns", a->ns}, {"planes", given_some(a->n_planes, a->planes)});

    if (s == KVS_OK)
        s = client_check_own(c, err);
    if (s != KVS_OK)
        return s;
    if (a->ns->c != c || a->ns->by_id)
        return kvs_fail(err, KVS_E_INVALID, "ns: not opened by its description on this handle");
    if (a->n_planes != a->ns->info.n_planes)
        return kvs_fail(err, KVS_E_INVALID, "n_planes: %u, but the namespace has %u", a->n_planes,
                        a->ns->info.n_planes);
    return KVS_OK;
}

/* ---- life ---- */

static void pack_destroy(kvs_pack *p)
{
    lane_close(&p->lanes[0]);
    lane_close(&p->lanes[1]);
    free(p->planes);
    free(p);
}

kvs_status kvs_pack_open(kvs_client *c, const kvs_pack_args *a, kvs_pack **ret, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s = GIVEN(err, "pack_open", {"c", c}, {"a", a}, {"ret", ret});
    kvs_pack *p;

    if (s == KVS_OK)
        s = open_check(c, a, err);
    if (s != KVS_OK)
        return s;
    p = calloc(1, sizeof *p);
    if (p == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pack: no memory");
    p->c = c;
    p->ns = a->ns;
    s = sizes_set(p, a, err);
    if (s == KVS_OK)
        s = planes_set(p, a, err);
    for (int i = 0; i < 2 && s == KVS_OK; i++)
        s = lane_open(&p->lanes[i], p, i == 1, timeout_ms, err);
    if (s != KVS_OK) {
        pack_destroy(p);
        return s;
    }
    (void)pthread_mutex_lock(&c->mu);
    p->next = c->packs;
    c->packs = p;
    (void)pthread_mutex_unlock(&c->mu);
    *ret = p;
    return KVS_OK;
}

void kvs_pack_close(kvs_pack *p)
{
    kvs_pack **at;

    if (p == NULL || client_is_child(p->c))
        return;
    (void)pthread_mutex_lock(&p->c->mu);
    for (at = &p->c->packs; *at != NULL && *at != p;)
        at = &(*at)->next;
    if (*at == p)
        *at = p->next;
    (void)pthread_mutex_unlock(&p->c->mu);
    pack_destroy(p);
}

void packs_close(kvs_client *c, bool child)
{
    while (c->packs != NULL) {
        kvs_pack *p = c->packs;

        c->packs = p->next;
        if (child)
            free(p); /* what hangs on it may be in the hands of a thread that this process does not have */
        else
            pack_destroy(p);
    }
}

/* ---- jobs ---- */

static void job_free(pack_job *j)
{
    if (j == NULL)
        return;
    client_mark_close(j->after);
    free(j->keys);
    free(j->blocks);
    free(j->status);
    free(j);
}

void pack_job_end(kvs_pack *p, pack_job *j, kvs_status s)
{
    kvs_client *c = p->c;

    (void)pthread_mutex_lock(&c->mu);
    if (j->joins)
        stream_unjoin(c, j->join_generation, j->join, s);
    if (j->request != NULL) {
        if (j->n > 0 && j->results != NULL)
            memcpy(j->results, j->status, j->n * sizeof *j->results);
        j->request->err = j->err;
        j->request->pack = NULL;
        client_complete(c, j->request, s);
    } else {
        c->packing--;
    }
    client_wake_general(c);
    client_poke(c);
    (void)pthread_mutex_unlock(&c->mu);
    job_free(j);
}

/* mu is held, the request is under way: its results are never written from here on. */
void pack_abandon(kvs_client *c, kvs_request *r)
{
    pack_job *j = r->pack;

    atomic_store(&j->cancelled, true);
    j->request = NULL;
    j->results = NULL;
    r->pack = NULL;
    c->packing++;
}

/* mu is held. */
void pack_cancel(kvs_request *r)
{
    if (r->pack != NULL)
        atomic_store(&((pack_job *)r->pack)->cancelled, true);
}

static int by_number(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

/* Two blocks into one page would leave either, or some of both. */
static kvs_status twice_check(const uint32_t *blocks, uint32_t n, kvs_err *err)
{
    uint32_t *sorted = malloc(n * sizeof *sorted);
    kvs_status s = KVS_OK;

    if (sorted == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pack: no memory for %u ids", n);
    memcpy(sorted, blocks, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, by_number);
    for (uint32_t i = 1; i < n && s == KVS_OK; i++)
        if (sorted[i] == sorted[i - 1])
            s = kvs_fail(err, KVS_E_INVALID, "blocks: %u is in the list twice", sorted[i]);
    free(sorted);
    return s;
}

static kvs_status move_check(const kvs_pack *p, const kvs_pack_move *m, bool load, kvs_err *err)
{
    kvs_status s = client_check_own(p->c, err);

    if (s != KVS_OK)
        return s;
    if (m->n == 0 || m->n > MAX_STAGING)
        return kvs_fail(err, KVS_E_RANGE, "n: %u is outside 1..%d", m->n, MAX_STAGING);
    if ((m->flags & ~(uint32_t)KVS_PACK_NO_WAIT) != 0 || m->reserved != 0)
        return kvs_fail(err, KVS_E_INVALID, "flags: 0x%x has bits that mean nothing", m->flags);
    if (m->stream != NULL && stream_client(m->stream) != p->c)
        return kvs_fail(err, KVS_E_INVALID, "stream of another handle");
    if (m->stream != NULL && m->flags != 0)
        return kvs_fail(err, KVS_E_INVALID, "flags: 0x%x is for requests without a stream", m->flags);
    if (load && (m->first_depth != 0 || m->parent != NULL))
        return kvs_fail(err, KVS_E_INVALID, "first_depth, parent: of a store only");
    s = parent_check(m->first_depth, m->parent, err);
    if (s == KVS_OK)
        s = GIVEN(err, load ? "pack_load" : "pack_store", {"keys", m->keys}, {"blocks", m->blocks});
    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < m->n; i++)
        if (m->blocks[i] >= p->n_blocks)
            return kvs_fail(err, KVS_E_RANGE, "blocks[%u]: %u is outside 0..%u", i, m->blocks[i], p->n_blocks - 1);
    return load ? twice_check(m->blocks, m->n, err) : KVS_OK;
}

static kvs_status job_create(const kvs_pack_move *m, int64_t deadline, pack_job **ret, kvs_err *err)
{
    pack_job *j = calloc(1, sizeof *j);

    if (j != NULL) {
        j->keys = malloc((size_t)m->n * WIRE_KEY_BYTES + 1);
        j->blocks = malloc(m->n * sizeof *j->blocks + 1);
        j->status = calloc((size_t)m->n + 1, sizeof *j->status);
    }
    if (j == NULL || j->keys == NULL || j->blocks == NULL || j->status == NULL) {
        job_free(j);
        return kvs_fail(err, KVS_E_NO_MEMORY, "pack: no memory for %u blocks", m->n);
    }
    j->n = m->n;
    j->first_depth = m->first_depth;
    j->deadline = deadline;
    j->results = m->results;
    if (m->n > 0) {
        memcpy(j->keys, m->keys, (size_t)m->n * WIRE_KEY_BYTES);
        memcpy(j->blocks, m->blocks, m->n * sizeof *j->blocks);
    }
    if (m->parent != NULL)
        memcpy(j->parent, m->parent, sizeof j->parent);
    *ret = j;
    return KVS_OK;
}

/* The lane's from here on.  The request is answered when the job has ended. */
static void job_start(kvs_pack *p, pack_job *j, bool load, kvs_request *r)
{
    r->op = load ? WIRE_LOAD : WIRE_STORE;
    r->is_pack = true;
    r->state = REQUEST_FLYING;
    r->pack = j;
    j->request = r;
    lane_submit(&p->lanes[load], j);
}

static uint32_t left_ms(int64_t deadline)
{
    int64_t ms = (deadline - clock_ns()) / 1000000;

    return ms < 1 ? 1 : (uint32_t)ms;
}

/* After a restart of the daemon the lane makes new staging slots.  That may wait for the GPU, so it is done before a stream
 * waits for this load. */
static kvs_status lane_wake(kvs_pack *p, bool load, int64_t deadline, kvs_err *err)
{
    kvs_pack_move nothing = {.n = 0};
    kvs_request *r = NULL;
    pack_job *j = NULL;
    kvs_status s;

    if (lane_is_current(&p->lanes[load]))
        return KVS_OK;
    s = job_create(&nothing, deadline, &j, err);
    if (s == KVS_OK)
        s = request_create(&r, p->c, err);
    if (s != KVS_OK || r == NULL) {
        job_free(j);
        return s;
    }
    r->pipelined = false; /* not for kvs_poll */
    job_start(p, j, load, r);
    (void)kvs_wait(r, left_ms(deadline), NULL);
    return kvs_request_end(r, err);
}

/* What the pages must wait for, and what must wait for them. */
static kvs_status order(kvs_pack *p, const kvs_pack_move *m, bool load, pack_job *j, kvs_err *err)
{
    kvs_status s;

    if (p->lanes[load].packer == NULL)
        return KVS_OK; /* a CPU's memory: what the caller has written is there */
    if (m->stream == NULL)
        return (m->flags & KVS_PACK_NO_WAIT) ? KVS_OK : client_stream_settle(err);
    s = client_mark_open(&j->after, stream_cuda(m->stream), err);
    if (s == KVS_OK && load) {
        j->join_generation = atomic_load(&p->lanes[load].generation); /* of no later one: see lane_wake */
        s = stream_join(m->stream, j->join_generation, &j->join, err);
        j->joins = s == KVS_OK;
    }
    return s;
}

static kvs_status begin(kvs_pack *p, const kvs_pack_move *m, bool load, kvs_request **ret, uint32_t timeout_ms,
                        kvs_err *err)
{
    kvs_request *r = NULL;
    pack_job *j = NULL;
    int64_t deadline;
    kvs_status s = GIVEN(err, load ? "pack_load" : "pack_store", {"p", p}, {"m", m}, {"ret", ret});

    if (s == KVS_OK)
        s = move_check(p, m, load, err);
    if (s != KVS_OK)
        return s;
    deadline = deadline_in(timeout_ms != 0 ? timeout_ms : p->c->timeout_ms);
    s = lane_wake(p, load, deadline, err);
    if (s == KVS_OK)
        s = job_create(m, deadline, &j, err);
    if (s == KVS_OK)
        s = request_create(&r, p->c, err);
    if (s != KVS_OK || r == NULL) {
        job_free(j);
        return s;
    }
    s = order(p, m, load, j, err);
    if (s != KVS_OK) {
        request_destroy(r);
        job_free(j);
        return s;
    }
    *ret = r;
    job_start(p, j, load, r);
    return KVS_OK;
}

kvs_status kvs_pack_store(kvs_pack *p, const kvs_pack_move *m, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return begin(p, m, false, ret, timeout_ms, err);
}

kvs_status kvs_pack_load(kvs_pack *p, const kvs_pack_move *m, kvs_request **ret, uint32_t timeout_ms, kvs_err *err)
{
    return begin(p, m, true, ret, timeout_ms, err);
}
