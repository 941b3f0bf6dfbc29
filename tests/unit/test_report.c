#include <criterion/criterion.h>
#include <string.h>

#include "daemon/report.h"
#include "daemon/request.h"
#include "proto/wire.h"

#define GIB(n) ((uint64_t)(n) << 30)

Test(report, says_how_far_the_pool_is_pinned)
{
    report r = {0};
    report_facts f = {.usable_bytes = 256 << 20, .max_bytes = GIB(16), .note = ""};

    cr_assert(report_update(&r, &f, 1));
    cr_assert_str_eq(r.line, "serving; pool: 256 MiB of 16 GiB pinned so far");
    cr_assert(!report_update(&r, &f, 2), "the same once more is not news");
    f.usable_bytes = GIB(2);
    cr_assert(!report_update(&r, &f, 999999), "progress waits for its second");
    cr_assert(report_update(&r, &f, 1000001));
    cr_assert_str_eq(r.line, "serving; pool: 2 GiB of 16 GiB pinned so far");
    f.usable_bytes = GIB(16);
    cr_assert(report_update(&r, &f, 1000002), "the end of it does not");
    cr_assert_str_eq(r.line, "serving; pool: 16 GiB pinned");
}

Test(report, says_why_it_is_degraded)
{
    report r = {0};
    report_facts f = {.usable_bytes = GIB(1),
                      .max_bytes = GIB(4),
                      .health = WIRE_HEALTH_DEGRADED,
                      .reasons = HEALTH_PIECE_FAILED | HEALTH_OLD_CONFIG,
                      .note = "/etc/x.json: limits.max_clients: 0 is outside 1..65536"};

    cr_assert(report_update(&r, &f, 1));
    cr_assert_str_eq(r.line, "degraded: the pool could not grow to its full size, the configuration was refused, the "
                             "last accepted one is in use; pool: 1 GiB of 4 GiB pinned so far; /etc/x.json: "
                             "limits.max_clients: 0 is outside 1..65536");
    f.reasons = HEALTH_PIECE_FAILED;
    f.note = "";
    cr_assert(report_update(&r, &f, 2), "nothing more will come, so it need not wait");
}

Test(report, reasons_that_do_not_fit_are_cut)
{
    char buf[32];

    report_reasons(buf, sizeof buf, 0);
    cr_assert_str_eq(buf, "");
    report_reasons(buf, sizeof buf, UINT32_MAX);
    cr_assert_eq(strlen(buf), sizeof buf - 1);
}

Test(report, a_note_cannot_speak_to_the_manager)
{
    report r = {0};
    report_facts f = {.usable_bytes = GIB(1), .max_bytes = GIB(1), .note = "a\nREADY=1 \302\23331m"};

    cr_assert(report_update(&r, &f, 1));
    cr_assert_not_null(strstr(r.line, "; a?READY=1 ??31m"), "%s", r.line);
}

Test(report, a_long_note_is_cut)
{
    static char note[4 * REPORT_BYTES];
    report r = {0};
    report_facts f = {.usable_bytes = GIB(1), .max_bytes = GIB(1), .note = note};

    memset(note, 'x', sizeof note - 1);
    cr_assert(report_update(&r, &f, 1));
    cr_assert_eq(strlen(r.line), REPORT_BYTES - 1);
}
