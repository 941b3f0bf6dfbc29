/* Regions: device memory in and out, its mapping here, and which of its slots this client holds. */
#include "proto/client/internal.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static kvs_status region_new(kvs_client *c, kvs_ns *ns, uint32_t kind, kvs_region **ret, kvs_err *err)
{
    kvs_region *r = calloc(1, sizeof *r);

    *ret = r;
    if (r == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "region: no memory");
    r->c = c;
    r->ns = ns;
    r->info.kind = kind;
    for (unsigned i = 0; i < WIRE_MAX_FDS; i++)
        r->fds[i] = -1;
    return KVS_OK;
}

void region_destroy(kvs_region *r)
{
    if (r == NULL)
        return;
    if (r->on_gpu != NULL && !client_is_child(r->c)) /* a child has no driver: the mapping is the parent's */
        client_cuda_unmap(r->on_gpu);
    else if (r->on_gpu == NULL && r->base != NULL)
        (void)munmap(r->base, (size_t)r->info.bytes);
    for (unsigned i = 0; i < WIRE_MAX_FDS; i++)
        if (r->fds[i] >= 0)
            (void)close(r->fds[i]);
    free(r->track);
    free(r->maps);
    free(r->ipc);
    free(r);
}

/* ---- what the daemon answers ---- */

/* Pieces cover the bytes exactly; slots fit.  64-bit, nothing multiplied before it is known to be small. */
static bool shape_is_sound(const kvs_region *r, const wire_region_rep *v, uint32_t n_fds)
{
    uint64_t slot_bytes = r->ns != NULL ? r->ns->info.slot_bytes : 0;

    if (r->info.kind == KVS_REGION_IMPORT)
        return n_fds == 0 && v->n_slots == r->info.n_slots;
    if (v->bytes == 0 || v->bytes > (UINT64_C(1) << 47) || v->n_pieces == 0 || v->n_pieces > WIRE_MAX_FDS ||
        v->n_pieces != n_fds || v->piece_bytes == 0 || v->piece_bytes > v->bytes)
        return false;
    if ((v->bytes - 1) / v->piece_bytes + 1 != v->n_pieces || (v->n_pieces > 1 && v->piece_bytes % 4096 != 0))
        return false;
    if (r->info.kind == KVS_REGION_SCRATCH)
        return v->n_slots == 0;
    return v->n_slots > 0 && v->slot_stride >= slot_bytes && v->slot_stride > 0 && v->slot_stride % 16 == 0 &&
           v->n_slots <= v->bytes / v->slot_stride && (r->info.n_slots == 0 || v->n_slots == r->info.n_slots);
}

kvs_status region_adopt(kvs_region *r, const wire_region_rep *v, frame *f, kvs_err *err)
{
    if (!shape_is_sound(r, v, f->head.n_fds))
        return KVS_E_PROTO;
    if (r->info.kind == KVS_REGION_SLOTS) {
        r->track = calloc(v->n_slots, sizeof *r->track);
        if (r->track == NULL)
            return kvs_fail(err, KVS_E_NO_MEMORY, "region: no memory for %u slots", v->n_slots);
    }
    r->info.n_slots = v->n_slots;
    r->info.slot_stride = v->slot_stride;
    if (r->info.kind != KVS_REGION_IMPORT) {
        r->info.bytes = v->bytes;
        r->info.piece_bytes = v->piece_bytes;
        r->info.n_fds = f->head.n_fds;
        memcpy(r->info.token, v->token, sizeof r->info.token);
        for (uint32_t i = 0; i < f->head.n_fds; i++) {
            r->fds[i] = f->fds[i];
            f->fds[i] = -1;
        }
        if (r->info.n_fds > 0 && fcntl(r->fds[0], F_GET_SEALS) < 0) /* only memfds have seals */
            r->info.memory = KVS_MEMORY_CUDA_VMM;
    }
    r->info.id = v->region;
    atomic_store(&r->id, v->region);
    return KVS_OK;
}

/* ---- making them ---- */

/* The region is in the client's list if the call succeeds, and gone if it does not. */
static kvs_status run_region(call *k, kvs_region *r, kvs_region **ret, kvs_err *err)
{
    kvs_status s = call_run(k, err);

    if (s != KVS_OK)
        region_destroy(r);
    else
        *ret = r;
    return s;
}

