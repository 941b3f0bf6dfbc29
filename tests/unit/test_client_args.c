/* libkvstride's arguments: what may not be NULL is refused by name, in every call of kvstride.h, and nothing is sent. */
#include <criterion/criterion.h>
#include <dirent.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/client/kvstride.h"
#include "tests/support/fake_daemon.h"

enum { CALLS = 128, NAME = 64 };

static kvs_err err;
static char seen[CALLS][NAME]; /* the calls that were tried */
static unsigned n_seen;

/* Everything that the calls want, right. */
typedef struct world {
    fake f;
    kvs_client *c;
    kvs_ns *ns;
    kvs_region *region, *scratch;
    kvs_load_result loaded;
    kvs_status status;
    kvs_call_result called;
    kvs_slot slot;
} world;

static const uint8_t KEY[KVS_KEY_BYTES] = {1};

static void ok(kvs_status s)
{
    cr_assert_eq(s, KVS_OK, "%s: %s", kvs_status_name(s), err.msg);
}

static void world_init(world *w)
{
    kvs_options o = KVS_OPTIONS_INIT;
    kvs_plane plane;
    kvs_namespace desc;

    fake_init(&w->f);
    fake_start(&w->f);
    o.path = w->f.path;
    ok(kvs_connect(&w->c, &o, &err));
    ok(kvs_namespace_mla("m", "r", KVS_FORMAT_mla_bf16, 1, 1, &plane, &desc, &err));
    ok(kvs_open(w->c, &desc, &w->ns, 0, &err));
    ok(kvs_region_create(w->ns, 0, 8, &w->region, 0, &err));
    ok(kvs_scratch_create(w->c, 0, 4096, &w->scratch, 0, &err));
    ok(kvs_slot_take(w->region, 1, &w->slot, 0, &err));
}

static void world_fini(world *w)
{
    kvs_close(w->c);
    fake_stop(&w->f);
    fake_fini(&w->f);
}

static unsigned sent(world *w)
{
    unsigned n = 0;

    for (unsigned i = 0; i < sizeof w->f.ops / sizeof w->f.ops[0]; i++)
        n += atomic_load(&w->f.ops[i]);
    return n;
}

static unsigned open_fds(void)
{
    DIR *d = opendir("/proc/self/fd");
    unsigned n = 0;

    while (readdir(d) != NULL)
        n++;
    (void)closedir(d);
    return n;
}

static bool was_tried(const char *name, size_t len)
{
    for (unsigned i = 0; i < n_seen; i++)
        if (strlen(seen[i]) == len && strncmp(seen[i], name, len) == 0)
            return true;
    return false;
}

/* "kvs_submit_load(&a, ...)": into the list; what its messages begin with ("load") into what. */
static void note(const char *call, char what[NAME])
{
    size_t len = strcspn(call, "("), skip = strncmp(call, "kvs_submit_", 11) == 0 ? 11 : 4;

    cr_assert(len < NAME && n_seen < CALLS);
    if (!was_tried(call, len))
        (void)snprintf(seen[n_seen++], NAME, "%.*s", (int)len, call);
    len -= len > 6 && strncmp(call + len - 6, "_alloc", 6) == 0 ? 6 : 0;
    (void)snprintf(what, NAME, "%.*s", (int)(len - skip), call + skip);
}

static void refused(kvs_status s, const char *call, const char *field)
{
    char what[NAME], want[2 * NAME];

    note(call, what);
    (void)snprintf(want, sizeof want, "%s: %s is NULL", what, field);
    cr_assert_eq(s, KVS_E_INVALID, "%s, %s: %s", call, field, kvs_status_name(s));
    cr_assert_str_eq(err.msg, want, "%s", call);
}

#define REFUSED(field, call) refused((call), #call, (field))
#define TRIED(call)          note(#call, (char[NAME]){0})

/* ---- structs of arguments: one field after the other ---- */

typedef struct field {
    const char *name;
    size_t at;
} field;

typedef struct struct_call {
    const char *call;
    kvs_status (*run)(void *a);
    kvs_status (*submit)(void *a, kvs_request **ret);
    field fields[8];
} struct_call;

#define RUN(name)                                                                                                      \
    static kvs_status run_##name(void *a)                                                                              \
    {                                                                                                                  \
        return kvs_##name(a, 0, &err);                                                                                 \
    }                                                                                                                  \
    static kvs_status submit_##name(void *a, kvs_request **ret)                                                        \
    {                                                                                                                  \
        return kvs_submit_##name(a, ret, 0, &err);                                                                     \
    }
