/* Which copy table a daemon goes by. */
#include "daemon/calibration.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/support/core_fixture.h"

static char folder[64];
static config conf;
static device_ops ops;
static device dev = {&ops};
static uint32_t driver = 13000;

static void about(const device *d, device_about *ret)
{
    (void)d;
    *ret = (device_about){.name = "Fake 9", .uuid = {1, 2, 3}, .driver_version = driver};
}

static void setup(void)
{
    strcpy(folder, "/tmp/kvs-calibration-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    config_default(&conf);
    strcpy(conf.mover_calibration, folder);
    ops = (device_ops){.name = "fake", .about = about, .copies_by_kernel = true};
}

static void teardown(void)
{
    char command[128];

    (void)snprintf(command, sizeof command, "rm -rf %s", folder);
    cr_assert_eq(system(command), 0);
}

TestSuite(calibration, .init = setup, .fini = teardown);

static void keep(const char *card, uint32_t version)
{
    copy_table t = {.date = "2026-11-30", .uuid = {1, 2, 3}, .driver_version = version, .n = {1, 1}};
    kvs_err err = {0};

    (void)snprintf(t.card, sizeof t.card, "%s", card);
    t.rows[0][0] = t.rows[1][0] = (copy_row){.piece_bytes = 4608, .engine = 2, .kernel = 40, .kernel_blocks = 4};
    cr_assert_eq(copy_table_write(folder, &t, &err), KVS_OK, "%s", err.msg);
}

static calibration read_it(void)
{
    calibration x;

    calibration_read(&x, &conf, &dev);
    return x;
}

Test(calibration, is_the_table_of_this_card_and_driver)
{
    calibration x;

    keep("Fake 9", 13000);
    x = read_it();
    cr_assert(x.is_measured);
    cr_assert_str_eq(x.why, "");
    cr_assert_eq(x.table.rows[0][0].kernel_blocks, 4);
    cr_assert_str_eq(calibration_source(&x, &conf, &dev), "table");
    strcpy(conf.mover_path, "engine");
    cr_assert_str_eq(calibration_source(&x, &conf, &dev), "configuration");
}

Test(calibration, says_why_there_is_none)
{
    calibration x = read_it();

    cr_assert_not(x.is_measured);
    cr_assert(strstr(x.why, "copies-01020300000000000000000000000000.json") != NULL, "%s", x.why);
    cr_assert_str_eq(calibration_source(&x, &conf, &dev), "defaults");
    keep("Fake 8", 13000);
    cr_assert_str_eq(read_it().why, "measured on Fake 8, this is Fake 9");
    keep("Fake 9", 12080);
    x = read_it();
    cr_assert_not(x.is_measured);
    cr_assert_str_eq(x.why, "measured with driver version 12080, this is 13000");
}

Test(calibration, is_not_looked_for_where_there_is_one_means)
{
    calibration x;

    keep("Fake 9", 13000);
    ops.copies_by_kernel = false;
    x = read_it();
    cr_assert_not(x.is_measured);
    cr_assert_str_eq(x.why, "");
    cr_assert_str_eq(calibration_source(&x, &conf, &dev), "device");
}

/* ---- through the core, on the cpu device with a made-up table ---- */

static void keep_rates(double engine, double kernel)
{
    copy_table t = {.date = "2026-11-30", .n = {1, 1}};
    kvs_err err = {0};

    t.rows[0][0] = t.rows[1][0] =
        (copy_row){.piece_bytes = FX_PAGE, .engine = engine, .kernel = kernel, .kernel_blocks = 4};
    cr_assert_eq(copy_table_write(folder, &t, &err), KVS_OK, "%s", err.msg);
}

static void move(fx_client *c, uint32_t ns, const fx_region *g, const wire_slot_ref *slots, uint64_t key)
{
    const fx_move m = {.ns = ns, .region = g->id, .n = 2, .first = key, .slots = slots};
    wire_load_result loaded[2];

    fx_fill(g, slots[0].slot, key);
    fx_fill(g, slots[1].slot, key + 1);
    cr_assert_eq(fx_store(c, &m, NULL), KVS_OK);
    cr_assert_eq(fx_load(c, &m, loaded), KVS_OK);
    cr_assert(fx_holds(g, slots[1].slot, key + 1));
}

Test(calibration, decides_what_a_daemon_copies_with_from_a_reload_on)
{
    wire_slot_ref slots[2];
    uint64_t by_kernel;
    fx_client c, admin;
    fx_region g;
    uint32_t ns;
    fx f;

    fx_config(&f);
    strcpy(f.cfg.mover_calibration, folder);
    fx_open(&f);
    fault_device_pretend(f.dev, 1, true);
    fx_client_open(&c, &f);
    fx_admin_open(&admin, &f);
    ns = fx_ns(&c, "m");
    g = fx_slots(&c, ns, 2);
    fx_take(&c, &g, 2, slots);
    keep_rates(5, 2);
    core_configured(f.core);
    move(&c, ns, &g, slots, 10);
    cr_assert_eq(fault_device_by_kernel(f.dev), 0, "its engines are faster");
    keep_rates(2, 5);
    core_configured(f.core);
    move(&c, ns, &g, slots, 20);
    by_kernel = fault_device_by_kernel(f.dev);
    cr_assert_geq(by_kernel, 2, "a STORE and a LOAD");
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "devices.0.calibration.table.load.0.kernel_blocks"), 4);
    cr_assert_eq(fx_number(&admin, WIRE_SECTION_SUMMARY, "load.kernel_bytes"), 2 * FX_SLOT);
    strcpy(f.cfg.mover_path, "engine");
    core_configured(f.core);
    move(&c, ns, &g, slots, 30);
    cr_assert_eq(fault_device_by_kernel(f.dev), by_kernel);
    fx_unmap(&g);
    fx_gone(&c);
    fx_gone(&admin);
    fx_close(&f);
}