static kvs_status create(kvs_client *c, kvs_ns *ns, const wire_region_create_req *q, kvs_region **ret,
                         uint32_t timeout_ms, kvs_err *err)
{
    wire_region_create_req body = *q;
    kvs_request req = {0};
    kvs_region *r = NULL;
    call k;
    kvs_status s = region_new(c, ns, q->kind, &r, err);

    if (s != KVS_OK)
        return s;
    r->info.device = q->device;
    r->info.n_slots = q->n_slots;
    req.region = r;
    s = call_begin(&k, c, &req, WIRE_REGION_CREATE, WIRE_region_create_req_BYTES, timeout_ms, err);
    if (s == KVS_OK && ns != NULL)
        s = call_ns(&k, ns, &body.ns, err);
    if (s != KVS_OK) {
        region_destroy(r);
        return s;
    }
    wire_put_region_create_req(&k.out, &body);
    return run_region(&k, r, ret, err);
}

kvs_status kvs_region_create(kvs_ns *ns, uint32_t device, uint32_t n_slots, kvs_region **ret, uint32_t timeout_ms,
                             kvs_err *err)
{
    wire_region_create_req q = {.kind = WIRE_REGION_SLOTS, .device = device, .n_slots = n_slots};
    kvs_status s = GIVEN(err, "region_create", {"ns", ns}, {"ret", ret});

    if (s != KVS_OK)
        return s;
    if (n_slots == 0)
        return kvs_fail(err, KVS_E_RANGE, "n_slots: 0 is outside 1..1048576");
    return create(ns->c, ns, &q, ret, timeout_ms, err);
}

kvs_status kvs_scratch_create(kvs_client *c, uint32_t device, uint64_t bytes, kvs_region **ret, uint32_t timeout_ms,
                              kvs_err *err)
{
    wire_region_create_req q = {.ns = WIRE_NONE32, .kind = WIRE_REGION_SCRATCH, .device = device, .bytes = bytes};
    kvs_status s = GIVEN(err, "scratch_create", {"c", c}, {"ret", ret});

    if (s != KVS_OK)
        return s;
    if (bytes == 0)
        return kvs_fail(err, KVS_E_INVALID, "bytes: a scratch region of 0 bytes");
    return create(c, NULL, &q, ret, timeout_ms, err);
}

kvs_status kvs_region_attach(kvs_client *c, kvs_ns *ns, const uint8_t token[16], kvs_region **ret, uint32_t timeout_ms,
                             kvs_err *err)
{
    wire_region_attach_req q = {
        .ns = WIRE_NONE32, .kind = ns != NULL ? WIRE_REGION_SLOTS : WIRE_REGION_SCRATCH, .mode = WIRE_ATTACH_TOKEN};
    kvs_request req = {0};
    kvs_region *r = NULL;
    call k;
    kvs_status s = GIVEN(err, "region_attach", {"c", c}, {"token", token}, {"ret", ret});

    if (s == KVS_OK)
        s = region_new(c, ns, q.kind, &r, err);
    if (s != KVS_OK || r == NULL)
        return s;
    memcpy(q.token, token, sizeof q.token);
    req.region = r;
    s = call_begin(&k, c, &req, WIRE_REGION_ATTACH, WIRE_region_attach_req_BYTES, timeout_ms, err);
    if (s == KVS_OK && ns != NULL)
        s = call_ns(&k, ns, &q.ns, err);
    if (s != KVS_OK) {
        region_destroy(r);
        return s;
    }
    wire_put_region_attach_req(&k.out, &q);
    return run_region(&k, r, ret, err);
}

