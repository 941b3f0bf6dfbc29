#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "daemon/core.h"
#include "proto/backend.h"
#include "tests/support/lingering.h"

/* Device memory in and out: REGION_*, SLOT_*, through frames. */

typedef struct world {
    fx f;
    fx_client c, admin;
    uint32_t ns;
} world;

static void start(world *w)
{
    fx_config(&w->f);
    fx_open(&w->f);
    fx_client_open(&w->c, &w->f);
    fx_admin_open(&w->admin, &w->f);
    w->ns = fx_ns(&w->c, "m");
}

static void stop(world *w)
{
    fx_gone(&w->c);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_SUMMARY, "regions"), 0);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_gone(&w->admin);
    fx_close(&w->f);
}

static int memory(uint64_t bytes, bool sealed)
{
    int fd = memfd_create("engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    cr_assert_eq(posix_fallocate(fd, 0, (off_t)bytes), 0);
    if (sealed)
        cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    return fd;
}

static fx_answer import(world *w, uint32_t n_slots, const wire_plane_map *maps, uint32_t n_maps, int fd)
{
    fx_body *b = fx_new();
    uint64_t id = w->c.next_id++;
    int copy = dup(fd);

    wire_put_region_import_req(&b->out, &(wire_region_import_req){.ns = w->ns, .n_slots = n_slots, .n_maps = n_maps});
    for (uint32_t i = 0; i < n_maps; i++)
        wire_put_plane_map(&b->out, &maps[i]);
    cr_assert_eq(fx_send_frame(&w->c, WIRE_REGION_IMPORT, id, 0, b, &copy, 1), KVS_OK);
    return fx_wait(&w->c, id);
}

static int engine_memory(void)
{
    return memory(1 << 20, true);
}

static kvs_status import_status(world *w, uint32_t n_slots, wire_plane_map map, int fd)
{
    fx_answer a = import(w, n_slots, &map, 1, fd);

    fx_done(&a);
    return a.status;
}

/* The clients section of STATUS says `text`. */
static bool status_says(world *w, const char *text)
{
    fx_body *b = fx_new();
    wire_status_rep rep;
    const uint8_t *at;
    fx_answer a;
    bool found;

    wire_put_status_req(&b->out, &(wire_status_req){.section = WIRE_SECTION_CLIENTS, .ns = WIRE_NONE32});
    a = fx_call(&w->admin, WIRE_STATUS, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_status_rep(&a.in, &rep);
    at = wire_get_array(&a.in, rep.text_len, 1);
    found = memmem(at, rep.text_len, text, strlen(text)) != NULL;
    fx_done(&a);
    return found;
}

/* Whole blocks: for a backend that was verified with them, or on the client's own word, and STATUS says which. */
Test(op_region, whole_blocks_are_for_backends_that_were_verified_with_them)
{
    enum { SLOTS = 4 };
    const wire_plane_map verified = {0, KVS_BACKEND_FLASHINFER_MLA, 0, FX_SLOT},
                         other = {0, KVS_BACKEND_OTHER, 0, FX_SLOT},
                         forced = {0, KVS_BACKEND_OTHER | KVS_BACKEND_OVERRIDE, 0, FX_SLOT};
    fx_answer a;
    world w;
    int fd;

    start(&w);
    fd = memory(SLOTS * FX_SLOT, true);
    a = import(&w, SLOTS, &other, 1, fd);
    cr_assert_eq(a.status, KVS_E_UNSUPPORTED);
    cr_assert(strstr(a.msg, "map 0: backend OTHER: plane latent of layer 0: stride ") != NULL, "%s", a.msg);
    fx_done(&a);
    cr_assert_eq(import_status(&w, SLOTS, verified, fd), KVS_OK);
    cr_assert(status_says(&w, "FLASHINFER_MLA"));
    cr_assert(!status_says(&w, "OTHER"));
    cr_assert(!status_says(&w, "\"backend_override\":true"));
    cr_assert_eq(import_status(&w, SLOTS, forced, fd), KVS_OK);
    cr_assert(status_says(&w, "OTHER"));
    cr_assert(status_says(&w, "\"backend_override\":true"));
    (void)close(fd);
    stop(&w);
}

/* Symptom: the stride was assumed to be the block, and what lay between the blocks was overwritten. */
Test(op_region, an_engine_region_with_a_tensor_a_layer_keeps_what_lies_between)
{
    world w;
    enum { GAP = 4096, STRIDE = FX_PAGE + GAP, SLOTS = 3, BYTES = 2 * SLOTS * STRIDE };
    /* Layers in descending order of address. */
    wire_plane_map maps[2] = {{0, 0, SLOTS * STRIDE, STRIDE}, {0, 0, 0, STRIDE}};
    wire_slot_ref slots[2] = {{2, 0}, {0, 0}};
    wire_load_result r[2];
    wire_region_rep rep;
    uint8_t *at;
    fx_answer a;
    fx_move m;
    int fd;

    start(&w);
    fd = memory(BYTES, true);
    at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    memset(at, 0xa5, BYTES);
    a = import(&w, SLOTS, maps, 2, fd);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    cr_assert_eq(rep.n_pieces, 0);
    cr_assert_eq(rep.slot_stride, 0);
    fx_done(&a);
    for (int p = 0; p < 2; p++) {
        memset(at + maps[p].base + 2 * STRIDE, 0x10 + p, FX_PAGE);
        memset(at + maps[p].base, 0x20 + p, FX_PAGE);
    }
    m = (fx_move){.ns = w.ns, .region = rep.region, .n = 2, .first = 1, .slots = slots};
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK);
    memset(at, 0xa5, BYTES);
    cr_assert_eq(fx_load(&w.c, &m, r), KVS_OK);
    for (uint64_t i = 0; i < BYTES; i++) {
        uint64_t plane = i < SLOTS * STRIDE ? 1 : 0, slot = i % (SLOTS * STRIDE) / STRIDE, in = i % STRIDE;
        uint8_t right = in >= FX_PAGE || slot == 1 ? 0xa5 : (uint8_t)((slot == 2 ? 0x10 : 0x20) + plane);

        cr_assert_eq(at[i], right, "byte %d", (int)i);
    }
    m.slots = NULL;
    cr_assert_eq(fx_load(&w.c, &m, r), KVS_E_INVALID, "the engine chooses in its own region");
    m.slots = slots;
    m.flags = WIRE_STORE_KEEP;
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_E_INVALID);
    munmap(at, BYTES);
    close(fd);
    stop(&w);
}