RUN(load)
RUN(store)
RUN(write)
RUN(decode)
RUN(extend)

static kvs_status run_reserve(void *a)
{
    kvs_lease lease;

    return kvs_reserve(a, &lease, 0, &err);
}

static kvs_status submit_reserve(void *a, kvs_request **ret)
{
    kvs_lease lease;

    return kvs_submit_reserve(a, &lease, ret, 0, &err);
}

#define AT(type, name)                                                                                                 \
    {                                                                                                                  \
#name, offsetof(type, name)                                                                                    \
    }
#define CALL(name) "kvs_" #name, run_##name, submit_##name
static const struct_call LOAD = {
    CALL(load),
    {AT(kvs_load_args, ns), AT(kvs_load_args, region), AT(kvs_load_args, keys), AT(kvs_load_args, results)}};
static const struct_call STORE = {
    CALL(store),
    {AT(kvs_store_args, ns), AT(kvs_store_args, region), AT(kvs_store_args, keys), AT(kvs_store_args, slots)}};
static const struct_call WRITE = {CALL(write),
                                  {AT(kvs_write_args, ns), AT(kvs_write_args, region), AT(kvs_write_args, calls),
                                   AT(kvs_write_args, results), AT(kvs_write_args, slot_mapping)}};
static const struct_call DECODE = {CALL(decode),
                                   {AT(kvs_decode_args, ns), AT(kvs_decode_args, region), AT(kvs_decode_args, calls),
                                    AT(kvs_decode_args, results), AT(kvs_decode_args, seq_len),
                                    AT(kvs_decode_args, block_table)}};
static const struct_call EXTEND = {CALL(extend),
                                   {AT(kvs_extend_args, ns), AT(kvs_extend_args, region), AT(kvs_extend_args, calls),
                                    AT(kvs_extend_args, results), AT(kvs_extend_args, q_start),
                                    AT(kvs_extend_args, seq_len), AT(kvs_extend_args, block_table)}};
static const struct_call RESERVE = {CALL(reserve), {AT(kvs_reserve_args, ns), AT(kvs_reserve_args, keys)}};

static void both(const struct_call *c, void *a, const char *name)
{
    char submit[NAME];
    kvs_request *r = NULL;

    (void)snprintf(submit, sizeof submit, "kvs_submit_%s", c->call + 4);
    refused(c->run(a), c->call, name);
    refused(c->submit(a, &r), submit, name);
    cr_assert_null(r);
}

/* args: in order.  None, each field in turn, no place for the handle. */
static void each_field(const struct_call *c, void *args)
{
    both(c, NULL, "a");
    for (const field *f = c->fields; f->name != NULL; f++) {
        void **at = (void **)(void *)((char *)args + f->at), *kept = *at;

        *at = NULL;
        both(c, args, f->name);
        *at = kept;
    }
    refused(c->submit(args, NULL), c->call, "ret");
}

static void try_structs(world *w)
{
    int64_t place = 0;
    int32_t start[2] = {0, 1}, one = 1, block = 0;
    kvs_ns *none = NULL;
    kvs_write_call row = {.scratch = w->scratch};
    kvs_decode_call call = {.scratch = w->scratch};
    kvs_load_args load = {.ns = w->ns, .region = w->region, .n = 1, .keys = KEY, .results = &w->loaded};
    kvs_store_args store = {
        .ns = w->ns, .region = w->region, .n = 1, .keys = KEY, .slots = &w->slot, .results = &w->status};
    kvs_write_args write = {w->ns, w->region, 1, 1, &place, &row, NULL, NULL, &w->called};
    kvs_decode_args decode = {w->ns, w->region, 1, 1, 1, 1, 1, 0, &one, &block, &call, &w->called};
    kvs_extend_args extend = {w->ns, w->region, 1, 1, 1, 1, 1, 0, start, &one, &block, &call, &w->called};
    kvs_reserve_args reserve = {&w->ns, 1, 1, KEY, 1, 0};

    each_field(&LOAD, &load);
    each_field(&STORE, &store);
    each_field(&WRITE, &write);
    each_field(&DECODE, &decode);
    each_field(&EXTEND, &extend);
    each_field(&RESERVE, &reserve);
    call.scratch = row.scratch = NULL;
    both(&WRITE, &write, "calls[0].scratch");
    both(&DECODE, &decode, "calls[0].scratch");
    both(&EXTEND, &extend, "calls[0].scratch");
    reserve.ns = &none;
    both(&RESERVE, &reserve, "ns[0]");

    /* What has been refused is in the results that there are. */
    load.keys = NULL;
    w->loaded.status = KVS_OK;
    (void)kvs_load(&load, 0, NULL);
    cr_assert_eq(w->loaded.status, KVS_E_INVALID);
}

