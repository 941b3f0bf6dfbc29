#include "daemon/core.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include <xxhash.h>

#include "proto/text.h"

/* ---- life of a connection ---- */

/* One more client of its kind, or one less. */
static void count(core *c, const peer_info *info, uint32_t by)
{
    if (info->denied[0] != '\0')
        return; /* the server counts those */
    *(info->is_admin ? &c->n_admins : &c->n_clients) += by;
    if (info->is_admin)
        return;
    c->tenants[info->tenant].n_clients += by;
    if (c->tenants[info->tenant].n_clients == (by == 1 ? 1 : 0))
        core_present(c, by);
}

static kvs_status check_place(const core *c, const peer_info *info, kvs_err *err)
{
    if (info->denied[0] != '\0')
        return KVS_OK;
    if (info->is_admin && c->n_admins >= CORE_ADMIN_PLACES)
        return kvs_fail(err, KVS_E_LIMIT, "admin socket: all %d places are taken", CORE_ADMIN_PLACES);
    if (!info->is_admin && info->tenant >= c->config->n_tenants)
        return kvs_fail(err, KVS_E_DENIED, "there is no tenant %u", info->tenant);
    if (!info->is_admin && c->tenants[info->tenant].n_clients >= (uint64_t)c->config->max_clients)
        return kvs_fail(err, KVS_E_LIMIT, "limits.max_clients: all %lld places of tenant %s are taken",
                        (long long)c->config->max_clients, tenant_name(c->config, info->tenant));
    return KVS_OK;
}

kvs_status peer_create(peer **ret, core *c, const peer_ops *ops, void *ud, const peer_info *info, uint64_t now_us,
                       kvs_err *err)
{
    kvs_status s = check_place(c, info, err);
    peer *p;

    if (s != KVS_OK)
        return s;
    p = calloc(1, sizeof(*p));
    if (!p)
        return kvs_fail(err, KVS_E_NO_MEMORY, "peer: out of memory");
    c->now_us = now_us;
    p->core = c;
    p->ops = ops;
    p->ud = ud;
    p->info = *info;
    p->tenant = info->is_admin ? TENANT_ADMIN : info->tenant;
    p->conn_id = c->next_conn_id++;
    count(c, info, 1);
    p->next = c->peers;
    if (p->next)
        p->next->prev = p;
    c->peers = p;
    *ret = p;
    return KVS_OK;
}

static void peer_free(peer *p)
{
    core *c = p->core;
    const peer_ops *ops = p->ops;
    void *ud = p->ud;

    *(p->prev ? &p->prev->next : &c->peers) = p->next;
    if (p->next)
        p->next->prev = p->prev;
    count(c, &p->info, UINT32_MAX);
    if (p->counters)
        munmap(p->counters, WIRE_COUNTER_PAGE_BYTES);
    free(p);
    ops->closed(ud);
}

uint32_t peer_in_flight(const peer *p)
{
    return p->n_in_flight;
}

bool peer_said_hello(const peer *p)
{
    return p->hello;
}

uint64_t peer_conn_id(const peer *p)
{
    return p->conn_id;
}

static void stop_all(peer *p)
{
    for (request *r = p->requests; r; r = r->next)
        if (r->ops->stop) /* a CANCEL has none: it ends with its target */
            (void)r->ops->stop(r, true);
}

void peer_gone(peer *p, uint64_t now_us)
{
    core *c = p->core;

    c->now_us = now_us;
    p->gone = true;
    c->n_watchers -= p->watch_mask != 0;
    p->watch_mask = 0;
    c->step_due = directory_owner_gone(c->dir, p->conn_id) || c->step_due;
    stop_all(p);
    peer_drained(p);
    core_rest(c);
}

void peer_dismiss(peer *p)
{
    for (request *r = p->requests; r; r = r->next) {
        if (!r->ops->stop) /* a CANCEL ends with its target */
            continue;
        r->cancelled = true;
        (void)r->ops->stop(r, false);
    }
}

/* Jobs first, then seats, then the memory on the pinner: the order in which nothing can still be touched. */
void peer_drained(peer *p)
{
    if (!p->gone || p->closing || p->n_out > 0)
        return;
    p->closing = true;
    while (p->seats) {
        region_seat *s = p->seats;

        p->seats = s->next;
        core_leave(p, s, NULL, NULL);
    }
    p->closing = false;
    if (p->n_tasks == 0)
        peer_free(p);
}

/* ---- what a peer may name ---- */