Test(op_region, memory_that_could_shrink_or_is_too_short_is_refused)
{
    world w;
    int loose, tight, hollow;

    start(&w);
    loose = memory(4 * FX_SLOT, false);
    tight = memory(4 * FX_SLOT, true);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, tight), KVS_OK);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, loose), KVS_E_INVALID);
    cr_assert_eq(import_status(&w, 5, (wire_plane_map){0, 0, 0, FX_SLOT}, tight), KVS_E_RANGE);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 16, FX_SLOT}, tight), KVS_E_RANGE);
    cr_assert_eq(import_status(&w, 1 << 20, (wire_plane_map){0, 0, 0, (UINT64_C(1) << 40) - 16}, tight), KVS_E_RANGE);
    hollow = memfd_create("sparse", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    cr_assert_eq(ftruncate(hollow, 4 * FX_SLOT), 0);
    cr_assert_eq(fcntl(hollow, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, hollow), KVS_E_INVALID);
    close(hollow);
    close(loose);
    close(tight);
    stop(&w);
}

Test(op_region, imports_of_one_client_are_bounded_and_given_back)
{
    world w;
    int fd;

    start(&w);
    fd = memory(CONFIG_MIB(5), true);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, fd), KVS_OK);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, fd), KVS_E_LIMIT);
    fx_gone(&w.c);
    fx_client_open(&w.c, &w.f);
    w.ns = fx_ns(&w.c, "m");
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, fd), KVS_OK);
    close(fd);
    stop(&w);
}

Test(op_region, daemon_regions_are_bounded_over_all_clients)
{
    world w;
    fx_client d;
    fx_region g;
    fx_body *b;

    start(&w);
    fx_client_open(&d, &w.f);
    g = fx_scratch(&w.c, CONFIG_MIB(5));
    for (int i = 0; i < 2; i++) {
        b = fx_new();
        wire_put_region_create_req(&b->out, &(wire_region_create_req){.ns = WIRE_NONE32,
                                                                      .kind = WIRE_REGION_SCRATCH,
                                                                      .bytes = i ? UINT64_MAX : CONFIG_MIB(5)});
        cr_assert_eq(fx_status(&d, WIRE_REGION_CREATE, b), KVS_E_LIMIT);
    }
    b = fx_new();
    wire_put_region_close_req(&b->out, &(wire_region_close_req){g.id, 0});
    cr_assert_eq(fx_status(&w.c, WIRE_REGION_CLOSE, b), KVS_OK);
    fx_unmap(&g);
    g = fx_scratch(&d, CONFIG_MIB(5));
    fx_unmap(&g);
    fx_gone(&d);
    stop(&w);
}

