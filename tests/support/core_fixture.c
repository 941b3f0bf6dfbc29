#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <dirent.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "config/json.h"
#include "daemon/core.h"
#include "daemon/disposal.h"
#include "daemon/metrics.h"

/* ---- the daemon ---- */

int fx_count_fds(void)
{
    DIR *d;
    int n = 0;

    cr_assert(disposal_wait(5000));
    d = opendir("/proc/self/fd");
    while (readdir(d))
        n++;
    closedir(d);
    return n;
}

void fx_config(fx *f)
{
    *f = (fx){.now_us = 1000000};
    config_default(&f->cfg);
    f->cfg.pool_max_bytes = CONFIG_MIB(1);
    f->cfg.device_max_region_bytes = CONFIG_MIB(8);
    f->cfg.device_max_import_bytes = CONFIG_MIB(8);
}

static device *open_faulty(void)
{
    device *inner = NULL, *d = NULL;
    kvs_err err = {0};

    cr_assert_eq(device_cpu_open(&inner, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(fault_device_open(inner, &d, &err), KVS_OK, "%s", err.msg);
    return d;
}

static void open_on(fx *f, uint32_t n)
{
    device *all[3];
    kvs_err err = {0};

    f->fds_before = fx_count_fds();
    sink_init(&f->sink);
    f->dev = open_faulty();
    if (f->depth > 0)
        fault_device_pretend(f->dev, f->depth, false);
    if (n > 1 && f->all_faulty)
        f->second = open_faulty();
    else if (n > 1)
        cr_assert_eq(device_cpu_open(&f->second, &err), KVS_OK, "%s", err.msg);
    if (n > 2)
        f->third = open_faulty();
    all[0] = f->dev;
    all[1] = f->second;
    all[2] = f->third;
    for (uint32_t i = 0; i < n && f->all_faulty; i++)
        fault_device_pretend(all[i], 2, false);
    cr_assert_eq(core_create_on(&f->core, &f->cfg, all, n, sink_face(&f->sink), NULL, f->now_us, &err), KVS_OK, "%s",
                 err.msg);
}

static void await_ready(fx *f)
{
    while (!core_is_ready(f->core))
        fx_run(f, 1);
}

void fx_open_starting(fx *f)
{
    open_on(f, 1);
}

void fx_open_two(fx *f)
{
    open_on(f, 2);
    await_ready(f);
}

static void open_exchanging(fx *f, uint32_t n)
{
    strcpy(f->cfg.mover_exchange, "on");
    f->cfg.mover_batch_bytes = CONFIG_KIB(64);
    f->all_faulty = true;
    open_on(f, n);
    await_ready(f);
}

void fx_open_exchanging(fx *f)
{
    open_exchanging(f, 2);
}

void fx_open_exchanging_three(fx *f)
{
    open_exchanging(f, 3);
}

void fx_open(fx *f)
{
    fx_open_starting(f);
    await_ready(f);
}

void fx_run(fx *f, unsigned n)
{
    cr_assert(sink_run_until(&f->sink, f->sink.done + n), "a completion did not come");
}

/* The tick that a sweep, or a LOAD which is held for its twin, is due, as the loop would give it; else the next completion. */
static void go_on(fx *f)
{
    if (core_next_due(f->core) <= f->now_us)
        (void)core_tick(f->core, f->now_us);
    else
        fx_run(f, 1);
}

void fx_advance(fx *f, uint64_t us)
{
    f->now_us += us;
    (void)core_tick(f->core, f->now_us);
}

static void check_sums(const fx *f)
{
    metrics_snapshot *s = calloc(1, sizeof *s);

    cr_assert_not_null(s);
    metrics_fill(f->core, f->now_us, s);
    for (int i = 0; i < METRICS_RULES; i++)
        cr_assert_eq(s->error[i], 0, "rule %s: off by %lld", metrics_rule_name(i), (long long)s->error[i]);
    cr_assert_eq(s->counts.in_flight, 0);
    cr_assert_eq(s->import_bytes, 0);
    free(s);
}

void fx_close(fx *f)
{
    core_stop(f->core);
    (void)sink_run_until(&f->sink, sink_posted(&f->sink));
    cr_assert(core_is_idle(f->core), "requests or unmappings are left");
    cr_assert_eq(f->core->request_bytes, 0, "%llu bytes of requests", (unsigned long long)f->core->request_bytes);
    for (uint32_t t = 0; t < CONFIG_MAX_TENANTS; t++)
        cr_assert_eq(f->core->tenants[t].region_fds, 0, "tenant %u", t);
    check_sums(f);
    core_destroy(f->core);
    f->dev->ops->close(f->dev);
    if (f->second)
        f->second->ops->close(f->second);
    if (f->third)
        f->third->ops->close(f->third);
    sink_fini(&f->sink);
    cr_assert_eq(fx_count_fds(), f->fds_before, "descriptors were leaked");
}

/* ---- clients ---- */

static void on_send(void *ud, reply *r)
{
    fx_client *c = ud;

    r->next = NULL;
    *c->last = r;
    c->last = &r->next;
}

static size_t on_out_bytes(const void *ud)
{
    return ((const fx_client *)ud)->out_bytes;
}

static bool on_is_behind(const void *ud)
{
    const fx_client *c = ud;

    return c->out_bytes >= (uint64_t)c->f->cfg.out_high_bytes;
}

static void on_closed(void *ud)
{
    ((fx_client *)ud)->closed = true;
}

static const peer_ops ops = {on_send, on_out_bytes, on_is_behind, on_closed};

static void connect_as(fx_client *c, fx *f, const peer_info *info)
{
    kvs_err err = {0};

    *c = (fx_client){.f = f, .next_id = 1};
    c->last = &c->first;
    cr_assert_eq(peer_create(&c->peer, f->core, &ops, c, info, f->now_us, &err), KVS_OK, "%s", err.msg);
}

void fx_connect(fx_client *c, fx *f, bool admin)
{
    connect_as(c, f, &(peer_info){.uid = 1000, .pid = 42, .is_admin = admin});
}

void fx_connect_tenant(fx_client *c, fx *f, uint32_t tenant)
{
    connect_as(c, f, &(peer_info){.uid = 1000, .pid = 42, .tenant = tenant});
}

static void hello(fx_client *c)
{
    wire_hello_req q = {.version_min = 1, .version_max = 1, .name_len = 4};
    fx_body *b = fx_new();
    fx_answer a;

    wire_put_hello_req(&b->out, &q);
    wire_put_bytes(&b->out, "test", 4);
    wire_put_pad8(&b->out);
    a = fx_call(c, WIRE_HELLO, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    cr_assert_eq(a.reply->n_fds, 1);
    c->counters = mmap(NULL, WIRE_COUNTER_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, a.reply->fds[0], 0);
    cr_assert(c->counters != MAP_FAILED);
    fx_done(&a);
}

void fx_client_open(fx_client *c, fx *f)
{
    fx_connect(c, f, false);
    hello(c);
}

void fx_client_open_tenant(fx_client *c, fx *f, uint32_t tenant)
{
    fx_connect_tenant(c, f, tenant);
    hello(c);
}

void fx_admin_open(fx_client *c, fx *f)
{
    fx_connect(c, f, true);
    hello(c);
}

void fx_gone(fx_client *c)
{
    peer_gone(c->peer, c->f->now_us);
    (void)core_tick(c->f->core, c->f->now_us);
    while (!c->closed)
        go_on(c->f);
    fx_forget(c);
}

void fx_forget(fx_client *c)
{
    while (c->first) {
        reply *next = c->first->next;

        reply_destroy(c->first);
        c->first = next;
    }
    if (c->counters)
        munmap(c->counters, WIRE_COUNTER_PAGE_BYTES);
}

fx_body *fx_new(void)
{
    fx_body *b = calloc(1, sizeof(*b));

    cr_assert(b != NULL);
    b->out = (wire_out){b->bytes, 0, sizeof(b->bytes), false};
    return b;
}

kvs_status fx_send_frame(fx_client *c, uint16_t op, uint64_t id, uint64_t deadline_us, fx_body *b, const int *fds,
                         uint32_t n_fds)
{
    frame f = {.head = {.op = op,
                        .id = id,
                        .body_len = (uint32_t)b->out.len,
                        .n_fds = (uint16_t)n_fds,
                        .deadline_us = deadline_us}};
    uint8_t *copy = malloc(b->out.len + 1); /* of exactly this length, so that a sanitizer sees any read past it */
    kvs_err err = {0};
    kvs_status s;

    cr_assert(copy != NULL && !b->out.full);
    memcpy(copy, b->bytes, b->out.len);
    f.body = copy;
    for (uint32_t i = 0; i < n_fds; i++)
        f.fds[i] = fds[i];
    s = peer_request(c->peer, &f, c->f->now_us, &err);
    memset(copy, 0xee, b->out.len); /* the body is borrowed for the call only */
    free(copy);
    free(b);
    return s;
}

uint64_t fx_send_deadline(fx_client *c, uint16_t op, uint64_t deadline_us, fx_body *b)
{
    uint64_t id = c->next_id++;

    cr_assert_eq(fx_send_frame(c, op, id, deadline_us, b, NULL, 0), KVS_OK);
    return id;
}

uint64_t fx_send(fx_client *c, uint16_t op, fx_body *b)
{
    return fx_send_deadline(c, op, 0, b);
}

static bool is_reply(const reply *r, uint64_t id, wire_header *h)
{
    kvs_err err;

    cr_assert_eq(wire_header_decode(r->bytes, UINT32_MAX, h, &err), KVS_OK);
    cr_assert_eq(r->len, WIRE_HEADER_BYTES + h->body_len);
    return h->id == id;
}

bool fx_has_reply(const fx_client *c, uint64_t id)
{
    wire_header h;

    for (const reply *r = c->first; r; r = r->next)
        if (is_reply(r, id, &h))
            return true;
    return false;
}

static reply *take_reply(fx_client *c, uint64_t id, wire_header *h)
{
    for (reply **at = &c->first; *at; at = &(*at)->next)
        if (is_reply(*at, id, h)) {
            reply *r = *at;

            *at = r->next;
            if (c->last == &r->next)
                c->last = at;
            return r;
        }
    return NULL;
}

fx_answer fx_wait(fx_client *c, uint64_t id)
{
    fx_answer a = {0};
    uint32_t msg_len;

    while (!(a.reply = take_reply(c, id, &a.head)))
        go_on(c->f);
    a.status = a.head.status;
    a.in = (wire_in){.base = a.reply->bytes + WIRE_HEADER_BYTES, .len = a.head.body_len};
    if (a.head.op == WIRE_EVENT)
        return a;
    msg_len = wire_get_u32(&a.in);
    cr_assert_eq(wire_get_u32(&a.in), 0);
    cr_assert_lt(msg_len, KVS_ERR_MSG_BYTES);
    wire_get_bytes(&a.in, a.msg, msg_len);
    wire_get_pad8(&a.in);
    cr_assert(!a.in.bad);
    return a;
}

fx_answer fx_call(fx_client *c, uint16_t op, fx_body *b)
{
    return fx_wait(c, fx_send(c, op, b));
}

void fx_done(fx_answer *a)
{
    reply_destroy(a->reply);
    a->reply = NULL;
}

kvs_status fx_status(fx_client *c, uint16_t op, fx_body *b)
{
    fx_answer a = fx_call(c, op, b);

    fx_done(&a);
    return a.status;
}

/* ---- the usual ---- */

void fx_key(uint8_t key[32], uint64_t n)
{
    for (int i = 0; i < 32; i++)
        key[i] = (uint8_t)((n * UINT64_C(0x9e3779b97f4a7c15)) >> (i % 8 * 8)) ^ (uint8_t)i;
}

uint32_t fx_ns(fx_client *c, const char *model)
{
    kvs_plane planes[FX_LAYERS];
    kvs_namespace ns;
    wire_open_rep rep;
    fx_body *b = fx_new();
    fx_answer a;
    size_t len = 0;

    cr_assert_eq(kvs_namespace_mla(model, "", KVS_FORMAT_mla_bf16, FX_LAYERS, FX_TOKENS, planes, &ns, NULL), KVS_OK);
    cr_assert_eq(kvs_namespace_encode(&ns, b->bytes, sizeof(b->bytes), &len, NULL), KVS_OK);
    b->out.len = len;
    a = fx_call(c, WIRE_OPEN, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_open_rep(&a.in, &rep);
    cr_assert_eq(rep.slot_bytes, FX_SLOT);
    fx_done(&a);
    return rep.ns;
}

static fx_region create(fx_client *c, const wire_region_create_req *q)
{
    fx_body *b = fx_new();
    wire_region_rep rep;
    fx_region g = {0};
    fx_answer a;

    wire_put_region_create_req(&b->out, q);
    a = fx_call(c, WIRE_REGION_CREATE, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    cr_assert_eq(a.reply->n_fds, rep.n_pieces);
    g.id = rep.region;
    g.n_slots = rep.n_slots;
    g.bytes = rep.bytes;
    memcpy(g.token, rep.token, 16);
    g.fd = dup(a.reply->fds[0]);
    g.base = mmap(NULL, rep.bytes, PROT_READ | PROT_WRITE, MAP_SHARED, g.fd, 0);
    cr_assert(g.base != MAP_FAILED);
    fx_done(&a);
    return g;
}

fx_region fx_slots_on(fx_client *c, uint32_t on, uint32_t ns, uint32_t n_slots)
{
    return create(c, &(wire_region_create_req){.ns = ns, .kind = WIRE_REGION_SLOTS, .device = on, .n_slots = n_slots});
}

fx_region fx_scratch_on(fx_client *c, uint32_t on, uint64_t bytes)
{
    return create(
        c, &(wire_region_create_req){.ns = WIRE_NONE32, .kind = WIRE_REGION_SCRATCH, .device = on, .bytes = bytes});
}

fx_region fx_slots(fx_client *c, uint32_t ns, uint32_t n_slots)
{
    return fx_slots_on(c, 0, ns, n_slots);
}

fx_region fx_scratch(fx_client *c, uint64_t bytes)
{
    return fx_scratch_on(c, 0, bytes);
}

void fx_unmap(fx_region *g)
{
    munmap(g->base, g->bytes);
    close(g->fd);
}

void fx_take(fx_client *c, const fx_region *g, uint32_t n, wire_slot_ref *ret)
{
    fx_body *b = fx_new();
    wire_slot_take_rep rep;
    fx_answer a;

    wire_put_slot_take_req(&b->out, &(wire_slot_take_req){g->id, n});
    a = fx_call(c, WIRE_SLOT_TAKE, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_slot_take_rep(&a.in, &rep);
    cr_assert_eq(rep.n, n);
    for (uint32_t i = 0; i < n; i++)
        wire_get_slot_ref(&a.in, &ret[i]);
    cr_assert(wire_in_done(&a.in));
    fx_done(&a);
}

static uint64_t word_of(uint64_t key, uint64_t i)
{
    return (key * UINT64_C(0x9e3779b97f4a7c15) + i) * UINT64_C(0xbf58476d1ce4e5b9);
}

void fx_fill(const fx_region *g, uint32_t slot, uint64_t key)
{
    for (uint64_t i = 0; i < FX_SLOT / 8; i++) {
        uint64_t v = word_of(key, i);

        memcpy(g->base + (uint64_t)slot * FX_SLOT + i * 8, &v, 8);
    }
}

bool fx_holds(const fx_region *g, uint32_t slot, uint64_t key)
{
    for (uint64_t i = 0; i < FX_SLOT / 8; i++) {
        uint64_t v;

        memcpy(&v, g->base + (uint64_t)slot * FX_SLOT + i * 8, 8);
        if (v != word_of(key, i))
            return false;
    }
    return true;
}

static void put_keys(wire_out *o, uint64_t first, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint8_t key[32];

        fx_key(key, first + i);
        wire_put_bytes(o, key, 32);
    }
}

static void put_refs(wire_out *o, const fx_move *m)
{
    for (uint32_t i = 0; i < m->n; i++)
        wire_put_slot_ref(o, m->slots ? &m->slots[i] : &(wire_slot_ref){WIRE_NONE32, 0});
}

fx_body *fx_store_body(const fx_move *m)
{
    fx_body *b = fx_new();
    wire_store_req q = {.ns = m->ns,
                        .region = m->region,
                        .n = m->n,
                        .flags = m->flags,
                        .after_counter = m->after_counter - 1,
                        .signal_counter = m->signal_counter - 1,
                        .after_value = m->after_value,
                        .signal_value = m->signal_value,
                        .first_depth = m->first_depth};

    if (m->first_depth > 0)
        fx_key(q.parent, m->first - 1);
    wire_put_store_req(&b->out, &q);
    put_keys(&b->out, m->first, m->n);
    put_refs(&b->out, m);
    return b;
}

fx_body *fx_load_body(const fx_move *m)
{
    fx_body *b = fx_new();
    wire_load_req q = {.ns = m->ns,
                       .region = m->region,
                       .n = m->n,
                       .flags = m->flags,
                       .after_counter = m->after_counter - 1,
                       .signal_counter = m->signal_counter - 1,
                       .after_value = m->after_value,
                       .signal_value = m->signal_value};

    wire_put_load_req(&b->out, &q);
    put_keys(&b->out, m->first, m->n);
    put_refs(&b->out, m);
    return b;
}

kvs_status fx_store(fx_client *c, const fx_move *m, uint32_t *ret_status)
{
    fx_answer a = fx_call(c, WIRE_STORE, fx_store_body(m));
    wire_key_rep rep = {0};

    if (a.status == KVS_OK || a.status == KVS_E_PARTIAL) {
        wire_get_key_rep(&a.in, &rep);
        cr_assert_eq(rep.n, m->n);
        for (uint32_t i = 0; i < rep.n; i++) {
            uint32_t s = wire_get_u32(&a.in);

            if (ret_status)
                ret_status[i] = s;
        }
        wire_get_pad8(&a.in);
        cr_assert(wire_in_done(&a.in));
    }
    fx_done(&a);
    return a.status;
}

kvs_status fx_load(fx_client *c, const fx_move *m, wire_load_result *ret)
{
    fx_answer a = fx_call(c, WIRE_LOAD, fx_load_body(m));
    wire_load_rep rep = {0};

    if (a.status == KVS_OK || a.status == KVS_E_PARTIAL) {
        wire_get_load_rep(&a.in, &rep);
        cr_assert_eq(rep.n, m->n);
        for (uint32_t i = 0; i < rep.n; i++)
            wire_get_load_result(&a.in, &ret[i]);
        cr_assert(wire_in_done(&a.in));
    }
    fx_done(&a);
    return a.status;
}

fx_body *fx_keys_body(uint32_t ns, uint64_t first, uint32_t n)
{
    fx_body *b = fx_new();

    wire_put_keys_req(&b->out, &(wire_keys_req){ns, n});
    put_keys(&b->out, first, n);
    return b;
}

uint32_t fx_lookup(fx_client *c, uint32_t ns, uint64_t first, uint32_t n)
{
    fx_answer a = fx_call(c, WIRE_LOOKUP, fx_keys_body(ns, first, n));
    wire_lookup_rep rep;

    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_lookup_rep(&a.in, &rep);
    cr_assert_eq(rep.n_keys, n);
    fx_done(&a);
    return rep.n_hits;
}

/* ---- counters ---- */

static uint64_t *cell(const fx_client *c, bool daemon_half, uint32_t i, uint32_t word)
{
    return (uint64_t *)(void *)(c->counters + (daemon_half ? WIRE_COUNTER_HALF_BYTES : 0) + i * 16 + word * 8);
}

uint64_t fx_counter(const fx_client *c, uint32_t i)
{
    return __atomic_load_n(cell(c, true, i, 0), __ATOMIC_ACQUIRE);
}

uint64_t fx_counter_error(const fx_client *c, uint32_t i)
{
    return __atomic_load_n(cell(c, true, i, 1), __ATOMIC_ACQUIRE);
}

void fx_raise(fx_client *c, uint32_t i, uint64_t value)
{
    __atomic_store_n(cell(c, false, i, 0), value, __ATOMIC_RELEASE);
}

/* ---- STATUS ---- */

static const json_node *element(const json_node *array, unsigned long i)
{
    const json_node *n = json_first(array);

    while (n && i-- > 0)
        n = json_next(n);
    return n;
}

double fx_number(fx_client *admin, uint32_t section, const char *path)
{
    fx_body *b = fx_new();
    wire_status_rep rep;
    const json_node *n;
    const uint8_t *text;
    char word[64];
    json *doc = NULL;
    fx_answer a;
    double v = -1;

    wire_put_status_req(&b->out, &(wire_status_req){.section = section, .ns = WIRE_NONE32});
    a = fx_call(admin, WIRE_STATUS, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_status_rep(&a.in, &rep);
    text = wire_get_array(&a.in, rep.text_len, 1);
    cr_assert_eq(json_parse((const char *)text, rep.text_len, &doc, NULL), KVS_OK);
    n = json_root(doc);
    for (const char *at = path; n && *at;) {
        size_t len = strcspn(at, ".");

        memcpy(word, at, len);
        word[len] = 0;
        n = json_type_of(n) == JSON_ARRAY ? element(n, strtoul(word, NULL, 10)) : json_member(n, word);
        at += len + (at[len] == '.');
    }
    if (n && json_type_of(n) == JSON_NUMBER)
        v = json_number(n);
    else if (n && json_type_of(n) == JSON_BOOL)
        v = json_bool(n);
    else if (n && (json_type_of(n) == JSON_ARRAY))
        v = (double)json_size(n);
    json_destroy(doc);
    fx_done(&a);
    return v;
}