kvs_status peer_ns(const peer *p, uint32_t ns, const directory_ns **ret, kvs_err *err)
{
    const directory_ns *n = ns == WIRE_NONE32 ? NULL : directory_namespace(p->core->dir, ns);

    if (!n || n->gone || !tenant_may(p->tenant, n->tenant))
        return kvs_fail(err, KVS_E_NOT_FOUND, "ns: %u is no namespace of this %s", ns,
                        p->info.is_admin ? "daemon; 'kvstridectl namespaces' lists them" : "client");
    *ret = n;
    return KVS_OK;
}

kvs_status peer_seat(const peer *p, uint32_t id, region_seat **ret, kvs_err *err)
{
    for (region_seat *s = p->seats; s; s = s->next)
        if (s->region->id == id) {
            *ret = s;
            return KVS_OK;
        }
    return kvs_fail(err, KVS_E_NOT_FOUND, "region: %u is no region of this client", id);
}

kvs_status peer_slots(const peer *p, uint32_t id, uint32_t ns, region_seat **ret, kvs_err *err)
{
    region_seat *seat = NULL;
    kvs_status s = peer_seat(p, id, &seat, err);

    if (s != KVS_OK)
        return s;
    if (seat->region->kind != WIRE_REGION_SLOTS)
        return kvs_fail(err, KVS_E_INVALID, "region: %u is scratch and has no slots", id);
    if (seat->region->ns != ns)
        return kvs_fail(err, KVS_E_INVALID, "region: %u holds slots of namespace %u, not of %u", id, seat->region->ns,
                        ns);
    *ret = seat;
    return KVS_OK;
}

void peer_add_seat(peer *p, region_seat *s)
{
    s->next = p->seats;
    p->seats = s;
    p->n_seats++;
}

/* ---- regions ---- */

void closer_charge(closer *x, uint64_t bytes)
{
    core_tenant *t = &x->core->tenants[x->tenant];

    *(x->imported ? &x->peer->import_bytes : &x->core->region_bytes) += bytes - x->bytes;
    *(x->imported ? &t->import_bytes : &t->region_bytes) += bytes - x->bytes;
    x->core->import_bytes += x->imported ? bytes - x->bytes : 0;
    x->bytes = bytes;
}

void closer_charge_fds(closer *x, uint32_t n)
{
    x->core->tenants[x->tenant].region_fds += n - x->n_fds;
    x->n_fds = n;
}

static void closer_free(closer *x)
{
    closer_charge(x, 0);
    closer_charge_fds(x, 0);
    free(x);
}

static kvs_status check_limit(const char *key, const char *of, uint64_t used, uint64_t bytes, uint64_t most,
                              kvs_err *err)
{
    if (bytes > most || used > most - bytes)
        return kvs_fail(err, KVS_E_LIMIT, "%s%s: %" PRIu64 " in use and %" PRIu64 " more are above %" PRIu64, key, of,
                        used, bytes, most);
    return KVS_OK;
}

static uint64_t limit_or_none(int64_t bytes)
{
    return bytes == 0 ? UINT64_MAX : (uint64_t)bytes;
}

kvs_status peer_check_bytes(const peer *p, bool imported, uint64_t had, uint64_t bytes, kvs_err *err)
{
    const config *cfg = p->core->config;
    const config_tenant *limits = &cfg->tenants[p->tenant];
    const core_tenant *t = &p->core->tenants[p->tenant];
    kvs_status s;

    if (imported)
        s = check_limit("device.max_import_bytes", "", p->import_bytes - had, bytes,
                        (uint64_t)cfg->device_max_import_bytes, err);
    else
        s = check_limit("device.max_region_bytes", "", p->core->region_bytes - had, bytes,
                        (uint64_t)cfg->device_max_region_bytes, err);
    if (s != KVS_OK)
        return s;
    if (imported)
        return check_limit("import_bytes of tenant ", limits->name, t->import_bytes - had, bytes,
                           limit_or_none(limits->import_bytes), err);
    return check_limit("region_bytes of tenant ", limits->name, t->region_bytes - had, bytes,
                       limit_or_none(limits->region_bytes), err);
}

/* Half of them are for connections, and of the others a tenant has an equal part. */
kvs_status peer_check_fds(const peer *p, uint32_t n, kvs_err *err)
{
    const core *c = p->core;
    uint32_t n_tenants = 0, most;

    for (uint32_t t = 0; t < c->config->n_tenants; t++)
        n_tenants += !tenant_is_gone(c->config, t);
    most = c->client_fds / 2 / (n_tenants > 0 ? n_tenants : 1);
    return check_limit("descriptors of the regions of tenant ", tenant_name(c->config, p->tenant),
                       c->tenants[p->tenant].region_fds, n, most, err);
}

static uint64_t left(uint64_t most, uint64_t used)
{
    return most > used ? most - used : 0;
}