/* Symptom: STATUS counted what was asked for, and the machine had less left than the limit said. */
Test(op_region, a_region_counts_as_the_whole_pages_that_it_has)
{
    world w;
    fx_region g;
    fx_body *b;

    fx_config(&w.f);
    w.f.cfg.device_max_region_bytes = 20000;
    fx_open(&w.f);
    fx_client_open(&w.c, &w.f);
    fx_admin_open(&w.admin, &w.f);
    w.ns = fx_ns(&w.c, "m");
    g = fx_scratch(&w.c, 10000);
    cr_assert_eq(g.bytes, 12288);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "region_bytes"), 12288);
    b = fx_new();
    wire_put_region_create_req(
        &b->out, &(wire_region_create_req){.ns = WIRE_NONE32, .kind = WIRE_REGION_SCRATCH, .bytes = 5000});
    cr_assert_eq(fx_status(&w.c, WIRE_REGION_CREATE, b), KVS_E_LIMIT, "two pages are too many");
    while (!core_is_idle(w.f.core))
        fx_run(&w.f, 1);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "region_bytes"), 12288);
    fx_unmap(&g);
    stop(&w);
}

static fx_answer attach(fx_client *c, const wire_region_attach_req *q, const wire_region_entry *e, const int *fds,
                        uint32_t n_fds)
{
    fx_body *b = fx_new();
    uint64_t id = c->next_id++;

    wire_put_region_attach_req(&b->out, q);
    for (uint32_t i = 0; i < q->n_entries; i++)
        wire_put_region_entry(&b->out, &e[i]);
    cr_assert_eq(fx_send_frame(c, WIRE_REGION_ATTACH, id, 0, b, fds, n_fds), KVS_OK);
    return fx_wait(c, id);
}

Test(op_region, two_connections_share_a_region_and_the_last_one_closes_it)
{
    world w;
    fx_client d;
    fx_region g;
    wire_slot_ref slot;
    wire_load_result r;
    wire_region_attach_req q;
    wire_region_rep rep;
    fx_answer a;
    fx_move m;

    start(&w);
    fx_client_open(&d, &w.f);
    g = fx_slots(&w.c, w.ns, 4);
    q = (wire_region_attach_req){.ns = w.ns, .mode = WIRE_ATTACH_TOKEN};
    a = attach(&d, &q, NULL, NULL, 0);
    cr_assert_eq(a.status, KVS_E_NOT_FOUND, "a token of zeros");
    fx_done(&a);
    memcpy(q.token, g.token, 16);
    a = attach(&d, &q, NULL, NULL, 0);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    cr_assert_eq(a.reply->n_fds, 1);
    cr_assert_eq(rep.n_slots, 4);
    fx_done(&a);
    a = attach(&d, &q, NULL, NULL, 0);
    cr_assert_eq(a.status, KVS_E_EXISTS);
    cr_assert_eq(a.reply->n_fds, 0);
    fx_done(&a);
    fx_take(&w.c, &g, 1, &slot);
    m = (fx_move){.ns = w.ns, .region = g.id, .n = 1, .first = 1, .slots = &slot, .flags = WIRE_STORE_KEEP};
    cr_assert_eq(fx_store(&d, &m, NULL), KVS_E_STATE, "private to the other one");
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK);
    m.slots = NULL;
    m.flags = 0;
    cr_assert_eq(fx_load(&d, &m, &r), KVS_OK);
    cr_assert_eq(r.slot, slot.slot);
    fx_unmap(&g);
    fx_gone(&w.c);
    cr_assert_eq(fx_number(&w.admin, WIRE_SECTION_SUMMARY, "regions"), 1);
    cr_assert_eq(fx_load(&d, &m, &r), KVS_OK);
    cr_assert_eq(r.flags, WIRE_LOADED_SHARED | WIRE_LOADED_NO_COPY);
    fx_gone(&d);
    fx_client_open(&w.c, &w.f);
    stop(&w);
}