static void try_import(world *w)
{
    kvs_region *r = NULL;
    kvs_plane_map map = {.stride = 4096};
    int fd = 0;
    kvs_import in = {.n_slots = 1, .n_fds = 1, .fds = &fd, .n_maps = 1, .maps = &map};

    REFUSED("ns", kvs_region_import(NULL, &in, &r, 0, &err));
    REFUSED("in", kvs_region_import(w->ns, NULL, &r, 0, &err));
    REFUSED("ret", kvs_region_import(w->ns, &in, NULL, 0, &err));
    in.maps = NULL;
    REFUSED("maps", kvs_region_import(w->ns, &in, &r, 0, &err));
    in.maps = &map;
    in.fds = NULL;
    REFUSED("fds", kvs_region_import(w->ns, &in, &r, 0, &err));
    in.n_fds = 0;
    in.n_ipc = 1;
    in.memory = KVS_MEMORY_CUDA_IPC;
    REFUSED("ipc", kvs_region_import(w->ns, &in, &r, 0, &err));
}

/* ---- plain arguments ---- */

static void try_handle(world *w)
{
    kvs_options o = KVS_OPTIONS_INIT;
    uint8_t uuid[16] = {0};
    uint32_t n;
    kvs_health_info health;
    kvs_plane plane;
    kvs_namespace desc;
    kvs_ns *ns;

    ok(kvs_namespace_mla("m", "r", KVS_FORMAT_mla_bf16, 1, 1, &plane, &desc, &err));
    o.path = w->f.path;
    REFUSED("ret", kvs_connect(NULL, &o, &err));
    REFUSED("c", kvs_device_find(NULL, uuid, &n, &err));
    REFUSED("uuid", kvs_device_find(w->c, NULL, &n, &err));
    REFUSED("ret", kvs_device_find(w->c, uuid, NULL, &err));
    REFUSED("c", kvs_wait_up(NULL, 0, 0, &err));
    REFUSED("c", kvs_ping(NULL, 0, &err));
    REFUSED("c", kvs_health(NULL, &health, 0, &err));
    REFUSED("ret", kvs_health(w->c, NULL, 0, &err));
    REFUSED("c", kvs_drain(NULL, true, 0, &err));
    REFUSED("c", kvs_open(NULL, &desc, &ns, 0, &err));
    REFUSED("ns", kvs_open(w->c, NULL, &ns, 0, &err));
    REFUSED("ret", kvs_open(w->c, &desc, NULL, 0, &err));
    REFUSED("c", kvs_open_id(NULL, 1, &ns, &err));
    REFUSED("ret", kvs_open_id(w->c, 1, NULL, &err));
    REFUSED("c", kvs_settle(NULL, 0, &err));
}

static void try_regions(world *w)
{
    uint8_t token[16] = {1};
    uint64_t bytes;
    kvs_region *r;
    kvs_ipc ipc;
    void *base;
    int fd;

    REFUSED("ns", kvs_region_create(NULL, 0, 1, &r, 0, &err));
    REFUSED("ret", kvs_region_create(w->ns, 0, 1, NULL, 0, &err));
    REFUSED("c", kvs_scratch_create(NULL, 0, 1, &r, 0, &err));
    REFUSED("ret", kvs_scratch_create(w->c, 0, 1, NULL, 0, &err));
    REFUSED("c", kvs_region_attach(NULL, w->ns, token, &r, 0, &err));
    REFUSED("token", kvs_region_attach(w->c, w->ns, NULL, &r, 0, &err));
    REFUSED("ret", kvs_region_attach(w->c, w->ns, token, NULL, 0, &err));
    REFUSED("p", kvs_ipc_of(NULL, &ipc, &bytes, &bytes, &err));
    REFUSED("ret", kvs_ipc_of(w, NULL, &bytes, &bytes, &err));
    REFUSED("ret_offset", kvs_ipc_of(w, &ipc, NULL, &bytes, &err));
    REFUSED("ret_bytes", kvs_ipc_of(w, &ipc, &bytes, NULL, &err));
    REFUSED("r", kvs_region_close(NULL, 0, &err));
    REFUSED("r", kvs_region_map(NULL, &base, &bytes, &err));
    REFUSED("ret", kvs_region_map(w->region, NULL, &bytes, &err));
    REFUSED("name", kvs_memfd_create(NULL, 4096, &fd, &err));
    REFUSED("ret_fd", kvs_memfd_create("m", 4096, NULL, &err));
}

