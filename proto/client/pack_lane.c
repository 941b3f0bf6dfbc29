/* One direction of a pack: a pipeline of chunks through a ring of staging slots.
 *
 *   store:  gather on the stream, signal --> STORE after the signal --> reaped: slots free
 *   load:   LOAD after the scatter that freed the slots --> reaped: scatter on the stream, signal: slots free
 *
 * Chunks are issued and reaped in order, so the slots in use are one run of the ring.  A slot is used again only when the
 * request that named it is answered and the hardware is known to have stopped. */
#include "proto/client/pack_impl.h"

#include <stdlib.h>
#include <string.h>

enum { SLICE_MS = 20 /* how often a waiting lane looks whether its job was cancelled */ };

bool lane_is_current(const pack_lane *l)
{
    return atomic_load(&l->generation) == kvs_generation(l->pack->c);
}

static bool is_good(const pack_lane *l, kvs_status s)
{
    return s == KVS_OK || (!l->load && s == KVS_E_EXISTS);
}

/* ---- staging ---- */

static void region_close(pack_lane *l)
{
    if (l->region != NULL && kvs_region_close(l->region, 0, NULL) == KVS_E_BUSY) {
        (void)kvs_settle(l->pack->c, 0, NULL);
        (void)kvs_region_close(l->region, 0, NULL); /* still busy: kvs_close takes it */
    }
    l->region = NULL;
    l->has_scattered = false;
    l->place = l->used = 0;
}

static void staging_close(pack_lane *l)
{
    kvs_stream_close(l->stream);
    l->stream = NULL;
    client_packer_close(l->packer); /* waits for its stream */
    l->packer = NULL;
    region_close(l);
}

static kvs_status packer_open(pack_lane *l, kvs_err *err)
{
    kvs_pack *p = l->pack;
    client_pack_options o = {.ordinal = client_cuda_map_ordinal(l->region->on_gpu),
                             .n_planes = p->n_planes,
                             .n_blocks = p->n_blocks,
                             .planes = p->planes,
                             .ctas = p->ctas};
    kvs_status s = client_packer_open(&l->packer, &o, err);

    if (s != KVS_OK)
        return s;
    l->ordinal = o.ordinal;
    s = kvs_stream_open(p->c, client_packer_stream(l->packer), p->first_counter + l->load, 1, &l->stream, err);
    if (s != KVS_OK) { /* one without the other is of no use to the next who comes here */
        client_packer_close(l->packer);
        l->packer = NULL;
    }
    return s;
}

/* The device on which the slots were at first, whatever its number is by now. */
static kvs_status find_device(const kvs_pack *p, uint32_t *ret, kvs_err *err)
{
    static const uint8_t none[sizeof p->uuid];

    *ret = p->device;
    return memcmp(p->uuid, none, sizeof none) == 0 ? KVS_OK : kvs_device_find(p->c, p->uuid, ret, err);
}

/* A packer reaches the memory of its own GPU; elsewhere its kernel would cost the program its context. */
static kvs_status packer_check(const pack_lane *l, const kvs_region_info *v, kvs_err *err)
{
    if (l->packer == NULL)
        return KVS_OK;
    if (v->memory == KVS_MEMORY_MEMFD)
        return kvs_fail(err, KVS_E_STALE, "pack: the daemon's new staging slots are host memory, the tensors on GPU %d",
                        l->ordinal);
    if (client_cuda_map_ordinal(l->region->on_gpu) != l->ordinal)
        return kvs_fail(err, KVS_E_STALE, "pack: the daemon's new staging slots are on GPU %d, the tensors on GPU %d",
                        client_cuda_map_ordinal(l->region->on_gpu), l->ordinal);
    return KVS_OK;
}