Test(op_region, a_region_survives_a_restart_of_the_daemon_with_its_blocks)
{
    world w;
    fx_region g;
    wire_slot_ref slot[2];
    wire_region_entry e[3] = {{0}};
    wire_region_attach_req q;
    wire_region_rep rep;
    wire_load_result r;
    fx_answer a;
    fx_move m;
    int fd;

    start(&w);
    g = fx_slots(&w.c, w.ns, 4);
    fx_take(&w.c, &g, 2, slot);
    fx_fill(&g, slot[0].slot, 1);
    fx_fill(&g, slot[1].slot, 2);
    fx_gone(&w.c);
    fx_gone(&w.admin);
    w.f.fds_before += 1; /* the client's descriptor of the region */
    fx_close(&w.f);
    w.f.fds_before = 0;
    fx_open(&w.f);
    fx_client_open(&w.c, &w.f);
    fx_admin_open(&w.admin, &w.f);
    w.ns = fx_ns(&w.c, "m");
    q = (wire_region_attach_req){.ns = w.ns, .n_slots = 4, .mode = WIRE_ATTACH_REOFFER, .n_entries = 3};
    memcpy(q.token, g.token, 16);
    e[0] = (wire_region_entry){.slot = slot[0].slot, .gen = slot[0].gen, .flags = WIRE_ENTRY_SHARED};
    fx_key(e[0].key, 1);
    e[1] = (wire_region_entry){.slot = slot[1].slot, .gen = slot[1].gen};
    e[2] = (wire_region_entry){.slot = 4, .gen = 1};
    fd = dup(g.fd);
    a = attach(&w.c, &q, e, &fd, 1);
    cr_assert_eq(a.status, KVS_E_PARTIAL, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    cr_assert_eq(rep.n_entries, 3);
    cr_assert_eq(memcmp(rep.token, g.token, 16), 0);
    cr_assert_eq(wire_get_u32(&a.in), KVS_OK);
    cr_assert_eq(wire_get_u32(&a.in), KVS_OK);
    cr_assert_eq(wire_get_u32(&a.in), KVS_E_RANGE);
    fx_done(&a);
    m = (fx_move){.ns = w.ns, .region = rep.region, .n = 1, .first = 1};
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_OK, "found on the device alone");
    cr_assert_eq(r.slot, slot[0].slot);
    m.first = 2;
    m.slots = &slot[1];
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK);
    fx_fill(&g, slot[1].slot, 9);
    cr_assert_eq(fx_load(&w.c, &m, &r), KVS_OK);
    cr_assert(fx_holds(&g, slot[1].slot, 2));
    fx_unmap(&g);
    w.f.fds_before -= 1;
    stop(&w);
}

/* An import of whole blocks with n_ipc handles in its body and n_fds descriptors. */
static kvs_status handles_status(world *w, uint32_t memory, uint32_t n_ipc, uint32_t n_sent, bool with_fd)
{
    fx_body *b = fx_new();
    uint64_t id = w->c.next_id++;
    int fd = with_fd ? engine_memory() : -1;
    fx_answer a;
    kvs_status s;

    wire_put_region_import_req(
        &b->out, &(wire_region_import_req){.ns = w->ns, .n_slots = 1, .memory = memory, .n_maps = 1, .n_ipc = n_ipc});
    wire_put_plane_map(&b->out, &(wire_plane_map){0});
    for (uint32_t i = 0; i < n_sent; i++) {
        wire_ipc_handle h = {.uuid = {(uint8_t)(i / 2)}};

        wire_put_ipc_handle(&b->out, &h);
    }
    cr_assert_eq(fx_send_frame(&w->c, WIRE_REGION_IMPORT, id, 0, b, &fd, with_fd ? 1 : 0), KVS_OK);
    a = fx_wait(&w->c, id);
    s = a.status;
    fx_done(&a);
    return s;
}

Test(op_region, ipc_handles_are_counted_and_refused_where_they_do_not_belong)
{
    world w;

    start(&w);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 1, 1, false), KVS_E_UNSUPPORTED, "by the cpu device itself");
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 0, 0, false), KVS_E_INVALID);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 65, 65, false), KVS_E_INVALID);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 2, 1, false), KVS_E_PROTO);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 1, 2, false), KVS_E_PROTO);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, UINT32_MAX, 1, false), KVS_E_PROTO);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 1, 1, true), KVS_E_INVALID, "a descriptor besides");
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_IPC, 3, 3, false), KVS_E_INVALID, "two GPUs; one map for three");
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_MEMFD, 1, 0, true), KVS_E_INVALID);
    cr_assert_eq(handles_status(&w, WIRE_MEMORY_CUDA_VMM, 0, 0, true), KVS_E_UNSUPPORTED);
    stop(&w);
}

