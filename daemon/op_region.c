#include "daemon/core.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

#include "daemon/disposal.h"

/* Namespaces and device memory: OPEN, REGION_CREATE, REGION_ATTACH, REGION_IMPORT, REGION_CLOSE, SLOT_TAKE,
 * SLOT_DROP.
 *
 * Memory is made on the pinner.  Everything that could fail later (bookkeeping, the way to close) is made
 * before. */

typedef enum making_kind { MAKING_CREATE, MAKING_IMPORT, MAKING_REOFFER } making_kind;

typedef struct making {
    pinner_task task; /* first */
    request *request;
    making_kind kind;
    const directory_ns *ns; /* NULL: scratch */
    uint64_t bytes;         /* asked for */
    const core *core;       /* for its devices, which never change */
    uint32_t device;        /* asked for; WIRE_NONE32: the one that the memory is on.  Then: the one that it is on */
    device_import import;
    int fds[WIRE_MAX_FDS];
    device_mem *mem; /* out */
    kvs_status status;
    kvs_err err;
    region *region;
    region_seat *seat;
    closer *closer;
    uint8_t uuid[16]; /* of the device that IPC handles name */
    wire_plane_map *maps;
    uint32_t n_maps;
    wire_region_entry *entries;
    uint32_t n_entries;
} making;

/* ---- OPEN ---- */

kvs_status op_open(request *r, wire_in *in, kvs_err *err)
{
    core *c = r->peer->core;
    const directory_ns *n;
    wire_open_rep rep = {0};
    kvs_status s = directory_open(c->dir, r->peer->tenant, in->base, in->len, &rep.ns, err);

    if (s != KVS_OK)
        return s;
    n = directory_namespace(c->dir, rep.ns);
    rep.slot_bytes = n->slot_bytes;
    memcpy(rep.digest, n->digest, sizeof(rep.digest));
    wire_put_open_rep(request_out(r), &rep);
    return KVS_OK;
}

/* ---- on the pinner ---- */

static void import_on(making *m, uint32_t i)
{
    device *d = m->core->devices[i].dev;

    if (m->kind == MAKING_REOFFER)
        m->import.memory = d->ops->memory;
    m->status = d->ops->mem_import(d, &m->import, &m->mem, &m->err);
    if (m->status == KVS_OK)
        m->device = i;
}

/* A device refuses what is not its own, so that the first one which takes the memory is the one that it is on. */
static void making_run(pinner_task *t)
{
    making *m = (making *)(void *)t;
    const uint32_t last = m->core->n_devices - 1;

    if (m->kind == MAKING_CREATE) {
        device *d = m->core->devices[m->device].dev;

        m->status = d->ops->mem_create(d, m->bytes, &m->mem, &m->err);
    } else if (m->device != WIRE_NONE32) {
        import_on(m, m->device);
    } else {
        for (uint32_t i = 0; i <= last && (i == 0 || (m->status != KVS_OK && m->status != KVS_E_DEVICE_LOST)); i++)
            import_on(m, i);
    }
    for (uint32_t i = 0; i < m->import.n_fds; i++) {
        if (m->status == KVS_OK)
            close(m->fds[i]); /* of memory, it is known by now: that is never slow */
        else
            disposal_close(m->fds[i]);
    }
}

/* ---- back on the loop ---- */

/* One range of addresses, whatever the number of pieces. */
static kvs_status join_pieces(making *m, kvs_err *err)
{
    const device_ops *ops = m->mem->dev->ops;
    region *g = m->region;
    uint8_t *end = NULL;

    g->device = m->device;
    g->n_pieces = ops->mem_pieces(m->mem);
    if (g->n_pieces > WIRE_MAX_FDS)
        return kvs_fail(err, KVS_E_LIMIT, "region: %u pieces are above %d", g->n_pieces, WIRE_MAX_FDS);
    g->bytes = 0;
    for (uint32_t i = 0; i < g->n_pieces; i++) {
        uint64_t bytes = 0;
        uint8_t *at = ops->mem_base(m->mem, i, &bytes);

        if (i == 0) {
            g->base = at;
            g->piece_bytes = bytes;
        } else if (at != end && !g->imported) {
            return kvs_fail(err, KVS_E_UNSUPPORTED, "region: piece %u does not follow the one before it", i);
        }
        end = at + bytes;
        g->bytes += bytes;
    }
    if (!g->imported && g->bytes < m->bytes)
        return kvs_fail(err, KVS_E_RANGE, "region: its pieces have %" PRIu64 " bytes, %" PRIu64 " are needed", g->bytes,
                        m->bytes);
    return KVS_OK;
}

