/* The measuring behind `kvstridectl calibrate`, on the cpu device: its figures mean little there, but come the same way. */
#include "proto/ctl/calibrate.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <string.h>
#include <unistd.h>

#include "tests/support/fault_device.h"

static unsigned n_steps;

static void on_step(uint32_t done, uint32_t of)
{
    n_steps++;
    cr_assert_leq(done, of);
}

static kvs_status open_cpu(void *ud, device **ret, kvs_err *err)
{
    (void)ud;
    return device_cpu_open(ret, err);
}

static kvs_status count(void *ud, bool (*on_call)(void *call_ud), void *call_ud, kvs_err *err)
{
    (void)ud;
    (void)err;
    while (on_call(call_ud))
        (void)usleep(10);
    return KVS_OK;
}

static calibrate_plan plan(void)
{
    /* Two pieces of 72 KiB: three rows a direction. */
    return (calibrate_plan){.open = open_cpu, .bytes = 2 * 73728, .beside_ms = 1, .on_step = on_step};
}

static void expect_rows(const copy_table *t, bool beside)
{
    for (int d = 0; d < 2; d++) {
        cr_assert_eq(t->n[d], 3);
        for (uint32_t i = 0; i < t->n[d]; i++) {
            const copy_row *r = &t->rows[d][i];

            cr_assert(i == 0 || r->piece_bytes > t->rows[d][i - 1].piece_bytes);
            cr_assert(r->engine > 0 && r->kernel > 0 && r->kernel_blocks >= 1);
            cr_assert_eq(r->beside_engine > 0 && r->beside_kernel > 0, beside);
            cr_assert_eq(r->left_by_engine > 0 && r->left_by_kernel > 0, beside);
        }
    }
}

Test(calibrate, fills_a_row_for_each_size_that_fits)
{
    calibrate_plan p = plan();
    copy_table t = {.n = {9, 9}};
    kvs_err err = {0};

    n_steps = 0;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_OK, "%s", err.msg);
    expect_rows(&t, false);
    cr_assert_eq(n_steps, 6);
}

Test(calibrate, measures_beside_a_second_process)
{
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.busy = count;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_OK, "%s", err.msg);
    expect_rows(&t, true);
}

static unsigned peers_wanted, peers_opened;

static kvs_status open_peer(void *ud, uint32_t i, device **ret, kvs_err *err)
{
    if (i >= peers_wanted)
        return kvs_fail(err, KVS_E_NOT_FOUND, "no more");
    peers_opened++;
    return open_cpu(ud, ret, err);
}

Test(calibrate, measures_each_device_that_can_be_read_from)
{
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.open_peer = open_peer;
    peers_wanted = 2;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(peers_opened, 2);
    cr_assert_eq(t.n_peers, 2);
    cr_assert(t.peers[0].gbs > 0 && t.peers[1].gbs > 0);
}

/* The first one has no memory left, the second one is not to be had. */
static kvs_status open_poor(void *ud, uint32_t i, device **ret, kvs_err *err)
{
    const fault_plan full = {.call = FAULT_MEM_CREATE, .action = FAULT_FAIL, .nth = 1, .status = KVS_E_NO_SPACE};
    device *inner = NULL;
    kvs_status s = i == 1 ? kvs_fail(err, KVS_E_DEVICE, "busy") : open_peer(ud, i, &inner, err);

    if (s == KVS_OK)
        s = fault_device_open(inner, ret, err);
    if (s == KVS_OK && i == 0)
        fault_device_plan(*ret, &full);
    return s;
}

static kvs_status open_wrapped(void *ud, device **ret, kvs_err *err)
{
    device *inner = NULL;
    kvs_status s = open_cpu(ud, &inner, err);

    return s == KVS_OK ? fault_device_open(inner, ret, err) : s;
}

Test(calibrate, has_no_row_for_a_device_that_has_no_memory_left)
{
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.open = open_wrapped;
    p.open_peer = open_poor;
    peers_wanted = 3;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(t.n_peers, 1);
}

static kvs_status open_far(void *ud, uint32_t i, device **ret, kvs_err *err)
{
    device *inner = NULL;
    kvs_status s = open_peer(ud, i, &inner, err);

    return s == KVS_OK ? fault_device_open(inner, ret, err) : s; /* of another kind */
}

Test(calibrate, has_no_row_for_a_device_that_is_out_of_reach)
{
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.open_peer = open_far;
    peers_wanted = 1;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_OK, "%s", err.msg);
    cr_assert_eq(peers_opened, 1);
    cr_assert_eq(t.n_peers, 0);
}