Test(op_region, slots_are_taken_all_or_none_and_dropped_after_a_counter)
{
    world w;
    fx_region g;
    wire_slot_ref slot[4];
    fx_body *b;
    uint64_t id;
    fx_answer a;

    start(&w);
    g = fx_slots(&w.c, w.ns, 4);
    fx_take(&w.c, &g, 3, slot);
    b = fx_new();
    wire_put_slot_take_req(&b->out, &(wire_slot_take_req){g.id, 2});
    cr_assert_eq(fx_status(&w.c, WIRE_SLOT_TAKE, b), KVS_E_NO_SPACE);
    b = fx_new();
    wire_put_slot_take_req(&b->out, &(wire_slot_take_req){g.id, 5});
    cr_assert_eq(fx_status(&w.c, WIRE_SLOT_TAKE, b), KVS_E_RANGE);
    b = fx_new();
    wire_put_slot_drop_req(&b->out,
                           &(wire_slot_drop_req){.region = g.id, .n = 3, .after_counter = 9, .after_value = 2});
    for (int i = 0; i < 3; i++)
        wire_put_slot_ref(&b->out, &slot[i]);
    id = fx_send(&w.c, WIRE_SLOT_DROP, b);
    b = fx_new();
    wire_put_region_close_req(&b->out, &(wire_region_close_req){g.id, 0});
    cr_assert_eq(fx_status(&w.c, WIRE_REGION_CLOSE, b), KVS_E_BUSY);
    cr_assert(!fx_has_reply(&w.c, id));
    fx_raise(&w.c, 9, 2);
    a = fx_wait(&w.c, id);
    cr_assert_eq(a.status, KVS_OK);
    fx_done(&a);
    fx_take(&w.c, &g, 4, slot);
    fx_unmap(&g);
    stop(&w);
}

Test(op_region, no_request_takes_more_slots_than_max_keys)
{
    world w;
    fx_region g;
    wire_slot_ref slot[100];
    fx_body *b;

    fx_config(&w.f);
    w.f.cfg.max_body_bytes = 4096; /* 100 keys */
    fx_open(&w.f);
    fx_client_open(&w.c, &w.f);
    fx_admin_open(&w.admin, &w.f);
    w.ns = fx_ns(&w.c, "m");
    g = fx_slots(&w.c, w.ns, 101);
    b = fx_new();
    wire_put_slot_take_req(&b->out, &(wire_slot_take_req){g.id, 101});
    cr_assert_eq(fx_status(&w.c, WIRE_SLOT_TAKE, b), KVS_E_LIMIT);
    fx_take(&w.c, &g, 100, slot);
    fx_unmap(&g);
    stop(&w);
}

/* Symptom: unmapping the memory of one dead client stopped the daemon for all. */
Test(op_region, a_slow_unmapping_holds_up_nobody)
{
    world w;
    fx_client d;
    fx_region g;
    wire_slot_ref slot;
    fx_move m;

    start(&w);
    fx_client_open(&d, &w.f);
    g = fx_slots(&d, w.ns, 2);
    fx_unmap(&g);
    g = fx_slots(&w.c, w.ns, 2);
    fault_device_plan(w.f.dev, &(fault_plan){FAULT_MEM_CLOSE, FAULT_SWALLOW, 1, 1, KVS_OK, 0});
    peer_gone(d.peer, w.f.now_us);
    fault_device_await_held(w.f.dev, 1);
    fx_take(&w.c, &g, 1, &slot);
    m = (fx_move){.ns = w.ns, .region = g.id, .n = 1, .first = 1, .slots = &slot};
    cr_assert_eq(fx_store(&w.c, &m, NULL), KVS_OK);
    cr_assert_eq(fx_status(&w.c, WIRE_HEALTH, fx_new()), KVS_OK);
    cr_assert(!d.closed);
    fault_device_release(w.f.dev);
    while (!d.closed)
        fx_run(&w.f, 1);
    munmap(d.counters, WIRE_COUNTER_PAGE_BYTES);
    fx_unmap(&g);
    stop(&w);
}