static void try_counters_and_streams(world *w)
{
    kvs_stream *s, *any = (kvs_stream *)(void *)w; /* the other argument is looked at first */
    kvs_counters page;
    kvs_mark mark = {0, 0, 1};

    REFUSED("c", kvs_counter_page(NULL, &page, &err));
    REFUSED("ret", kvs_counter_page(w->c, NULL, &err));
    REFUSED("c", kvs_counter_set(NULL, 0, 1, &err));
    REFUSED("c", kvs_counter_wait(NULL, 0, mark, 0, &err));
    REFUSED("c", kvs_stream_open(NULL, NULL, 0, 1, &s, &err));
    REFUSED("ret", kvs_stream_open(w->c, NULL, 0, 1, NULL, &err));
    REFUSED("s", kvs_stream_signal(NULL, &mark, &err));
    REFUSED("ret", kvs_stream_signal(any, NULL, &err));
    REFUSED("s", kvs_stream_wait(NULL, 0, mark, &err));
}

static void try_keys_and_slots(world *w)
{
    kvs_request *r;
    kvs_lease lease = {.n_leased = 1};
    kvs_reserve_args reserve = {&w->ns, 1, 1, KEY, 1, 0};
    uint8_t state = 7;
    uint32_t hits = 7;

    REFUSED("ns", kvs_lookup(NULL, KEY, 1, &hits, &state, 0, &err));
    cr_assert(hits == 0 && state == KVS_KEY_ABSENT, "unknown is a miss");
    REFUSED("keys", kvs_lookup(w->ns, NULL, 1, &hits, &state, 0, &err));
    REFUSED("ret_hits", kvs_lookup(w->ns, KEY, 1, NULL, &state, 0, &err));
    REFUSED("ns", kvs_submit_lookup(NULL, KEY, 1, &hits, NULL, &r, 0, &err));
    REFUSED("keys", kvs_submit_lookup(w->ns, NULL, 1, &hits, NULL, &r, 0, &err));
    REFUSED("ret_hits", kvs_submit_lookup(w->ns, KEY, 1, NULL, NULL, &r, 0, &err));
    REFUSED("ret", kvs_submit_lookup(w->ns, KEY, 1, &hits, NULL, NULL, 0, &err));
    REFUSED("ret_lease", kvs_reserve(&reserve, NULL, 0, &err));
    REFUSED("ret_lease", kvs_submit_reserve(&reserve, NULL, &r, 0, &err));
    REFUSED("c", kvs_release(NULL, &lease, 0, &err));
    REFUSED("lease", kvs_release(w->c, NULL, 0, &err));
    REFUSED("r", kvs_slot_take(NULL, 1, &w->slot, 0, &err));
    REFUSED("ret", kvs_slot_take(w->region, 1, NULL, 0, &err));
    REFUSED("r", kvs_slot_drop(NULL, &w->slot, 1, NULL, NULL, 0, &err));
    REFUSED("slots", kvs_slot_drop(w->region, NULL, 1, NULL, NULL, 0, &err));
    REFUSED("r", kvs_submit_slot_drop(NULL, &w->slot, 1, NULL, NULL, &r, 0, &err));
    REFUSED("slots", kvs_submit_slot_drop(w->region, NULL, 1, NULL, NULL, &r, 0, &err));
    REFUSED("ret", kvs_submit_slot_drop(w->region, &w->slot, 1, NULL, NULL, NULL, 0, &err));
    REFUSED("ns", kvs_pin(NULL, KEY, 1, NULL, 0, &err));
    REFUSED("keys", kvs_pin(w->ns, NULL, 1, NULL, 0, &err));
    REFUSED("ns", kvs_unpin(NULL, KEY, 1, NULL, 0, &err));
    REFUSED("keys", kvs_unpin(w->ns, NULL, 1, NULL, 0, &err));
    REFUSED("ns", kvs_drop(NULL, KEY, 1, NULL, 0, &err));
    REFUSED("keys", kvs_drop(w->ns, NULL, 1, NULL, 0, &err));
    REFUSED("c", kvs_reset(NULL, w->ns, 0, NULL, 0, &err));
}