static kvs_status import_check(const kvs_ns *ns, const kvs_import *in, kvs_err *err)
{
    bool ipc = in->memory == KVS_MEMORY_CUDA_IPC;
    uint32_t n = ipc ? in->n_ipc : in->n_fds;
    kvs_status s;

    if (n == 0 || n > WIRE_MAX_FDS)
        return kvs_fail(err, KVS_E_LIMIT, "%s: %u is outside 1..%d", ipc ? "n_ipc" : "n_fds", n, WIRE_MAX_FDS);
    if ((ipc ? in->n_fds : in->n_ipc) != 0)
        return kvs_fail(err, KVS_E_INVALID, "%s: %u with memory %u, which has none", ipc ? "n_fds" : "n_ipc",
                        ipc ? in->n_fds : in->n_ipc, in->memory);
    if (in->n_slots == 0)
        return kvs_fail(err, KVS_E_RANGE, "n_slots: 0 is outside 1..1048576");
    if (in->n_maps == 0 || in->n_maps > KVS_MAX_PLANES)
        return kvs_fail(err, KVS_E_LIMIT, "n_maps: %u is outside 1..%d", in->n_maps, KVS_MAX_PLANES);
    if (ns->info.n_planes != 0 && in->n_maps != 1 && in->n_maps != ns->info.n_planes)
        return kvs_fail(err, KVS_E_INVALID, "n_maps: %u is neither 1 nor the %u planes of the namespace", in->n_maps,
                        ns->info.n_planes);
    s = GIVEN(err, "region_import", {"fds", given_some(in->n_fds, in->fds)}, {"ipc", given_some(in->n_ipc, in->ipc)},
              {"maps", in->maps});
    if (s != KVS_OK)
        return s;
    for (uint32_t i = 0; i < in->n_maps; i++)
        if (in->maps[i].fd >= n)
            return kvs_fail(err, KVS_E_RANGE, "maps[%u].fd: %u is outside 0..%u", i, in->maps[i].fd, n - 1);
    return KVS_OK;
}

static kvs_status import_copy(kvs_region *r, const kvs_import *in, kvs_err *err)
{
    r->info.device = in->device;
    r->info.n_slots = in->n_slots;
    r->info.n_fds = in->n_fds;
    r->memory = r->info.memory = in->memory;
    if (in->n_ipc > 0) {
        r->ipc = calloc(in->n_ipc, sizeof *r->ipc);
        if (r->ipc == NULL)
            return kvs_fail(err, KVS_E_NO_MEMORY, "region: no memory for %u handles", in->n_ipc);
        memcpy(r->ipc, in->ipc, in->n_ipc * sizeof *r->ipc);
        r->n_ipc = in->n_ipc;
    }
    r->n_maps = in->n_maps;
    r->maps = calloc(in->n_maps, sizeof *r->maps);
    if (r->maps == NULL)
        return kvs_fail(err, KVS_E_NO_MEMORY, "region: no memory for %u plane maps", in->n_maps);
    memcpy(r->maps, in->maps, in->n_maps * sizeof *r->maps);
    for (uint32_t i = 0; i < in->n_fds; i++) {
        r->fds[i] = fcntl(in->fds[i], F_DUPFD_CLOEXEC, 0);
        if (r->fds[i] < 0)
            return kvs_fail(err, KVS_E_SYS, "fds[%u]: cannot be duplicated: %s", i, strerror(errno));
    }
    return KVS_OK;
}

uint64_t region_import_bytes(const kvs_region *r)
{
    return WIRE_region_import_req_BYTES + (uint64_t)r->n_maps * WIRE_plane_map_BYTES +
           (uint64_t)r->n_ipc * WIRE_ipc_handle_BYTES;
}

size_t region_import_body(const kvs_region *r, uint32_t ns, uint32_t device, uint8_t *buf, size_t cap)
{
    wire_region_import_req q = {.ns = ns,
                                .device = device,
                                .n_slots = r->info.n_slots,
                                .memory = r->memory,
                                .n_maps = r->n_maps,
                                .n_ipc = r->n_ipc};
    wire_out o = {.base = buf, .cap = cap};

    wire_put_region_import_req(&o, &q);
    for (uint32_t i = 0; i < r->n_maps; i++) {
        wire_plane_map m = {
            .fd = r->maps[i].fd, .backend = r->maps[i].backend, .base = r->maps[i].base, .stride = r->maps[i].stride};

        wire_put_plane_map(&o, &m);
    }
    for (uint32_t i = 0; i < r->n_ipc; i++) {
        wire_ipc_handle h;

        memcpy(h.uuid, r->ipc[i].uuid, sizeof h.uuid);
        memcpy(h.handle_low, r->ipc[i].handle, sizeof h.handle_low);
        memcpy(h.handle_high, r->ipc[i].handle + sizeof h.handle_low, sizeof h.handle_high);
        wire_put_ipc_handle(&o, &h);
    }
    return o.len;
}