static kvs_status status_of(fx_client *c, uint64_t id)
{
    fx_answer a = fx_wait(c, id);

    fx_done(&a);
    return a.status;
}

static fx_region scratch_page(world *w)
{
    return fx_scratch(&w->c, 4096);
}

static void close_region(world *w, fx_region *g)
{
    fx_body *b = fx_new();

    wire_put_region_close_req(&b->out, &(wire_region_close_req){g->id, 0});
    cr_assert_eq(fx_status(&w->c, WIRE_REGION_CLOSE, b), KVS_OK);
    fx_unmap(g);
}

/* Symptom: the thread that makes and unmaps everybody's regions closed what was no memory, for as long as its sender liked. */
Test(op_region, a_descriptor_that_is_slow_to_close_holds_up_nobody)
{
    const wire_plane_map map = {0, 0, 0, FX_SLOT};
    struct timespec began, now;
    lingering l;
    fx_region g;
    fx_body *b;
    uint64_t id;
    world w;
    int fd;

    start(&w);
    lingering_open(&l, 8);
    (void)clock_gettime(CLOCK_MONOTONIC, &began);
    b = fx_new();
    id = w.c.next_id++;
    fd = dup(l.fd);
    cr_assert_eq(fx_send_frame(&w.c, WIRE_PING, id, 0, b, &fd, 1), KVS_OK);
    cr_assert_eq(status_of(&w.c, id), KVS_E_PROTO);
    b = fx_new();
    id = w.c.next_id++;
    wire_put_region_import_req(&b->out, &(wire_region_import_req){.ns = w.ns, .n_slots = 1, .n_maps = 1});
    wire_put_plane_map(&b->out, &map);
    cr_assert_eq(fx_send_frame(&w.c, WIRE_REGION_IMPORT, id, 0, b, &l.fd, 1), KVS_OK);
    cr_assert_eq(status_of(&w.c, id), KVS_E_UNSUPPORTED);
    g = scratch_page(&w);
    close_region(&w, &g);
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    cr_assert_lt(now.tv_sec - began.tv_sec, 4);
    lingering_end(&l);
    stop(&w);
}

/* Symptom: after four billion regions one had number 0, was taken for none and freed while it was listed; and the next ones had
 * the numbers of regions that live. */
Test(op_region, numbers_come_again_only_for_regions_that_are_gone)
{
    fx_region g[5];
    world w;

    start(&w);
    g[0] = scratch_page(&w);
    g[1] = scratch_page(&w);
    w.f.core->next_region = UINT32_MAX;
    for (int i = 2; i < 5; i++)
        g[i] = scratch_page(&w);
    for (int i = 0; i < 5; i++) {
        cr_assert(g[i].id != 0 && g[i].id != WIRE_NONE32);
        for (int k = 0; k < i; k++)
            cr_assert_neq(g[i].id, g[k].id);
    }
    for (int i = 0; i < 5; i++)
        close_region(&w, &g[i]);
    stop(&w);
}

/* Symptom: requests that came before the first ones were answered were counted as nothing. */
Test(op_region, a_client_has_no_more_regions_than_its_limit_however_fast_it_asks)
{
    enum { N = CORE_MAX_REGIONS + 40 };
    fx_region first;
    uint64_t ids[N];
    uint32_t n_ok = 0, n_limit = 0;
    world w;

    fx_config(&w.f);
    w.f.cfg.credit_requests = N;
    fx_open(&w.f);
    fx_client_open(&w.c, &w.f);
    fx_admin_open(&w.admin, &w.f);
    for (int i = 0; i < N; i++) {
        fx_body *b = fx_new();

        wire_put_region_create_req(
            &b->out, &(wire_region_create_req){.ns = WIRE_NONE32, .kind = WIRE_REGION_SCRATCH, .bytes = 4096});
        ids[i] = fx_send(&w.c, WIRE_REGION_CREATE, b);
    }
    for (int i = 0; i < N; i++) {
        kvs_status s = status_of(&w.c, ids[i]);

        n_ok += s == KVS_OK;
        n_limit += s == KVS_E_LIMIT;
    }
    cr_assert_eq(n_ok, CORE_MAX_REGIONS);
    cr_assert_eq(n_limit, N - CORE_MAX_REGIONS);
    fx_gone(&w.c);
    fx_client_open(&w.c, &w.f);
    first = scratch_page(&w);
    fx_unmap(&first);
    stop(&w);
}