static uint32_t count_fds(const making *m)
{
    uint32_t n = 0;

    for (uint32_t i = 0; i < m->region->n_pieces; i++)
        n += m->mem->dev->ops->mem_fd(m->mem, i) >= 0;
    return n;
}

static kvs_status make_map(making *m, kvs_err *err)
{
    region *g = m->region;
    kvs_status s = join_pieces(m, err);

    if (s == KVS_OK)
        s = peer_check_fds(m->request->peer, count_fds(m), err);
    /* The size is known now: whole pages of the device, or what the descriptors of an import hold.  Other requests may have
     * come back first. */
    if (s == KVS_OK)
        s = peer_check_bytes(m->request->peer, g->imported, m->closer->bytes, g->bytes, err);
    if (s != KVS_OK || !m->ns)
        return s;
    if (!g->imported)
        return region_map_contiguous(&m->ns->desc, g->base, g->n_slots, &g->map, err);
    return region_map_imported(&m->ns->desc, g->n_slots, m->maps, m->n_maps, m->mem,
                               m->import.memory == WIRE_MEMORY_CUDA_VMM, &g->map, err);
}

/* The memory is not wanted: give everything back. */
static void unmake(making *m)
{
    peer *p = m->request->peer;

    if (m->seat)
        (void)region_leave(m->seat);
    region_destroy(m->region);
    m->seat = NULL;
    m->region = NULL;
    if (m->closer && m->mem)
        closer_run(m->closer, p, NULL, NULL);
    else if (m->closer)
        closer_cancel(m->closer);
    m->closer = NULL;
}

static kvs_status add_piece_fds(request *r, const region *g, kvs_err *err)
{
    for (uint32_t i = 0; i < g->n_pieces; i++) {
        int fd = fcntl(g->mem->dev->ops->mem_fd(g->mem, i), F_DUPFD_CLOEXEC, 3);
        kvs_status s;

        if (fd < 0)
            return kvs_fail(err, KVS_E_SYS, "descriptor of piece %u: errno %d", i, errno);
        s = request_add_fd(r, fd, err);
        if (s != KVS_OK)
            return s;
        if ((uint32_t)fd >= r->peer->core->client_fds) /* replies that are not read keep theirs */
            return kvs_fail(err, KVS_E_LIMIT, "descriptors: all %u that clients may have are in use",
                            r->peer->core->client_fds);
    }
    return KVS_OK;
}

/* Reply of the four ways to get a region; statuses of re-offered slots behind it. */
static kvs_status put_region(request *r, region_seat *seat, const making *m, kvs_err *err)
{
    const region *g = seat->region;
    wire_out *o = request_out(r);
    wire_region_rep rep = {
        .region = g->id, .n_slots = g->n_slots, .bytes = g->bytes, .n_entries = m ? m->n_entries : 0};
    bool all_ok = true;

    if (!g->imported) {
        kvs_status s = add_piece_fds(r, g, err);

        if (s != KVS_OK)
            return s;
        rep.n_pieces = g->n_pieces;
        rep.piece_bytes = g->piece_bytes;
        rep.slot_stride = g->map ? g->map->slot_bytes : 0;
        memcpy(rep.token, g->token, sizeof(rep.token));
    }
    wire_put_region_rep(o, &rep);
    for (uint32_t i = 0; m && i < m->n_entries; i++) {
        kvs_status e = region_readopt(seat, &m->entries[i]);

        all_ok = all_ok && e == KVS_OK;
        wire_put_u32(o, e);
    }
    wire_put_pad8(o);
    return all_ok ? KVS_OK : KVS_E_PARTIAL;
}