static kvs_status open_lying(void *ud, device **ret, kvs_err *err)
{
    kvs_status s = open_wrapped(ud, ret, err);

    if (s == KVS_OK)
        fault_device_set_lying(*ret, true);
    return s;
}

static unsigned n_wrong;

static void on_wrong(const uint8_t uuid[16])
{
    (void)uuid;
    n_wrong++;
}

/* Symptom: where the I/O memory management garbled what GPUs copied from each other, that was fast, and used. */
Test(calibrate, has_no_row_for_a_device_whose_bytes_come_over_wrong)
{
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.on_wrong = on_wrong;
    for (int lying = 0; lying < 2; lying++) {
        p.open = lying ? open_lying : open_wrapped;
        p.open_peer = open_far;
        peers_wanted = 2;
        n_wrong = 0;
        cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_OK, "%s", err.msg);
        cr_assert_eq(t.n_peers, lying ? 0 : 2);
        cr_assert_eq(n_wrong, lying ? 2 : 0);
    }
}

static kvs_status open_none(void *ud, device **ret, kvs_err *err)
{
    (void)ret;
    return kvs_fail(err, KVS_E_UNSUPPORTED, "no device: %s", (const char *)ud);
}

static kvs_status open_and_think_better_of_it(void *ud, device **ret, kvs_err *err)
{
    kvs_status s = device_cpu_open(ret, err);

    (void)ud;
    (*ret)->ops->close(*ret);
    return s == KVS_OK ? kvs_fail(err, KVS_E_CONFIG, "folder: not for us") : s;
}

Test(calibrate, closes_no_device_that_it_was_not_given)
{
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.open = open_and_think_better_of_it;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_E_CONFIG);
    cr_assert_str_eq(err.msg, "folder: not for us");
}

Test(calibrate, says_why_there_is_no_device)
{
    char why[] = "not today";
    calibrate_plan p = plan();
    copy_table t;
    kvs_err err = {0};

    p.open = open_none;
    p.ud = why;
    cr_assert_eq(calibrate_measure(&p, &t, &err), KVS_E_UNSUPPORTED);
    cr_assert_str_eq(err.msg, "no device: not today");
}

typedef struct trouble {
    fault_call call;
    uint64_t nth;
} trouble;

static kvs_status open_faulty(void *ud, device **ret, kvs_err *err)
{
    const trouble *t = ud;
    device *cpu = NULL;
    kvs_status s = device_cpu_open(&cpu, err);

    if (s == KVS_OK)
        s = fault_device_open(cpu, ret, err);
    if (s == KVS_OK)
        fault_device_plan(*ret, &(fault_plan){t->call, FAULT_FAIL, t->nth, 1, KVS_E_DEVICE, 0});
    return s;
}

Test(calibrate, gives_back_everything_wherever_it_fails)
{
    static const trouble all[] = {{FAULT_HOST_REGISTER, 1}, {FAULT_MEM_CREATE, 1}, {FAULT_QUEUE_OPEN, 1},
                                  {FAULT_QUEUE_OPEN, 2},    {FAULT_COPY, 1},       {FAULT_COPY, 7},
                                  {FAULT_WAIT, 5}};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++) {
        trouble t = all[i];
        calibrate_plan p = plan();
        copy_table table = {.driver_version = 5};
        kvs_err err = {0};

        p.open = open_faulty;
        p.ud = &t;
        cr_assert_eq(calibrate_measure(&p, &table, &err), KVS_E_DEVICE, "%zu", i);
        cr_assert_eq(table.driver_version, 5, "nothing is written");
    }
}

static kvs_status ail(void *ud, bool (*on_call)(void *call_ud), void *call_ud, kvs_err *err)
{
    (void)ud;
    (void)on_call;
    (void)call_ud;
    return kvs_fail(err, KVS_E_DEVICE, "feels unwell");
}

static kvs_status vanish(void *ud, bool (*on_call)(void *call_ud), void *call_ud, kvs_err *err)
{
    (void)ud;
    (void)on_call;
    (void)call_ud;
    (void)err;
    return KVS_OK;
}

Test(calibrate, says_what_ails_the_second_process)
{
    calibrate_plan p = plan();
    copy_table table;
    kvs_err err = {0};

    p.busy = ail;
    cr_assert_eq(calibrate_measure(&p, &table, &err), KVS_E_DEVICE);
    cr_assert_str_eq(err.msg, "busy process: feels unwell");
    p.busy = vanish;
    cr_assert_eq(calibrate_measure(&p, &table, &err), KVS_E_SYS);
    cr_assert_str_eq(err.msg, "busy process: it has ended");
}
