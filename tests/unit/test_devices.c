#include "tests/support/core_fixture.h"

#include <criterion/criterion.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* A daemon with two devices: one pool, regions on either, each with workers of its own. */

typedef struct world {
    fx f;
    fx_client c, admin;
    uint32_t ns;
} world;

static void start(world *w)
{
    fx_config(&w->f);
    fx_open_two(&w->f);
    fx_client_open(&w->c, &w->f);
    fx_admin_open(&w->admin, &w->f);
    w->ns = fx_ns(&w->c, "m");
}

static void stop(world *w)
{
    fx_gone(&w->c);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_SUMMARY, "region_bytes"), 0);
    cr_assert_eq(fx_number(&w->admin, WIRE_SECTION_FSCK, "ok"), 1);
    fx_gone(&w->admin);
    fx_close(&w->f);
}

static double summary(world *w, const char *path)
{
    return fx_number(&w->admin, WIRE_SECTION_SUMMARY, path);
}

Test(devices, hello_lists_them_to_a_client_that_asks)
{
    wire_hello_req q = {.version_min = 1, .version_max = 1, .features = WIRE_FEATURE_DEVICES | UINT64_C(1) << 40};
    world w;
    fx_client c;
    fx_body *b = fx_new();
    wire_hello_rep rep;
    wire_hello_devices d;
    wire_device_entry e;
    fx_answer a;

    start(&w);
    fx_connect(&c, &w.f, false);
    wire_put_hello_req(&b->out, &q);
    a = fx_call(&c, WIRE_HELLO, b);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_hello_rep(&a.in, &rep);
    cr_assert_eq(rep.features, WIRE_FEATURE_DEVICES);
    wire_get_hello_devices(&a.in, &d);
    cr_assert_eq(d.n_devices, 2);
    for (int i = 0; i < 2; i++) {
        wire_get_device_entry(&a.in, &e);
        cr_assert_eq(memcmp(e.uuid, (uint8_t[16]){0}, 16), 0);
    }
    cr_assert(wire_in_done(&a.in));
    fx_done(&a);
    fx_gone(&c);
    stop(&w);
}

/* Symptom: the block was there, but only for clients of the GPU that had stored it. */
Test(devices, a_block_stored_from_one_is_loaded_on_the_other)
{
    world w;
    fx_region from, to;
    wire_slot_ref slots[3];
    wire_load_result r[3];

    start(&w);
    from = fx_slots_on(&w.c, 1, w.ns, 4);
    to = fx_slots_on(&w.c, 0, w.ns, 4);
    cr_assert_eq(summary(&w, "devices"), 2);
    cr_assert_gt(summary(&w, "devices.0.region_bytes"), 0);
    cr_assert_eq(summary(&w, "devices.1.region_bytes"), from.bytes);
    fx_take(&w.c, &from, 3, slots);
    for (uint32_t i = 0; i < 3; i++)
        fx_fill(&from, slots[i].slot, 100 + i);
    cr_assert_eq(fx_store(&w.c, &(fx_move){.ns = w.ns, .region = from.id, .n = 3, .first = 100, .slots = slots}, NULL),
                 KVS_OK);
    cr_assert_eq(fx_load(&w.c, &(fx_move){.ns = w.ns, .region = to.id, .n = 3, .first = 100}, r), KVS_OK);
    for (uint32_t i = 0; i < 3; i++)
        cr_assert(fx_holds(&to, r[i].slot, 100 + i));
    cr_assert_eq(summary(&w, "devices.1.store.blocks"), 3);
    cr_assert_eq(summary(&w, "devices.0.store.blocks"), 0);
    cr_assert_eq(summary(&w, "devices.1.load.blocks"), 0);
    cr_assert_eq(summary(&w, "devices.0.load.blocks"), 3);
    cr_assert_eq(summary(&w, "store.blocks"), 3);
    cr_assert_eq(summary(&w, "load.blocks"), 3);
    fx_unmap(&from);
    fx_unmap(&to);
    stop(&w);
}

/* Symptom: the copies of all GPUs stood in one line behind the slowest. */
Test(devices, one_that_hangs_does_not_hold_up_the_other)
{
    world w;
    fx_region slow, fast;
    wire_slot_ref a[1], b[1];
    uint64_t id;
    fx_answer late;

    start(&w);
    slow = fx_slots_on(&w.c, 0, w.ns, 2);
    fast = fx_slots_on(&w.c, 1, w.ns, 2);
    fx_take(&w.c, &slow, 1, a);
    fx_take(&w.c, &fast, 1, b);
    fault_device_plan(w.f.dev, &(fault_plan){.call = FAULT_COPY, .action = FAULT_SWALLOW, .nth = 1, .count = 1});
    id = fx_send(&w.c, WIRE_STORE,
                 fx_store_body(&(fx_move){.ns = w.ns, .region = slow.id, .n = 1, .first = 1, .slots = a}));
    fault_device_await_held(w.f.dev, 1);
    for (uint64_t k = 10; k < 20; k++)
        cr_assert_eq(fx_store(&w.c, &(fx_move){.ns = w.ns, .region = fast.id, .n = 1, .first = k, .slots = b}, NULL),
                     KVS_OK);
    cr_assert_not(fx_has_reply(&w.c, id));
    fault_device_release(w.f.dev);
    late = fx_wait(&w.c, id);
    cr_assert_eq(late.status, KVS_OK, "%s", late.msg);
    fx_done(&late);
    fx_unmap(&slow);
    fx_unmap(&fast);
    stop(&w);
}