static kvs_status slots_open(pack_lane *l, uint32_t timeout_ms, kvs_region_info *ret, kvs_err *err)
{
    kvs_pack *p = l->pack;
    void *base = NULL;
    uint32_t device;
    kvs_status s = find_device(p, &device, err);

    if (s == KVS_OK)
        s = kvs_region_create(p->ns, device, p->n_staging, &l->region, timeout_ms, err);

    if (s == KVS_OK)
        s = kvs_region_map(l->region, &base, NULL, err);
    if (s == KVS_OK)
        s = kvs_slot_take(l->region, p->n_staging, l->slots, timeout_ms, err);
    if (s == KVS_OK) {
        kvs_region_get(l->region, ret);
        l->base = base;
        l->slot_stride = ret->slot_stride;
    }
    return s;
}

/* The kernel and its stream outlive a daemon: to make them again could wait for a stream of the engine that waits for us. */
static kvs_status staging_open(pack_lane *l, uint32_t timeout_ms, kvs_err *err)
{
    uint64_t generation = kvs_generation(l->pack->c);
    kvs_region_info info;
    kvs_status s = slots_open(l, timeout_ms, &info, err);

    if (s == KVS_OK)
        s = packer_check(l, &info, err);
    if (s == KVS_OK && info.memory != KVS_MEMORY_MEMFD && l->packer == NULL)
        s = packer_open(l, err);
    if (s != KVS_OK) {
        region_close(l);
        return s;
    }
    if (l->packer != NULL)
        client_packer_slots(l->packer, l->base, l->slot_stride);
    atomic_store(&l->generation, generation);
    return KVS_OK;
}

/* ---- copies ---- */

static void copy_on_cpu(pack_lane *l, const client_pack_pair *pair)
{
    const kvs_pack *p = l->pack;

    for (uint32_t i = 0; i < p->n_planes; i++) {
        const client_pack_plane *plane = &p->planes[i];
        uint8_t *page = (uint8_t *)(uintptr_t)plane->base + pair->block * plane->stride;
        uint8_t *slot = l->base + pair->slot * l->slot_stride + plane->offset;

        (void)memcpy(l->load ? page : slot, l->load ? slot : page, plane->bytes);
    }
}

/* The n pairs of l->pairs, for this job: after what its caller's stream was doing.  *ret_mark: when they are done. */
static kvs_status copy_pairs(pack_lane *l, pack_job *j, uint32_t n, kvs_mark *ret_mark, kvs_err *err)
{
    kvs_status s = KVS_OK;

    if (l->packer == NULL) {
        for (uint32_t i = 0; i < n; i++)
            copy_on_cpu(l, &l->pairs[i]);
        *ret_mark = (kvs_mark)KVS_MARK_NOW;
        return KVS_OK;
    }
    if (j->after != NULL && !j->marked)
        s = client_packer_after(l->packer, j->after, err);
    j->marked = true;
    if (s == KVS_OK)
        s = client_packer_launch(l->packer, !l->load, l->pairs, n, err);
    return s == KVS_OK ? kvs_stream_signal(l->stream, ret_mark, err) : s;
}

/* ---- chunks ---- */

static uint32_t left_ms(const pack_job *j)
{
    int64_t ms = (j->deadline - clock_ns()) / 1000000;

    return ms < 1 ? 1 : (uint32_t)ms;
}

static kvs_status store_chunk(pack_lane *l, pack_chunk *k, kvs_err *err)
{
    pack_job *j = k->job;
    const uint8_t *keys = j->keys + (size_t)k->at * WIRE_KEY_BYTES;
    kvs_status s;

    for (uint32_t i = 0; i < k->n; i++)
        l->pairs[i] = (client_pack_pair){j->blocks[k->at + i], k->slots[i].slot};
    s = copy_pairs(l, j, k->n, &k->after, err);
    if (s != KVS_OK)
        return s;
    k->store = (kvs_store_args){.ns = l->pack->ns,
                                .region = l->region,
                                .n = k->n,
                                .first_depth = j->first_depth + k->at,
                                .parent = k->at > 0 ? keys - WIRE_KEY_BYTES : j->parent,
                                .keys = keys,
                                .slots = k->slots,
                                .after = &k->after,
                                .results = k->stored};
    return store_submit_hidden(&k->store, atomic_load(&l->generation), &k->request, left_ms(j), err);
}