static kvs_status attach_token(world *w, const uint8_t token[16])
{
    wire_region_attach_req q = {.ns = WIRE_NONE32, .kind = WIRE_REGION_SCRATCH};
    fx_answer a;

    memcpy(q.token, token, sizeof q.token);
    a = attach(&w->c, &q, NULL, NULL, 0);
    fx_done(&a);
    return a.status;
}

/* Regions of others, which cost them a page each.  Symptom: each key of a DROP, and each ATTACH, looked at all of them. */
Test(op_region, many_regions_of_others_slow_nobody_down)
{
    enum { N = 200000 };
    static region *of_others[N];
    clock_t began;
    fx_region g, mine;
    world w;

    start(&w);
    mine = fx_slots(&w.c, w.ns, 2);
    g = scratch_page(&w);
    for (uint32_t i = 0; i < N; i++) {
        cr_assert_eq(region_create(&of_others[i], WIRE_REGION_SCRATCH, false, 0, 1), KVS_OK);
        of_others[i]->ns = WIRE_NONE32;
        memcpy(of_others[i]->token, &i, sizeof i);
        core_add_region(w.f.core, of_others[i]);
    }
    began = clock();
    for (int i = 0; i < 500; i++)
        cr_assert_eq(attach_token(&w, g.token), KVS_E_EXISTS);
    for (int i = 0; i < 10; i++)
        cr_assert_eq(fx_status(&w.c, WIRE_DROP, fx_keys_body(w.ns, 1, 1000)), KVS_E_PARTIAL);
    cr_assert_lt(clock() - began, 3 * CLOCKS_PER_SEC);
    for (uint32_t i = 0; i < N; i++) {
        core_remove_region(w.f.core, of_others[i]);
        region_destroy(of_others[i]);
    }
    cr_assert_eq(attach_token(&w, g.token), KVS_E_EXISTS);
    close_region(&w, &g);
    fx_unmap(&mine);
    stop(&w);
}

static fx_body *slots_body(uint32_t ns)
{
    fx_body *b = fx_new();

    wire_put_region_create_req(&b->out, &(wire_region_create_req){.ns = ns, .kind = WIRE_REGION_SLOTS, .n_slots = 1});
    return b;
}

static uint32_t create_slots(world *w, kvs_status want)
{
    wire_region_rep rep = {0};
    fx_answer a = fx_call(&w->c, WIRE_REGION_CREATE, slots_body(w->ns));

    cr_assert_eq(a.status, want, "%s", a.msg);
    if (want == KVS_OK)
        wire_get_region_rep(&a.in, &rep);
    else
        cr_assert_not_null(strstr(a.msg, "descriptors"), "%s", a.msg);
    fx_done(&a);
    return rep.region;
}

static void close_number(world *w, uint32_t number)
{
    fx_body *b = fx_new();

    wire_put_region_close_req(&b->out, &(wire_region_close_req){.region = number});
    cr_assert_eq(fx_status(&w->c, WIRE_REGION_CLOSE, b), KVS_OK);
}

/* Symptom: two clients with 256 regions each had every descriptor of a daemon that may have 400: no other client came in, nor did
 * the operator. */
Test(op_region, a_tenants_regions_leave_descriptors_to_the_others)
{
    enum { MOST = 40 };
    uint32_t first = 0, was;
    world w;
    int fd;

    start(&w);
    fd = engine_memory();
    was = w.f.core->client_fds;
    w.f.core->client_fds = 4 * MOST;
    w.f.cfg.n_tenants = 2;
    for (int i = 0; i < MOST - 1; i++)
        first = create_slots(&w, KVS_OK);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, fd), KVS_OK);
    (void)create_slots(&w, KVS_E_LIMIT);
    cr_assert_eq(import_status(&w, 4, (wire_plane_map){0, 0, 0, FX_SLOT}, fd), KVS_E_LIMIT);
    cr_assert_eq(w.f.core->tenants[0].region_fds, MOST);
    close_number(&w, first);
    first = create_slots(&w, KVS_OK);
    close_number(&w, first);
    w.f.core->client_fds = 3; /* all are in use: also a reply's are not given away */
    (void)create_slots(&w, KVS_E_LIMIT);
    w.f.core->client_fds = was;
    (void)close(fd);
    fx_gone(&w.c);
    cr_assert_eq(w.f.core->tenants[0].region_fds, 0);
    fx_client_open(&w.c, &w.f);
    stop(&w);
}