static void try_reports_and_requests(world *w)
{
    kvs_report_args summary = KVS_REPORT_SUMMARY;
    kvs_event event;
    char text[8], *own;
    uint64_t lost;
    uint32_t n;
    size_t len;
    kvs_request *r;

    REFUSED("c", kvs_report(NULL, &summary, text, sizeof text, &len, 0, &err));
    REFUSED("a", kvs_report(w->c, NULL, text, sizeof text, &len, 0, &err));
    REFUSED("buf", kvs_report(w->c, &summary, NULL, sizeof text, &len, 0, &err));
    REFUSED("c", kvs_report_alloc(NULL, &summary, &own, &len, 0, &err));
    REFUSED("a", kvs_report_alloc(w->c, NULL, &own, &len, 0, &err));
    REFUSED("ret", kvs_report_alloc(w->c, &summary, NULL, &len, 0, &err));
    REFUSED("c", kvs_reload_alloc(NULL, true, &own, &len, 0, &err));
    REFUSED("ret", kvs_reload_alloc(w->c, true, NULL, &len, 0, &err));
    REFUSED("c", kvs_watch(NULL, 1, 0, &err));
    REFUSED("c", kvs_events(NULL, &event, 1, &n, &lost, 0, &err));
    REFUSED("ret", kvs_events(w->c, NULL, 1, &n, &lost, 0, &err));
    REFUSED("ret_n", kvs_events(w->c, &event, 1, NULL, &lost, 0, &err));
    REFUSED("c", kvs_submit_ping(NULL, &r, 0, &err));
    REFUSED("ret", kvs_submit_ping(w->c, NULL, 0, &err));
    REFUSED("r", kvs_wait(NULL, 0, &err));
    REFUSED("r", kvs_cancel(NULL, &n, 0, &err));
}

/* Calls that have no status to say it with. */
static void try_silent(world *w)
{
    kvs_server server = {.generation = 7};
    kvs_ns_info ns = {.id = 7};
    kvs_region_info region = {.id = 7};
    kvs_request *r;

    TRIED(kvs_server_get);
    kvs_server_get(NULL, &server);
    kvs_server_get(w->c, NULL);
    cr_assert_eq(server.generation, 0);
    TRIED(kvs_generation);
    cr_assert_eq(kvs_generation(NULL), 0);
    TRIED(kvs_ns_get);
    kvs_ns_get(NULL, &ns);
    kvs_ns_get(w->ns, NULL);
    cr_assert_eq(ns.id, 0);
    TRIED(kvs_region_get);
    kvs_region_get(NULL, &region);
    kvs_region_get(w->region, NULL);
    cr_assert(region.id == 0 && region.state == KVS_E_INVALID);
    TRIED(kvs_region_fd);
    cr_assert_eq(kvs_region_fd(NULL, 0), -1);
    TRIED(kvs_request_set_tag);
    kvs_request_set_tag(NULL, 1);
    TRIED(kvs_request_tag);
    cr_assert_eq(kvs_request_tag(NULL), 0);
    TRIED(kvs_done);
    cr_assert(kvs_done(NULL));
    TRIED(kvs_poll);
    cr_assert_eq(kvs_poll(NULL, &r, 1, 0), 0);
    cr_assert_eq(kvs_poll(w->c, NULL, 1, 0), 0);
    TRIED(kvs_request_end);
    cr_assert_eq(kvs_request_end(NULL, NULL), KVS_OK);
    TRIED(kvs_stream_close);
    kvs_stream_close(NULL);
    TRIED(kvs_close);
    kvs_close(NULL);
    TRIED(kvs_free);
    kvs_free(NULL);
}