static kvs_status check_same(const region *g, uint32_t ns, uint32_t kind, uint32_t n_slots, uint64_t bytes,
                             kvs_err *err)
{
    if (g->kind != kind || g->ns != ns)
        return kvs_fail(err, KVS_E_INVALID, "token: its region is of kind %u and namespace %u, not %u and %u", g->kind,
                        g->ns, kind, ns);
    if ((n_slots != 0 && n_slots != g->n_slots) || (bytes != 0 && bytes > g->bytes))
        return kvs_fail(err, KVS_E_INVALID, "token: its region has %u slots and %" PRIu64 " bytes, not %u and %" PRIu64,
                        g->n_slots, g->bytes, n_slots, bytes);
    return KVS_OK;
}

/* Sit down in a region that lives; `m` has the entries of a re-offer, or is NULL. */
static kvs_status join_region(request *r, region *g, const making *m, kvs_err *err)
{
    region_seat *seat = NULL;
    kvs_status s;

    if (peer_seat(r->peer, g->id, &seat, NULL) == KVS_OK)
        return kvs_fail(err, KVS_E_EXISTS, "token: this connection has region %u already", g->id);
    s = region_sit(g, &seat);
    if (s != KVS_OK)
        return kvs_fail(err, s, "region: no memory for another client's place");
    s = put_region(r, seat, m, err);
    if (s != KVS_OK && s != KVS_E_PARTIAL) {
        (void)region_leave(seat); /* never the last: the region lived before */
        return s;
    }
    peer_add_seat(r->peer, seat);
    return s;
}

static kvs_status finish_making(making *m, kvs_err *err)
{
    request *r = m->request;
    region *g = m->region, *other = NULL;
    kvs_status s = m->status;

    if (s != KVS_OK) {
        *err = m->err;
        return s;
    }
    if (m->kind == MAKING_REOFFER)
        other = core_find_token(r->peer->core, r->peer->tenant, g->token);
    if (other) { /* another connection re-offered it meanwhile */
        s = check_same(other, g->ns, g->kind, g->n_slots, m->bytes, err);
        return s == KVS_OK ? join_region(r, other, m, err) : s;
    }
    s = make_map(m, err);
    if (s != KVS_OK)
        return s;
    g->mem = m->mem;
    core_add_region(r->peer->core, g);
    return put_region(r, m->seat, m, err);
}

static void making_done(work *w)
{
    making *m = (making *)(void *)w;
    request *r = m->request;
    peer *p = r->peer;
    core *c = p->core;
    kvs_status s = KVS_E_DEADLINE;
    kvs_err err = {0};

    core_note_status(c, m->status);
    p->n_making--;
    m->closer->mem = m->mem;
    if (!r->answered && !p->gone)
        s = finish_making(m, &err);
    if (m->region && m->region->id != 0 && (s == KVS_OK || s == KVS_E_PARTIAL)) {
        closer_charge(m->closer, m->region->bytes);
        closer_charge_fds(m->closer, count_fds(m));
        m->region->closer = m->closer;
        peer_add_seat(p, m->seat);
    } else {
        if (m->region && m->region->id != 0)
            core_remove_region(c, m->region);
        unmake(m);
    }
    r->outcome = s;
    if (!r->answered)
        request_answer(r, s, &err);
    request_end(r);
    core_rest(c);
}

static bool making_stop(request *r, bool running)
{
    (void)r;
    (void)running; /* the call cannot be broken off; what it makes is closed when it returns */
    return false;
}

static void nothing_known(request *r, bool untouched)
{
    (void)r;
    (void)untouched;
}

static const request_ops making_ops = {making_stop, nothing_known};

/* ---- admission ---- */