kvs_status kvs_ipc_of(const void *p, kvs_ipc *ret, uint64_t *ret_offset, uint64_t *ret_bytes, kvs_err *err)
{
    kvs_status s = GIVEN(err, "ipc_of", {"p", p}, {"ret", ret}, {"ret_offset", ret_offset}, {"ret_bytes", ret_bytes});

    return s == KVS_OK ? client_memory_handle(p, ret->uuid, ret->handle, ret_offset, ret_bytes, err) : s;
}

kvs_status kvs_region_import(kvs_ns *ns, const kvs_import *in, kvs_region **ret, uint32_t timeout_ms, kvs_err *err)
{
    kvs_request req = {0};
    kvs_region *r = NULL;
    uint32_t id;
    call k;
    kvs_status s = GIVEN(err, "region_import", {"ns", ns}, {"in", in}, {"ret", ret});

    if (s == KVS_OK)
        s = import_check(ns, in, err);
    if (s == KVS_OK)
        s = region_new(ns->c, ns, KVS_REGION_IMPORT, &r, err);
    if (s == KVS_OK && r != NULL)
        s = import_copy(r, in, err);
    if (s == KVS_OK && r != NULL)
        s = call_begin(&k, ns->c, &req, WIRE_REGION_IMPORT, region_import_bytes(r), timeout_ms, err);
    if (s != KVS_OK || r == NULL) {
        region_destroy(r);
        return s;
    }
    s = call_ns(&k, ns, &id, err);
    if (s != KVS_OK) {
        call_drop(&k);
        region_destroy(r);
        return s;
    }
    req.region = r;
    k.out.len = region_import_body(r, id, r->info.device, k.out.base, k.out.cap);
    k.fds = r->fds;
    k.n_fds = r->info.n_fds;
    return run_region(&k, r, ret, err);
}

/* ---- the end ---- */

static void unlink_region(kvs_client *c, kvs_region *r)
{
    kvs_region **p = &c->regions;

    while (*p != NULL && *p != r)
        p = &(*p)->next;
    if (*p == r)
        *p = r->next;
}

/* mu is held.  Nobody waits for it, but the daemon must not keep memory that has no name here any more. */
static void close_later(kvs_client *c, const kvs_region *r)
{
    uint8_t body[WIRE_region_close_req_BYTES];
    wire_out o = {.base = body, .cap = sizeof body};
    wire_region_close_req q = {.region = atomic_load(&r->id)};

    wire_put_region_close_req(&o, &q);
    chore_add(c, WIRE_REGION_CLOSE, &o);
}

/* The reply to a request writes to the region's table of slots. */
static kvs_status unused_check(kvs_client *c, const kvs_region *r, kvs_err *err)
{
    kvs_status s = client_check_own(c, err);

    if (s != KVS_OK)
        return s;
    (void)pthread_mutex_lock(&c->mu);
    client_read_once(c); /* what is answered is not in flight */
    if (client_region_in_flight(c, r))
        s = kvs_fail(err, KVS_E_BUSY, "region: a request in flight uses it");
    client_leave(c);
    return s;
}

kvs_status kvs_region_close(kvs_region *r, uint32_t timeout_ms, kvs_err *err)
{
    wire_region_close_req q = {0};
    kvs_request req = {0};
    bool keeper_frees;
    kvs_client *c;
    call k;
    kvs_status s = GIVEN(err, "region_close", {"r", r});

    if (s == KVS_OK)
        s = unused_check(r->c, r, err);
    if (s != KVS_OK)
        return s;
    c = r->c;
    s = call_begin(&k, c, &req, WIRE_REGION_CLOSE, WIRE_region_close_req_BYTES, timeout_ms, err);
    if (s == KVS_OK && call_region(&k, r, &q.region, NULL) == KVS_OK) {
        wire_put_region_close_req(&k.out, &q);
        s = call_run(&k, err);
    }
    if (s == KVS_E_BUSY)
        return s; /* the daemon keeps it, so its name must not be lost */
    if (s == KVS_E_AWAY || s == KVS_E_STALE)
        s = KVS_OK; /* it went with the connection */
    (void)pthread_mutex_lock(&c->mu);
    if (s == KVS_E_DEADLINE && k.generation == c->server.generation)
        close_later(c, r);
    keeper_frees = c->registering;
    r->dead = true;
    if (!keeper_frees)
        unlink_region(c, r);
    (void)pthread_mutex_unlock(&c->mu);
    if (!keeper_frees)
        region_destroy(r);
    return s;
}