static kvs_status load_chunk(pack_lane *l, pack_chunk *k, kvs_err *err)
{
    pack_job *j = k->job;

    k->after = l->has_scattered ? l->scattered : (kvs_mark)KVS_MARK_NOW;
    k->load = (kvs_load_args){.ns = l->pack->ns,
                              .region = l->region,
                              .n = k->n,
                              .keys = j->keys + (size_t)k->at * WIRE_KEY_BYTES,
                              .slots = k->slots,
                              .after = &k->after,
                              .results = k->loaded};
    return load_submit_hidden(&k->load, atomic_load(&l->generation), &k->request, left_ms(j), err);
}

static uint32_t less(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

static bool has_more(pack_lane *l)
{
    bool more;

    (void)pthread_mutex_lock(&l->mu);
    more = l->head != NULL;
    (void)pthread_mutex_unlock(&l->mu);
    return more;
}

/* As many blocks as go together.  The link shall have something to do soon, and not much shall be left to do when it has
 * brought the last bytes: a store's first chunks and a load's last ones are smaller.  What is left of a job is cut evenly,
 * so that there is no tiny chunk at its end. */
static uint32_t chunk_size(pack_lane *l, const pack_job *j)
{
    uint32_t n = j->n - j->issued, most = l->pack->chunk, least = most / 4 > 0 ? most / 4 : 1, chunks;

    if (!l->load && l->in_a_row < 2)
        most = least << l->in_a_row;
    else if (l->load && n < 2 * most && !has_more(l))
        most = n / 2 > least ? n / 2 : least;
    chunks = (n + most - 1) / most;
    return (n + chunks - 1) / chunks;
}

/* Each copy costs the engine something, whatever its size: a smaller chunk than it could be, for want of room, only where
 * the link would stand still. */
static uint32_t chunk_now(pack_lane *l, const pack_job *j)
{
    uint32_t n = chunk_size(l, j), room = l->pack->n_staging - l->used;

    if (l->n_flying == PACK_FLIGHT || (n > room && l->n_flying > 1))
        return 0;
    return less(n, room);
}

static void job_fail(pack_job *j, kvs_status s, const kvs_err *err)
{
    if (j->failed != KVS_OK)
        return;
    j->failed = s;
    j->err = *err;
    j->err.status = s;
}

/* The next chunk of the job.  False: no room now. */
static bool issue(pack_lane *l, pack_job *j)
{
    pack_chunk *k = &l->flight[(l->first + l->n_flying) % PACK_FLIGHT];
    kvs_err err = {KVS_OK, ""};
    uint32_t n;
    kvs_status s;

    if (l->n_flying == 0)
        l->in_a_row = 0;
    n = chunk_now(l, j);
    if (n == 0)
        return false;
    l->in_a_row++;
    k->job = j;
    k->at = j->issued;
    k->n = n;
    for (uint32_t i = 0; i < n; i++)
        k->slots[i] = l->slots[(l->place + i) % l->pack->n_staging];
    s = l->load ? load_chunk(l, k, &err) : store_chunk(l, k, &err);
    if (s != KVS_OK) {
        job_fail(j, s, &err);
        return true;
    }
    j->issued += n;
    l->place = (l->place + n) % l->pack->n_staging;
    l->used += n;
    l->n_flying++;
    return true;
}

/* Until it is answered, and nothing of it goes on. */
static kvs_status await(pack_lane *l, pack_chunk *k, kvs_err *err)
{
    bool asked = false;

    while (kvs_wait(k->request, SLICE_MS, NULL) == KVS_E_DEADLINE) {
        if (asked || !(atomic_load(&k->job->cancelled) || atomic_load(&l->closing)))
            continue;
        (void)kvs_cancel(k->request, NULL, 0, NULL);
        asked = true;
    }
    while (request_settle(k->request, SLICE_MS) == KVS_E_DEADLINE)
        ;
    return kvs_request_end(k->request, err);
}

/* What came is put where it belongs. */
static kvs_status scatter(pack_lane *l, const pack_chunk *k, kvs_err *err)
{
    const pack_job *j = k->job;
    uint32_t n = 0;
    kvs_status s;

    for (uint32_t i = 0; i < k->n; i++)
        if (k->loaded[i].status == KVS_OK)
            l->pairs[n++] = (client_pack_pair){j->blocks[k->at + i], k->slots[i].slot};
    if (n == 0)
        return KVS_OK;
    s = copy_pairs(l, k->job, n, &l->scattered, err);
    l->has_scattered = l->has_scattered || s == KVS_OK;
    return s;
}

static void reap(pack_lane *l)
{
    pack_chunk *k = &l->flight[l->first];
    pack_job *j = k->job;
    kvs_err err = {KVS_OK, ""};
    kvs_status s = await(l, k, &err), copied = KVS_OK;

    if (s != KVS_OK && s != KVS_E_PARTIAL)
        job_fail(j, s, &err);
    if (l->load) {
        copied = scatter(l, k, &err);
        if (copied != KVS_OK)
            job_fail(j, copied, &err);
    }
    for (uint32_t i = 0; i < k->n; i++) {
        kvs_status *to = &j->status[k->at + i];

        *to = l->load ? k->loaded[i].status : k->stored[i];
        if (*to == KVS_OK && copied != KVS_OK)
            *to = copied;
    }
    j->ended += k->n;
    l->first = (l->first + 1) % PACK_FLIGHT;
    l->n_flying--;
    l->used -= k->n;
}

/* ---- jobs ---- */

static bool is_over(const pack_job *j)
{
    return j->ended == j->issued && (j->issued == j->n || j->failed != KVS_OK);
}

static void tell_partial(const pack_lane *l, pack_job *j)
{
    uint32_t failed = 0, first = 0;

    for (uint32_t i = j->n; i-- > 0;)
        if (!is_good(l, j->status[i])) {
            failed++;
            first = i;
        }
    answer_tell_partial(&j->err, l->load ? "load by a pack" : "store by a pack", failed, j->n, first, j->status[first]);
}

static void end(pack_lane *l, pack_job *j)
{
    kvs_err err = {KVS_OK, ""};
    bool all = true;
    kvs_status s;

    for (uint32_t i = j->issued; i < j->n; i++)
        j->status[i] = j->failed;
    for (uint32_t i = 0; i < j->n; i++)
        all = all && is_good(l, j->status[i]);
    /* A load's bytes are there only now; of a store that failed a copy may still read the pages. */
    if (l->packer != NULL && j->marked && (l->load || !all)) {
        s = client_packer_finish(l->packer, &err);
        if (s != KVS_OK)
            job_fail(j, s, &err);
        for (uint32_t i = 0; i < j->n && s != KVS_OK; i++)
            j->status[i] = is_good(l, j->status[i]) ? s : j->status[i];
        all = all && s == KVS_OK;
    }
    s = !all || j->n == 0 ? j->failed : KVS_OK;
    if (!all && s == KVS_OK) {
        s = KVS_E_PARTIAL;
        tell_partial(l, j);
    }
    pack_job_end(l->pack, j, s);
}

static void reap_and_end(pack_lane *l, const pack_job *now)
{
    pack_job *j = l->flight[l->first].job;

    reap(l);
    if (j != now && is_over(j))
        end(l, j);
}

/* The slots of another life of the connection are not ours any more.  Whatever has become of the requests, a copy that was
 * launched for one may still use them: what it reads and writes stays mapped until it is done. */
static kvs_status renew(pack_lane *l, const pack_job *now, kvs_err *err)
{
    if (l->region != NULL && lane_is_current(l))
        return KVS_OK;
    while (l->n_flying > 0)
        reap_and_end(l, now);
    if (l->packer != NULL)
        (void)client_packer_finish(l->packer, NULL);
    region_close(l);
    return staging_open(l, 0, err);
}

/* Before its first chunk, or between two of them. */
static void look_at(pack_lane *l, pack_job *j)
{
    kvs_err err = {KVS_OK, ""};
    kvs_status s = KVS_OK;

    if (atomic_load(&j->cancelled) || atomic_load(&l->closing))
        s = kvs_fail(&err, KVS_E_CANCELLED, "cancelled at block %u of %u", j->issued, j->n);
    else if (clock_ns() >= j->deadline)
        s = kvs_fail(&err, KVS_E_DEADLINE, "not done in time: block %u of %u", j->issued, j->n);
    else
        s = renew(l, j, &err);
    if (s != KVS_OK)
        job_fail(j, s, &err);
}

static pack_job *next_job(pack_lane *l, bool wait)
{
    pack_job *j;

    (void)pthread_mutex_lock(&l->mu);
    while (wait && l->head == NULL && !atomic_load(&l->closing))
        (void)pthread_cond_wait(&l->wake, &l->mu);
    j = l->head;
    if (j != NULL) {
        l->head = j->next;
        if (l->head == NULL)
            l->tail = &l->head;
    }
    (void)pthread_mutex_unlock(&l->mu);
    return j;
}

/* Issue what there is room for.  *now: the job that is being issued; it is the lane's until its last chunk is reaped. */
static void fill(pack_lane *l, pack_job **now)
{
    for (;;) {
        pack_job *j = *now != NULL ? *now : next_job(l, l->n_flying == 0);

        *now = j;
        if (j == NULL)
            return;
        look_at(l, j);
        if (j->failed == KVS_OK && j->issued < j->n && !issue(l, j))
            return;
        if (j->failed == KVS_OK && j->issued < j->n)
            continue;
        *now = NULL;
        if (is_over(j))
            end(l, j);
    }
}

static void *lane_main(void *arg)
{
    pack_lane *l = arg;
    pack_job *now = NULL;

    for (;;) {
        fill(l, &now);
        if (l->n_flying > 0) {
            reap_and_end(l, now);
        } else if (atomic_load(&l->closing)) {
            return NULL;
        }
    }
}

/* ---- life ---- */

kvs_status lane_open(pack_lane *l, kvs_pack *p, bool load, uint32_t timeout_ms, kvs_err *err)
{
    kvs_status s;
    int e;

    l->pack = p;
    l->load = load;
    l->tail = &l->head;
    (void)pthread_mutex_init(&l->mu, NULL);
    (void)pthread_cond_init(&l->wake, NULL);
    l->slots = calloc(p->n_staging, sizeof *l->slots);
    if (l->slots == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "pack: no memory for %u slots", p->n_staging);
    s = staging_open(l, timeout_ms, err);
    if (s != KVS_OK)
        return s;
    e = client_thread(&l->thread, load ? "kvs-pack-load" : "kvs-pack-store", lane_main, l);
    if (e != 0)
        return kvs_fail(err, KVS_E_SYS, "thread: %s", strerror(e));
    l->has_thread = true;
    return KVS_OK;
}

void lane_submit(pack_lane *l, pack_job *j)
{
    (void)pthread_mutex_lock(&l->mu);
    *l->tail = j;
    l->tail = &j->next;
    (void)pthread_cond_signal(&l->wake);
    (void)pthread_mutex_unlock(&l->mu);
}

void lane_close(pack_lane *l)
{
    if (l->pack == NULL)
        return;
    (void)pthread_mutex_lock(&l->mu);
    atomic_store(&l->closing, true);
    (void)pthread_cond_signal(&l->wake);
    (void)pthread_mutex_unlock(&l->mu);
    if (l->has_thread)
        (void)pthread_join(l->thread, NULL);
    staging_close(l);
    free(l->slots);
    (void)pthread_cond_destroy(&l->wake);
    (void)pthread_mutex_destroy(&l->mu);
    l->pack = NULL;
}