/* exists: the memory is there, and says by itself on which device. */
static kvs_status check_geometry(peer *p, uint32_t ns, uint32_t kind, uint32_t dev, bool exists, uint32_t n_slots,
                                 uint64_t bytes, const directory_ns **ret_ns, kvs_err *err)
{
    *ret_ns = NULL;
    if (dev >= p->core->n_devices && !(dev == WIRE_NONE32 && exists))
        return kvs_fail(err, KVS_E_RANGE, "device: %u is not below %u", dev, p->core->n_devices);
    if (kind == WIRE_REGION_SCRATCH) {
        if (ns != WIRE_NONE32 || n_slots != 0)
            return kvs_fail(err, KVS_E_INVALID, "ns, n_slots: %u and %u, scratch has none and 0", ns, n_slots);
        if (bytes < 1)
            return kvs_fail(err, KVS_E_INVALID, "bytes: 0 bytes of scratch");
        return KVS_OK;
    }
    if (kind != WIRE_REGION_SLOTS)
        return kvs_fail(err, KVS_E_INVALID, "kind: %u is neither slots (0) nor scratch (1)", kind);
    if (n_slots < 1 || n_slots > REGION_MAX_SLOTS)
        return kvs_fail(err, KVS_E_RANGE, "n_slots: %u is outside 1..%d", n_slots, REGION_MAX_SLOTS);
    return peer_ns(p, ns, ret_ns, err);
}

static kvs_status check_places(const peer *p, kvs_err *err)
{
    if (p->n_seats + p->n_making >= CORE_MAX_REGIONS)
        return kvs_fail(err, KVS_E_LIMIT, "regions: this client has %d already", CORE_MAX_REGIONS);
    return KVS_OK;
}

/* Everything but the memory.  On failure nothing is left. */
static kvs_status prepare(request *r, making_kind kind, const directory_ns *ns, uint32_t ns_id, uint32_t dev,
                          uint32_t n_slots, uint64_t bytes, making **ret, kvs_err *err)
{
    peer *p = r->peer;
    core *c = p->core;
    making *m = request_alloc(r, 1, sizeof(*m));
    bool imported = kind == MAKING_IMPORT;
    kvs_status s = KVS_E_NO_MEMORY;

    if (!m)
        return kvs_fail(err, KVS_E_NO_MEMORY, "region: out of memory");
    m->request = r;
    m->kind = kind;
    m->ns = ns;
    m->bytes = bytes;
    m->core = c;
    m->device = dev;
    m->import.fds = m->fds;
    m->closer = closer_create(p, imported, imported ? 0 : bytes);
    if (m->closer)
        s = region_create(&m->region, ns ? WIRE_REGION_SLOTS : WIRE_REGION_SCRATCH, imported, n_slots, c->seed);
    if (s == KVS_OK)
        s = region_sit(m->region, &m->seat);
    if (s == KVS_OK && getrandom(m->region->token, WIRE_TOKEN_BYTES, 0) != WIRE_TOKEN_BYTES)
        s = KVS_E_SYS;
    if (s != KVS_OK) {
        unmake(m);
        return kvs_fail(err, s, "region of %u slots: no memory for its bookkeeping", n_slots);
    }
    m->region->tenant = p->tenant;
    m->region->ns = ns_id;
    r->ext = m;
    *ret = m;
    return KVS_OK;
}

static kvs_status launch(making *m, kvs_err *err)
{
    request *r = m->request;
    kvs_status s = request_go(r, &making_ops, err);

    if (s != KVS_OK) {
        unmake(m);
        return s;
    }
    if (m->kind != MAKING_CREATE)
        while (m->import.n_fds < r->frame->head.n_fds) {
            m->fds[m->import.n_fds] = request_take_fd(r, m->import.n_fds);
            m->import.n_fds++;
        }
    r->peer->n_making++;
    m->task.run = making_run;
    m->task.work.on_done = making_done;
    core_task(r->peer->core, &m->task, true);
    return KVS_OK;
}

kvs_status op_region_create(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns = NULL;
    wire_region_create_req q;
    making *m = NULL;
    uint64_t bytes;
    kvs_status s;

    wire_get_region_create_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_geometry(r->peer, q.ns, q.kind, q.device, false, q.n_slots, q.bytes, &ns, err);
    if (s != KVS_OK)
        return s;
    bytes = ns ? q.n_slots * ns->slot_bytes : q.bytes;
    if (ns && q.bytes != 0 && q.bytes != bytes)
        return kvs_fail(err, KVS_E_INVALID, "bytes: %" PRIu64 " is neither 0 nor %u slots of %" PRIu64, q.bytes,
                        q.n_slots, ns->slot_bytes);
    s = check_places(r->peer, err);
    if (s == KVS_OK)
        s = peer_check_bytes(r->peer, false, 0, bytes, err);
    if (s == KVS_OK)
        s = prepare(r, MAKING_CREATE, ns, q.ns, q.device, q.n_slots, bytes, &m, err);
    return s == KVS_OK ? launch(m, err) : s;
}