/* Whoever adds a call adds it here as well. */
static void check_all_were_tried(void)
{
    FILE *f = fopen("proto/client/kvstride.h", "r");
    char line[512];
    unsigned n = 0;

    cr_assert_not_null(f, "tests run from the top of the tree");
    while (fgets(line, sizeof line, f) != NULL) {
        const char *end = strchr(line, '('), *name = end;

        if (strncmp(line, "KVS_API ", 8) != 0)
            continue;
        cr_assert_not_null(end, "%s", line);
        while (name[-1] != ' ' && name[-1] != '*')
            name--;
        cr_assert(was_tried(name, (size_t)(end - name)), "%.*s: not tried with NULL", (int)(end - name), name);
        n++;
    }
    (void)fclose(f);
    cr_assert_gt(n, 60, "%u calls in kvstride.h", n);
}

static void try_all(world *w)
{
    try_structs(w);
    try_import(w);
    try_handle(w);
    try_regions(w);
    try_counters_and_streams(w);
    try_keys_and_slots(w);
    try_reports_and_requests(w);
    try_silent(w);
}

Test(client_args, a_null_is_refused_by_its_name_in_every_call)
{
    unsigned fds, before;
    size_t used;
    world w = {0};

    world_init(&w);
    fds = open_fds();
    before = sent(&w);
    try_all(&w); /* what the C library keeps is kept now */
    used = mallinfo2().uordblks;
    for (int i = 0; i < 16; i++)
        try_all(&w);
    cr_assert_lt(mallinfo2().uordblks, used + 1024, "something of each is kept");
    ok(kvs_ping(w.c, 0, &err)); /* in order behind whatever was sent before */
    cr_assert_eq(sent(&w), before + 1);
    cr_assert_eq(open_fds(), fds);
    check_all_were_tried();
    world_fini(&w);
}

/* As the daemon has it: tests/unit/test_op_cache.c. */
Test(client_args, a_parent_that_does_not_fit_its_depth_is_refused)
{
    static const uint8_t ZEROS[KVS_KEY_BYTES];
    unsigned before;
    world w = {0};

    world_init(&w);
    before = sent(&w);
    kvs_store_args a = {.ns = w.ns, .region = w.region, .n = 1, .keys = KEY, .slots = &w.slot, .parent = KEY};

    cr_assert_eq(kvs_store(&a, 0, &err), KVS_E_INVALID);
    cr_assert_str_eq(err.msg, "parent: is not zeros, but first_depth is 0");
    a.first_depth = 2;
    a.parent = NULL;
    cr_assert_eq(kvs_store(&a, 0, &err), KVS_E_INVALID);
    cr_assert_str_eq(err.msg, "parent: none, but first_depth is 2; zeros if you do not know it");
    cr_assert_eq(sent(&w), before);
    a.parent = ZEROS;
    ok(kvs_store(&a, 0, &err));
    a.first_depth = 0;
    ok(kvs_store(&a, 0, &err));
    world_fini(&w);
}

Test(client_args, what_the_header_lets_be_null_may_be)
{
    kvs_report_args summary = KVS_REPORT_SUMMARY;
    uint32_t hits = 7;
    size_t len;
    char text[64], *own;
    void *base;
    kvs_request *r;
    world w = {0};

    world_init(&w);
    kvs_store_args store = {.ns = w.ns, .region = w.region, .n = 1, .keys = KEY, .slots = &w.slot};

    ok(kvs_store(&store, 0, NULL));
    ok(kvs_lookup(w.ns, NULL, 0, &hits, NULL, 0, NULL));
    cr_assert_eq(hits, 0);
    ok(kvs_region_map(w.region, &base, NULL, NULL));
    ok(kvs_reset(w.c, NULL, 0, NULL, 0, NULL));
    ok(kvs_pin(w.ns, KEY, 1, NULL, 0, NULL));
    ok(kvs_report(w.c, &summary, text, sizeof text, NULL, 0, NULL));
    cr_assert_eq(kvs_report(w.c, &summary, NULL, 0, &len, 0, NULL), KVS_E_LIMIT);
    cr_assert_eq(len, strlen(text));
    ok(kvs_report_alloc(w.c, &summary, &own, NULL, 0, NULL));
    kvs_free(own);
    ok(kvs_submit_ping(w.c, &r, 0, NULL));
    ok(kvs_cancel(r, NULL, 0, NULL));
    ok(kvs_request_end(r, NULL));
    ok(kvs_slot_drop(w.region, &w.slot, 1, NULL, NULL, 0, NULL));
    world_fini(&w);
}