uint64_t peer_import_room(const peer *p)
{
    const config *cfg = p->core->config;
    uint64_t own = left((uint64_t)cfg->device_max_import_bytes, p->import_bytes);
    uint64_t all = left(limit_or_none(cfg->tenants[p->tenant].import_bytes), p->core->tenants[p->tenant].import_bytes);

    return own < all ? own : all;
}

static void close_run(pinner_task *t)
{
    closer *x = (closer *)(void *)t;

    x->mem->dev->ops->mem_close(x->mem);
    region_destroy(x->region);
}

static void close_done(work *w)
{
    closer *x = (closer *)(void *)w;
    core *c = x->core;
    peer *p = x->peer;
    void (*after)(void *ud) = x->after;
    void *ud = x->ud;

    c->n_tasks--;
    p->n_tasks--;
    closer_free(x);
    if (after)
        after(ud);
    else
        peer_drained(p);
    core_rest(c);
}

closer *closer_create(peer *p, bool imported, uint64_t bytes)
{
    closer *x = calloc(1, sizeof(*x));

    if (!x)
        return NULL;
    x->core = p->core;
    x->peer = p;
    x->imported = imported;
    x->tenant = p->tenant;
    closer_charge(x, bytes);
    return x;
}

void closer_cancel(closer *x)
{
    closer_free(x);
}

void closer_run(closer *x, peer *p, void (*after)(void *ud), void *ud)
{
    x->peer = p;
    x->after = after;
    x->ud = ud;
    x->task.run = close_run;
    x->task.work.on_done = close_done;
    x->core->n_tasks++;
    p->n_tasks++;
    core_task(x->core, &x->task, true);
}

static uint32_t token_bucket(const core *c, const uint8_t token[WIRE_TOKEN_BYTES])
{
    return XXH3_64bits_withSeed(token, WIRE_TOKEN_BYTES, c->seed) % CORE_TOKEN_BUCKETS;
}

region *core_find_token(const core *c, uint32_t tenant, const uint8_t token[WIRE_TOKEN_BYTES])
{
    region *g = c->tokens[token_bucket(c, token)];

    while (g && (g->tenant != tenant || memcmp(g->token, token, WIRE_TOKEN_BYTES) != 0))
        g = g->next_token;
    return g;
}

static bool is_number_taken(const core *c, uint32_t id)
{
    const region *g = c->numbers_come_again ? c->regions : NULL;

    while (g && g->id != id)
        g = g->next;
    return g || id == 0 || id == WIRE_NONE32;
}

static uint32_t next_number(core *c)
{
    uint32_t id;

    do {
        id = c->next_region++;
        c->numbers_come_again = c->numbers_come_again || c->next_region == 0;
    } while (is_number_taken(c, id));
    return id;
}

void core_add_region(core *c, region *g)
{
    region **bucket = &c->tokens[token_bucket(c, g->token)];

    g->id = next_number(c);
    g->next = c->regions;
    if (g->next)
        g->next->prev = g;
    c->regions = g;
    c->n_regions++;
    if (g->imported)
        return; /* it has no token that anybody was told */
    g->next_token = *bucket;
    *bucket = g;
}

void core_remove_region(core *c, region *g)
{
    region **at = &c->tokens[token_bucket(c, g->token)];

    core_sweeps_pass(c, g);
    *(g->prev ? &g->prev->next : &c->regions) = g->next;
    if (g->next)
        g->next->prev = g->prev;
    c->n_regions--;
    while (*at && *at != g)
        at = &(*at)->next_token;
    if (*at)
        *at = g->next_token;
}

void core_leave(peer *p, region_seat *s, void (*after)(void *ud), void *ud)
{
    core *c = p->core;
    region *g = s->region;
    closer *x;

    p->n_seats--;
    if (!region_leave(s)) {
        if (after)
            after(ud);
        return;
    }
    core_remove_region(c, g);
    x = g->closer;
    x->region = g;
    closer_run(x, p, after, ud);
}

/* ---- HELLO ---- */