static kvs_status read_entries(making *m, const wire_region_attach_req *q, const uint8_t *array, kvs_err *err)
{
    wire_in in = {.base = array, .len = (size_t)q->n_entries * WIRE_region_entry_BYTES};

    m->entries = request_alloc(m->request, (uint64_t)q->n_entries + 1, sizeof(m->entries[0]));
    if (!m->entries)
        return kvs_fail(err, KVS_E_NO_MEMORY, "re-offer of %u slots: out of memory", q->n_entries);
    for (uint32_t i = 0; i < q->n_entries; i++)
        wire_get_region_entry(&in, &m->entries[i]);
    m->n_entries = q->n_entries;
    return request_room(m->request, WIRE_region_rep_BYTES + (uint64_t)q->n_entries * 4, err);
}

static kvs_status reoffer(request *r, const wire_region_attach_req *q, const directory_ns *ns, const uint8_t *array,
                          kvs_err *err)
{
    uint64_t bytes = ns ? q->n_slots * ns->slot_bytes : q->bytes;
    making *m = NULL;
    kvs_status s = peer_check_bytes(r->peer, false, 0, bytes, err);

    if (s == KVS_OK && r->frame->head.n_fds < 1)
        s = kvs_fail(err, KVS_E_INVALID, "n_fds: 0 descriptors came with the re-offer");
    if (s == KVS_OK)
        s = prepare(r, MAKING_REOFFER, ns, q->ns, q->device, q->n_slots, bytes, &m, err);
    if (s != KVS_OK)
        return s;
    memcpy(m->region->token, q->token, WIRE_TOKEN_BYTES);
    /* Whole pages of each piece, and no more. */
    m->import.max_bytes = bytes + (uint64_t)r->frame->head.n_fds * ((2u << 20) - 1);
    s = read_entries(m, q, array, err);
    if (s != KVS_OK) {
        unmake(m);
        return s;
    }
    return launch(m, err);
}

static kvs_status attach_by_token(request *r, const wire_region_attach_req *q, kvs_err *err)
{
    region *g = core_find_token(r->peer->core, r->peer->tenant, q->token);
    const directory_ns *ns;
    kvs_status s;

    if (r->frame->head.n_fds != 0 || q->n_entries != 0)
        return kvs_fail(err, KVS_E_INVALID, "mode: 0 (token) goes without descriptors and entries, %u and %u came",
                        r->frame->head.n_fds, q->n_entries);
    if (!g)
        return kvs_fail(err, KVS_E_NOT_FOUND, "token: no region of this tenant has it");
    s = check_same(g, q->ns, q->kind, q->n_slots, q->bytes, err);
    if (s == KVS_OK && g->ns != WIRE_NONE32)
        s = peer_ns(r->peer, g->ns, &ns, err); /* its tenant may have left, and be back */
    return s == KVS_OK ? join_region(r, g, NULL, err) : s;
}