Test(devices, a_number_that_is_none_is_refused_with_the_limit)
{
    world w;
    fx_answer a;
    fx_body *b = fx_new();

    start(&w);
    wire_put_region_create_req(&b->out, &(wire_region_create_req){.ns = w.ns, .device = 2, .n_slots = 1});
    a = fx_call(&w.c, WIRE_REGION_CREATE, b);
    cr_assert_eq(a.status, KVS_E_RANGE);
    cr_assert_not_null(strstr(a.msg, "device: 2 is not below 2"), "%s", a.msg);
    fx_done(&a);
    b = fx_new(); /* new memory is not anywhere yet */
    wire_put_region_create_req(&b->out, &(wire_region_create_req){.ns = w.ns, .device = WIRE_NONE32, .n_slots = 1});
    cr_assert_eq(fx_status(&w.c, WIRE_REGION_CREATE, b), KVS_E_RANGE);
    stop(&w);
}

static fx_answer import(world *w, uint32_t on)
{
    fx_body *b = fx_new();
    uint64_t id = w->c.next_id++;
    int fd = memfd_create("engine", MFD_CLOEXEC | MFD_ALLOW_SEALING);

    cr_assert_eq(posix_fallocate(fd, 0, 4 * FX_SLOT), 0);
    cr_assert_eq(fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK), 0);
    wire_put_region_import_req(&b->out,
                               &(wire_region_import_req){.ns = w->ns, .device = on, .n_slots = 4, .n_maps = 1});
    wire_put_plane_map(&b->out, &(wire_plane_map){.stride = FX_SLOT});
    cr_assert_eq(fx_send_frame(&w->c, WIRE_REGION_IMPORT, id, 0, b, &fd, 1), KVS_OK);
    return fx_wait(&w->c, id);
}

/* The first device does not know the memory; the second one does. */
Test(devices, an_import_finds_the_device_that_it_is_on)
{
    const fault_plan refuse = {.call = FAULT_MEM_IMPORT, .action = FAULT_FAIL, .nth = 1, .status = KVS_E_INVALID};
    wire_slot_ref slot = {3, 0};
    wire_region_rep rep;
    world w;
    fx_answer a;

    start(&w);
    fault_device_plan(w.f.dev, &refuse);
    a = import(&w, 0);
    cr_assert_eq(a.status, KVS_E_INVALID);
    fx_done(&a);
    a = import(&w, WIRE_NONE32);
    cr_assert_eq(a.status, KVS_OK, "%s", a.msg);
    wire_get_region_rep(&a.in, &rep);
    fx_done(&a);
    cr_assert_eq(fx_store(&w.c, &(fx_move){.ns = w.ns, .region = rep.region, .n = 1, .first = 7, .slots = &slot}, NULL),
                 KVS_OK);
    cr_assert_eq(summary(&w, "devices.1.store.blocks"), 1);
    stop(&w);
}

Test(devices, scratch_of_another_device_is_refused)
{
    world w;
    fx_region g, s;
    wire_slot_ref slot;
    fx_body *b = fx_new();
    fx_answer a;

    start(&w);
    g = fx_slots_on(&w.c, 0, w.ns, 2);
    s = fx_scratch_on(&w.c, 1, 65536);
    fx_take(&w.c, &g, 1, &slot);
    wire_put_write_req(&b->out, &(wire_write_req){.ns = w.ns,
                                                  .region = g.id,
                                                  .n_tokens = 1,
                                                  .n_calls = 1,
                                                  .after_counter = WIRE_NONE32,
                                                  .signal_counter = WIRE_NONE32});
    wire_put_write_call(
        &b->out, &(wire_write_call){.scratch = s.id, .kv_c_stride = 1024, .k_pe_offset = 8192, .k_pe_stride = 128});
    wire_put_u64(&b->out, (uint64_t)slot.slot * FX_TOKENS);
    a = fx_call(&w.c, WIRE_WRITE, b);
    cr_assert_eq(a.status, KVS_E_INVALID);
    cr_assert_not_null(strstr(a.msg, "is on device 1, the slots are on 0"), "%s", a.msg);
    fx_done(&a);
    fx_unmap(&g);
    fx_unmap(&s);
    stop(&w);
}