/* ---- looking at them ---- */

void kvs_region_get(kvs_region *r, kvs_region_info *ret)
{
    if (ret == NULL)
        return;
    if (r == NULL) {
        *ret = (kvs_region_info){.state = KVS_E_INVALID};
        return;
    }
    *ret = r->info; /* as it was made */
    ret->id = atomic_load(&r->id);
    ret->state = (kvs_status)atomic_load(&r->status);
}

int kvs_region_fd(kvs_region *r, uint32_t i)
{
    return r != NULL && i < r->info.n_fds ? r->fds[i] : -1;
}

static uint64_t piece_len(const kvs_region *r, uint32_t i)
{
    uint64_t at = i * r->info.piece_bytes;

    return r->info.bytes - at < r->info.piece_bytes ? r->info.bytes - at : r->info.piece_bytes;
}

/* All pieces side by side in one reservation, so that a slot is found by its stride alone. */
static kvs_status map_pieces(kvs_region *r, kvs_err *err)
{
    uint8_t *base;
    kvs_status s = KVS_OK;

    for (uint32_t i = 0; i < r->info.n_fds && s == KVS_OK; i++)
        s = memfd_check(r->fds[i], piece_len(r, i), err);
    if (s != KVS_OK)
        return s;
    base = mmap(NULL, (size_t)r->info.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return kvs_fail(err, KVS_E_SYS, "region: mmap of %llu bytes: %s", (unsigned long long)r->info.bytes,
                        strerror(errno));
    for (uint32_t i = 0; i < r->info.n_fds; i++) {
        if (mmap(base + i * r->info.piece_bytes, (size_t)piece_len(r, i), PROT_READ | PROT_WRITE,
                 MAP_SHARED | MAP_FIXED, r->fds[i], 0) == MAP_FAILED) {
            s = kvs_fail(err, KVS_E_SYS, "region: mmap of piece %u: %s", i, strerror(errno));
            (void)munmap(base, (size_t)r->info.bytes);
            return s;
        }
    }
    r->base = base;
    return KVS_OK;
}

kvs_status kvs_region_map(kvs_region *r, void **ret, uint64_t *ret_bytes, kvs_err *err)
{
    kvs_status s = GIVEN(err, "region_map", {"r", r}, {"ret", ret});

    if (s == KVS_OK)
        s = client_check_own(r->c, err);
    if (s != KVS_OK)
        return s;
    if (r->info.kind == KVS_REGION_IMPORT)
        return kvs_fail(err, KVS_E_UNSUPPORTED, "region: an import is mapped by the one who made it");
    (void)pthread_mutex_lock(&r->c->gpu_mu); /* a driver may wait for a stream that only somebody with mu lets go */
    if (r->base == NULL && r->info.memory == KVS_MEMORY_CUDA_VMM)
        s = client_cuda_map_fds(&r->on_gpu, r->fds, r->info.n_fds, r->info.piece_bytes, r->info.bytes, &r->base, err);
    else if (r->base == NULL)
        s = map_pieces(r, err);
    if (s == KVS_OK) {
        *ret = r->base;
        if (ret_bytes != NULL)
            *ret_bytes = r->info.bytes;
    }
    (void)pthread_mutex_unlock(&r->c->gpu_mu);
    return s;
}

kvs_status kvs_memfd_create(const char *name, uint64_t bytes, int *ret_fd, kvs_err *err)
{
    kvs_status s = GIVEN(err, "memfd_create", {"name", name}, {"ret_fd", ret_fd});
    int fd, e;

    if (s != KVS_OK)
        return s;
    fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return kvs_fail(err, KVS_E_SYS, "memfd_create: %s", strerror(errno));
    if (bytes == 0 || bytes > (UINT64_C(1) << 47)) {
        s = kvs_fail(err, KVS_E_RANGE, "memfd: %llu bytes are outside 1..2^47", (unsigned long long)bytes);
        goto fail;
    }
    e = posix_fallocate(fd, 0, (off_t)bytes);
    if (e != 0) {
        s = kvs_fail(err, e == ENOSPC || e == ENOMEM ? KVS_E_NO_SPACE : KVS_E_SYS, "memfd: %llu bytes: %s",
                     (unsigned long long)bytes, strerror(e));
        goto fail;
    }
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        s = kvs_fail(err, KVS_E_SYS, "memfd: sealing: %s", strerror(errno));
        goto fail;
    }
    *ret_fd = fd;
    return KVS_OK;
fail:
    (void)close(fd);
    return s;
}