kvs_status op_region_attach(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns = NULL;
    wire_region_attach_req q;
    const uint8_t *array;
    kvs_status s;

    wire_get_region_attach_req(in, &q);
    array = wire_get_array(in, q.n_entries, WIRE_region_entry_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_places(r->peer, err);
    if (s != KVS_OK)
        return s;
    if (q.mode == WIRE_ATTACH_TOKEN)
        return attach_by_token(r, &q, err);
    if (q.mode != WIRE_ATTACH_REOFFER)
        return kvs_fail(err, KVS_E_INVALID, "mode: %u is neither token (0) nor re-offer (1)", q.mode);
    s = check_geometry(r->peer, q.ns, q.kind, q.device, true, q.n_slots, q.bytes, &ns, err);
    if (s == KVS_OK && q.n_entries > q.n_slots)
        s = kvs_fail(err, KVS_E_INVALID, "n_entries: %u is above n_slots %u", q.n_entries, q.n_slots);
    return s == KVS_OK ? reoffer(r, &q, ns, array, err) : s;
}

static kvs_status read_maps(request *r, const uint8_t *array, uint32_t n, wire_plane_map **ret, kvs_err *err)
{
    wire_in in = {.base = array, .len = (size_t)n * WIRE_plane_map_BYTES};
    wire_plane_map *maps = request_alloc(r, (uint64_t)n + 1, sizeof(*maps));

    if (!maps)
        return kvs_fail(err, KVS_E_NO_MEMORY, "import of %u maps: out of memory", n);
    for (uint32_t i = 0; i < n; i++)
        wire_get_plane_map(&in, &maps[i]);
    *ret = maps;
    return KVS_OK;
}

/* CUDA IPC handles travel in the body; other memory has descriptors and none of them. */
static kvs_status check_handles(const request *r, const wire_region_import_req *q, kvs_err *err)
{
    uint32_t n_fds = r->frame->head.n_fds;

    if (q->memory != WIRE_MEMORY_CUDA_IPC && q->n_ipc != 0)
        return kvs_fail(err, KVS_E_INVALID, "n_ipc: %u handles with memory %u, which has none", q->n_ipc, q->memory);
    if (q->memory == WIRE_MEMORY_CUDA_IPC && (q->n_ipc < 1 || q->n_ipc > WIRE_MAX_FDS))
        return kvs_fail(err, KVS_E_INVALID, "n_ipc: %u is outside 1..%d", q->n_ipc, WIRE_MAX_FDS);
    if (q->memory == WIRE_MEMORY_CUDA_IPC && n_fds != 0)
        return kvs_fail(err, KVS_E_INVALID, "n_fds: %u descriptors with memory 1, whose pieces are ipc handles", n_fds);
    return KVS_OK;
}

static kvs_status read_handles(making *m, const uint8_t *array, uint32_t n, kvs_err *err)
{
    wire_in in = {.base = array, .len = (size_t)n * WIRE_ipc_handle_BYTES};
    uint8_t(*handles)[64] = request_alloc(m->request, (uint64_t)n + 1, sizeof(*handles));

    if (!handles)
        return kvs_fail(err, KVS_E_NO_MEMORY, "import of %u handles: out of memory", n);
    for (uint32_t i = 0; i < n; i++) {
        wire_ipc_handle h;

        wire_get_ipc_handle(&in, &h);
        memcpy(handles[i], h.handle_low, sizeof(h.handle_low));
        memcpy(handles[i] + sizeof(h.handle_low), h.handle_high, sizeof(h.handle_high));
        if (i > 0 && memcmp(m->uuid, h.uuid, sizeof(h.uuid)) != 0)
            return kvs_fail(err, KVS_E_INVALID, "ipc %u: uuid: not the device of the handles before it", i);
        memcpy(m->uuid, h.uuid, sizeof(h.uuid));
    }
    m->import.ipc = (const uint8_t(*)[64])handles;
    m->import.n_ipc = n;
    m->import.uuid = m->uuid;
    return KVS_OK;
}

kvs_status op_region_import(request *r, wire_in *in, kvs_err *err)
{
    const directory_ns *ns = NULL;
    wire_region_import_req q;
    wire_plane_map *maps = NULL;
    making *m = NULL;
    const uint8_t *array, *handles = NULL;
    bool ipc;
    kvs_status s;

    wire_get_region_import_req(in, &q);
    ipc = q.memory == WIRE_MEMORY_CUDA_IPC;
    array = wire_get_array(in, q.n_maps, WIRE_plane_map_BYTES);
    if (ipc)
        handles = wire_get_array(in, q.n_ipc, WIRE_ipc_handle_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_handles(r, &q, err);
    if (s == KVS_OK)
        s = check_places(r->peer, err);
    if (s == KVS_OK)
        s = check_geometry(r->peer, q.ns, WIRE_REGION_SLOTS, q.device, true, q.n_slots, 0, &ns, err);
    if (s == KVS_OK)
        s = read_maps(r, array, q.n_maps, &maps, err);
    if (s == KVS_OK)
        s = region_maps_check(&ns->desc, q.n_slots, maps, q.n_maps, ipc ? q.n_ipc : r->frame->head.n_fds,
                              q.memory == WIRE_MEMORY_CUDA_VMM, err);
    if (s == KVS_OK)
        s = prepare(r, MAKING_IMPORT, ns, q.ns, q.device, q.n_slots, 0, &m, err);
    if (s != KVS_OK)
        return s;
    s = ipc ? read_handles(m, handles, q.n_ipc, err) : KVS_OK;
    if (s != KVS_OK) {
        unmake(m);
        return s;
    }
    m->region->backend = maps[0].backend;
    m->maps = maps;
    m->n_maps = q.n_maps;
    m->import.memory = q.memory;
    m->import.max_bytes = peer_import_room(r->peer);
    return launch(m, err);
}

/* ---- CLOSE ---- */

static void close_after(void *ud)
{
    request *r = ud;

    if (!r->answered)
        request_answer(r, KVS_OK, NULL);
    request_end(r);
}

kvs_status op_region_close(request *r, wire_in *in, kvs_err *err)
{
    peer *p = r->peer;
    wire_region_close_req q;
    region_seat *seat = NULL, **at;
    kvs_status s;

    wire_get_region_close_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK && q.reserved != 0)
        s = kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", q.reserved);
    if (s == KVS_OK)
        s = peer_seat(p, q.region, &seat, err);
    if (s == KVS_OK && seat->users > 0)
        s = kvs_fail(err, KVS_E_BUSY, "region: %u requests in flight use region %u", seat->users, q.region);
    if (s == KVS_OK && seat->region->n_seats == 1)
        s = request_go(r, &making_ops, err); /* the last one waits for the memory to be gone */
    if (s != KVS_OK)
        return s;
    for (at = &p->seats; *at != seat; at = &(*at)->next)
        ;
    *at = seat->next;
    core_leave(p, seat, r->out ? close_after : NULL, r);
    return KVS_OK;
}

/* ---- slots ---- */

kvs_status op_slot_take(request *r, wire_in *in, kvs_err *err)
{
    wire_slot_take_req q;
    wire_slot_take_rep rep = {0};
    region_seat *seat = NULL;
    wire_out *o = request_out(r);
    kvs_status s;

    wire_get_slot_take_req(in, &q);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = peer_seat(r->peer, q.region, &seat, err);
    if (s == KVS_OK && !seat->region->slots)
        s = kvs_fail(err, KVS_E_INVALID, "region: %u has no slots to take", q.region);
    if (s == KVS_OK && q.n > seat->region->n_slots)
        s = kvs_fail(err, KVS_E_RANGE, "n: %u is above the %u slots of the region", q.n, seat->region->n_slots);
    if (s == KVS_OK && q.n > core_max_keys(r->peer->core))
        s = kvs_fail(err, KVS_E_LIMIT, "n: %u is above %u", q.n, core_max_keys(r->peer->core));
    if (s == KVS_OK && q.n > region_available(seat->region))
        s = kvs_fail(err, KVS_E_NO_SPACE, "n: %u of %u slots, %u are free or may be evicted", q.n,
                     seat->region->n_slots, region_available(seat->region));
    if (s == KVS_OK)
        s = request_room(r, WIRE_slot_take_rep_BYTES + (uint64_t)q.n * WIRE_slot_ref_BYTES, err);
    if (s != KVS_OK)
        return s;
    rep.n = q.n;
    wire_put_slot_take_rep(o, &rep);
    for (uint32_t i = 0; i < q.n; i++) {
        wire_slot_ref ref = {0};

        (void)region_take(seat, &ref.slot); /* there are enough: just counted */
        ref.gen = seat->region->slots[ref.slot].gen;
        wire_put_slot_ref(o, &ref);
    }
    return KVS_OK;
}

/* SLOT_DROP, at once or (as a mover job without items) when a counter is reached. */
typedef struct dropping {
    mover_job job; /* first */
    request *request;
    region_seat *seat;
    mover *mover; /* of the region's device: it waits for the counter */
    uint32_t n;
    wire_slot_ref *refs;
} dropping;

static kvs_status drop_slots(dropping *d)
{
    wire_out *o = request_out(d->request);
    wire_key_rep rep = {.n = d->n};

    o->len = WIRE_key_rep_BYTES;
    for (uint32_t i = 0; i < d->n; i++) {
        kvs_status s = region_drop(d->seat, d->refs[i].slot, d->refs[i].gen);

        rep.n_ok += s == KVS_OK;
        wire_put_u32(o, s);
    }
    wire_put_pad8(o);
    wire_put_key_rep(&(wire_out){o->base, 0, WIRE_key_rep_BYTES, false}, &rep);
    return rep.n_ok == rep.n ? KVS_OK : KVS_E_PARTIAL;
}

static bool dropping_stop(request *r, bool running)
{
    dropping *d = r->ext;
    bool dropped = mover_drop(d->mover, &d->job);

    (void)running; /* a drop that has begun has nothing left to stop */
    mover_kick(d->mover);
    return dropped;
}

static void dropping_done(work *w)
{
    dropping *d = (dropping *)(void *)w;
    request *r = d->request;
    core *c = r->peer->core;
    kvs_status s = d->job.job.status;

    d->seat->users--;
    core_note_status(c, s);
    if (s == KVS_OK && !r->answered)
        s = drop_slots(d);
    r->outcome = s;
    if (!r->answered)
        request_answer(r, s, &d->job.job.err);
    request_end(r);
    core_rest(c);
}

static const request_ops dropping_ops = {dropping_stop, nothing_known};

static kvs_status submit_drop(dropping *d, const wire_slot_drop_req *q, kvs_err *err)
{
    request *r = d->request;
    kvs_status s = request_go(r, &dropping_ops, err);

    if (s != KVS_OK)
        return s;
    job_init(&d->job.job, dropping_done);
    job_fill(&d->job.job, r->peer, q->after_counter, q->after_value, WIRE_NONE32, 0);
    d->job.map = d->seat->region->map;
    d->seat->users++;
    mover_submit(d->mover, &d->job);
    return KVS_OK;
}

static kvs_status check_drop(peer *p, const wire_slot_drop_req *q, region_seat **seat, kvs_err *err)
{
    kvs_status s = counter_check_after(q->after_counter, q->after_value, err);

    if (s == KVS_OK && q->reserved != 0)
        s = kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", q->reserved);
    if (s == KVS_OK && q->n > core_max_keys(p->core))
        s = kvs_fail(err, KVS_E_LIMIT, "n: %u is above %u", q->n, core_max_keys(p->core));
    if (s == KVS_OK)
        s = peer_seat(p, q->region, seat, err);
    if (s == KVS_OK && !(*seat)->region->slots)
        s = kvs_fail(err, KVS_E_INVALID, "region: %u has no slots to drop", q->region);
    return s;
}

kvs_status op_slot_drop(request *r, wire_in *in, kvs_err *err)
{
    wire_slot_drop_req q;
    region_seat *seat = NULL;
    dropping *d;
    const uint8_t *array;
    kvs_status s;

    wire_get_slot_drop_req(in, &q);
    array = wire_get_array(in, q.n, WIRE_slot_ref_BYTES);
    s = request_parsed(in, err);
    if (s == KVS_OK)
        s = check_drop(r->peer, &q, &seat, err);
    if (s == KVS_OK)
        s = request_room(r, WIRE_key_rep_BYTES + (uint64_t)q.n * 4, err);
    if (s != KVS_OK)
        return s;
    d = request_alloc(r, 1, sizeof(*d));
    if (!d || !(d->refs = request_alloc(r, (uint64_t)q.n + 1, sizeof(d->refs[0]))))
        return kvs_fail(err, KVS_E_NO_MEMORY, "drop of %u slots: out of memory", q.n);
    d->request = r;
    d->seat = seat;
    d->mover = core_device_of(r->peer->core, seat->region)->load;
    d->n = q.n;
    for (uint32_t i = 0; i < q.n; i++)
        d->refs[i] = (wire_slot_ref){wire_at_u32(array, 2 * (size_t)i), wire_at_u32(array, 2 * (size_t)i + 1)};
    r->ext = d;
    return q.after_counter == WIRE_NONE32 ? drop_slots(d) : submit_drop(d, &q, err);
}