static kvs_status check_hello(peer *p, const wire_hello_req *q, wire_in *in, kvs_err *err)
{
    const uint8_t *name;
    kvs_status s;

    if (p->hello)
        return kvs_fail(err, KVS_E_STATE, "op: a second HELLO on this connection");
    if (q->name_len > WIRE_MAX_NAME)
        return kvs_fail(err, KVS_E_LIMIT, "name_len: %u is above %d", q->name_len, WIRE_MAX_NAME);
    name = wire_get_array(in, q->name_len, 1);
    s = request_parsed(in, err);
    if (s != KVS_OK)
        return s;
    if (q->reserved != 0)
        return kvs_fail(err, KVS_E_INVALID, "reserved: %u is not 0", q->reserved);
    if (q->version_min < 1 || q->version_min > q->version_max)
        return kvs_fail(err, KVS_E_INVALID, "version_min, version_max: %u..%u is no range from 1 up", q->version_min,
                        q->version_max);
    s = text_check("name", name, q->name_len, err); /* operators read it in lists and logs */
    if (s != KVS_OK)
        return s;
    if (q->version_min > WIRE_VERSION || q->version_max < WIRE_VERSION)
        return kvs_fail(err, KVS_E_VERSION, "version: client speaks %u..%u, this daemon %d", q->version_min,
                        q->version_max, WIRE_VERSION);
    p->name_len = q->name_len;
    if (q->name_len > 0)
        memcpy(p->name, name, q->name_len);
    p->name[q->name_len] = '\0'; /* an earlier HELLO may have failed behind here */
    return KVS_OK;
}

/* The page is allocated here and sealed: no client can make our reads of it fault. */
static kvs_status make_counters(uint8_t **ret, int *ret_fd, kvs_err *err)
{
    int fd = memfd_create("kvs-counters", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    void *at;

    if (fd < 0)
        return kvs_fail(err, KVS_E_SYS, "memfd_create of a counter page: errno %d", errno);
    if (ftruncate(fd, WIRE_COUNTER_PAGE_BYTES) != 0 || fallocate(fd, 0, 0, WIRE_COUNTER_PAGE_BYTES) != 0 ||
        fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        kvs_fail(err, KVS_E_SYS, "counter page of %d bytes: errno %d", WIRE_COUNTER_PAGE_BYTES, errno);
        close(fd);
        return KVS_E_SYS;
    }
    at = mmap(NULL, WIRE_COUNTER_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (at == MAP_FAILED) {
        kvs_fail(err, KVS_E_SYS, "mmap of a counter page: errno %d", errno);
        close(fd);
        return KVS_E_SYS;
    }
    *ret = at;
    *ret_fd = fd;
    return KVS_OK;
}

static uint64_t our_features(const core *c)
{
    return WIRE_FEATURE_DEVICES | (c->devices[0].dev->ops->memory == WIRE_MEMORY_CUDA_VMM ? WIRE_FEATURE_CUDA : 0);
}

static uint64_t devices_bytes(const core *c)
{
    return WIRE_hello_devices_BYTES + (uint64_t)c->n_devices * WIRE_device_entry_BYTES;
}

static void put_devices(const core *c, wire_out *o)
{
    wire_put_hello_devices(o, &(wire_hello_devices){.n_devices = c->n_devices});
    for (uint32_t i = 0; i < c->n_devices; i++) {
        wire_device_entry e;

        memcpy(e.uuid, c->devices[i].about.uuid, sizeof(e.uuid));
        wire_put_device_entry(o, &e);
    }
}

kvs_status op_hello(request *r, wire_in *in, kvs_err *err)
{
    peer *p = r->peer;
    const config *cfg = p->core->config;
    wire_hello_req q;
    wire_hello_rep rep = {.version = WIRE_VERSION,
                          .is_admin = p->info.is_admin,
                          .n_counters = WIRE_COUNTERS,
                          .conn_id = p->conn_id,
                          .max_body = (uint32_t)cfg->max_body_bytes,
                          .max_keys = core_max_keys(p->core),
                          .credit_requests = (uint32_t)cfg->credit_requests,
                          .control_requests = CORE_CONTROL_CREDIT,
                          .credit_bytes = (uint64_t)cfg->credit_bytes,
                          .default_deadline_us = (uint64_t)cfg->default_deadline_ms * 1000,
                          .max_deadline_us = (uint64_t)cfg->max_deadline_ms * 1000};
    kvs_status s;
    int fd = -1;

    wire_get_hello_req(in, &q);
    rep.features = q.features & our_features(p->core);
    s = check_hello(p, &q, in, err);
    if (s == KVS_OK && (rep.features & WIRE_FEATURE_DEVICES))
        s = request_room(r, WIRE_hello_rep_BYTES + devices_bytes(p->core), err);
    if (s != KVS_OK)
        return s;
    s = make_counters(&p->counters, &fd, err);
    if (s != KVS_OK)
        return s;
    s = request_add_fd(r, fd, err);
    if (s != KVS_OK) {
        munmap(p->counters, WIRE_COUNTER_PAGE_BYTES);
        p->counters = NULL;
        return s;
    }
    memcpy(rep.boot_id, p->core->boot_id, sizeof(rep.boot_id));
    wire_put_hello_rep(request_out(r), &rep);
    if (rep.features & WIRE_FEATURE_DEVICES)
        put_devices(p->core, request_out(r));
    p->hello = true;
    return KVS_OK;
}