/* ---- held slots: what a restarted daemon is told ---- */

void region_track(kvs_region *r, kvs_slot s, bool shared, const uint8_t *key, uint32_t depth)
{
    track *t;

    if (r->track == NULL || s.slot >= r->info.n_slots)
        return;
    t = &r->track[s.slot];
    if (t->holds > 0 && t->gen == s.gen && t->shared && shared && !t->lost) {
        t->holds++;
        return;
    }
    *t = (track){.gen = s.gen, .holds = 1, .depth = depth, .shared = shared, .known = key != NULL};
    if (key != NULL)
        memcpy(t->key, key, sizeof t->key);
}

void region_untrack(kvs_region *r, kvs_slot s)
{
    if (r->track != NULL && s.slot < r->info.n_slots && r->track[s.slot].gen == s.gen && r->track[s.slot].holds > 0)
        r->track[s.slot].holds--;
}

bool region_slot_is_lost(const kvs_region *r, kvs_slot s)
{
    return r->track != NULL && s.slot < r->info.n_slots && r->track[s.slot].lost && r->track[s.slot].gen == s.gen;
}

static bool is_offered(const track *t)
{
    return t->holds > 0 && !t->lost && (!t->shared || t->known);
}

/* Entries that may be used to name a slot again: a daemon takes as many as there are slots. */
static uint32_t spare_entries(const kvs_region *r)
{
    uint32_t n = r->info.n_slots;

    for (uint32_t i = 0; r->track != NULL && i < r->info.n_slots; i++)
        n -= is_offered(&r->track[i]);
    return n;
}

/* How often an offered slot is named: each time brings a hold, and who had two of them will end two. */
static uint32_t times_offered(const track *t, uint32_t *spare)
{
    uint32_t again = t->shared ? t->holds - 1 : 0;

    again = again < *spare ? again : *spare;
    *spare -= again;
    return 1 + again;
}

uint32_t region_n_entries(const kvs_region *r)
{
    uint32_t n = 0, spare = spare_entries(r);

    for (uint32_t i = 0; r->track != NULL && i < r->info.n_slots; i++)
        if (is_offered(&r->track[i]))
            n += times_offered(&r->track[i], &spare);
    return n;
}

size_t region_attach_body(const kvs_region *r, uint32_t ns, uint8_t *buf, size_t cap)
{
    wire_region_attach_req q = {.ns = ns,
                                .kind = r->info.kind,
                                .device = WIRE_NONE32, /* as in reregister */
                                .n_slots = r->info.n_slots,
                                .bytes = r->info.bytes,
                                .mode = WIRE_ATTACH_REOFFER,
                                .n_entries = region_n_entries(r)};
    wire_out o = {.base = buf, .cap = cap};
    uint32_t spare = spare_entries(r);

    memcpy(q.token, r->info.token, sizeof q.token);
    wire_put_region_attach_req(&o, &q);
    for (uint32_t i = 0; r->track != NULL && i < r->info.n_slots; i++) {
        const track *t = &r->track[i];
        wire_region_entry e = {.slot = i, .gen = t->gen, .flags = t->shared ? WIRE_ENTRY_SHARED : 0, .depth = t->depth};

        if (!is_offered(t))
            continue;
        if (t->shared)
            memcpy(e.key, t->key, sizeof e.key);
        for (uint32_t n = times_offered(t, &spare); n > 0; n--)
            wire_put_region_entry(&o, &e);
    }
    return o.len;
}

void region_entries_done(kvs_region *r, const uint8_t *status)
{
    uint32_t at = 0, spare = spare_entries(r);

    for (uint32_t i = 0; r->track != NULL && i < r->info.n_slots; i++) {
        track *t = &r->track[i];
        uint32_t n = is_offered(t) ? times_offered(t, &spare) : 0;

        if (t->holds == 0 || t->lost)
            continue;
        for (t->holds = 0; status != NULL && n > 0; n--)
            t->holds += wire_at_u32(status, at++) == KVS_OK;
        t->lost = t->holds == 0;
    }
}
